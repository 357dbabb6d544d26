"""``Speculation`` (SuperOffload): units are updated in host memory while backward still runs, and undone if need be.

An update has to wait for the global norm: it may be clipped, or skipped. Most steps of a run are neither. So as soon as
the gradients of an offloaded unit have reached host memory in the backward that ends a window, a worker updates it as
if nothing was clipped. At the boundary every unit whose guess was right is ready to be sent to the device; the others
are put back to what they were, bit for bit, and updated as always.

Owns: when a unit is ready, the worker, the copies it is put back from (one of masters and states, one of the new
weights: as much host memory again). Does not own: the arithmetic (``update_from`` of the optimizer), the order of units
and publishing (``stepper.py``).
Invariants: the model's weights change in ``commit`` alone; masters and states that anybody reads outside of a step are
those of the last step (:meth:`roll_back` runs before).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.runtime.zero.fused_update import Row, rows_of, send, settings_of
from deepspeed.utils.logging import warning_once

if TYPE_CHECKING:
    from deepspeed.runtime.zero.norm import BoundaryFacts
    from deepspeed.runtime.zero.shard_group import ShardGroup
    from deepspeed.runtime.zero.stepper import Unit


@dataclass(eq=False)
class _Guess:
    """One unit in one window."""

    unit: Unit
    waiting: set[int]  # segments (sharded) or positions of parameters whose gradients are not here yet
    scale: float = 1.0
    settings: dict[str, Any] = field(default_factory=dict)  # of the parameter group, when the worker began
    job: Future[bool] | None = None
    wrong: bool = False  # a gradient changed afterwards
    undo: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (tensor, what it was)
    before: dict[torch.Tensor, dict[str, Any] | None] = field(default_factory=dict)  # leaf -> its state, None: fresh


class Speculation:
    """Guesses over ``units``; ``at_boundary`` and ``unscale`` are asked at the start of each backward."""

    def __init__(
        self,
        base: torch.optim.Optimizer,
        units: Sequence[Unit],
        *,
        at_boundary: Callable[[], bool],
        unscale: Callable[[], float],
    ) -> None:
        self.base = base
        self.units = [unit for unit in units if unit.group.offloaded and not unit.group.on_disk and unit.fragments]
        self.at_boundary, self.unscale = at_boundary, unscale
        self.right = self.undone = 0  # units, for counters
        self._guesses: dict[int, _Guess] = {}
        self._of: dict[tuple[int, int], list[int]] = {}  # (group, segment or position) -> units
        self._stages: dict[int, torch.Tensor] = {}
        self._copies: dict[tuple[int, str], torch.Tensor] = {}
        self._scale = 1.0
        self._touched: list[bytes] | None = None  # per group, per parameter: it had a gradient in the last window
        self._worker: ThreadPoolExecutor | None = None
        for unit in self.units:
            for key in _keys(unit):
                self._of.setdefault((id(unit.group), key), []).append(id(unit))

    # ---- during backward -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward starts. Guesses of an earlier one in this window are wrong: there will be more gradient."""
        self.roll_back()
        if self.at_boundary() and rows_of(self.base) is not None:
            self._scale = self.unscale()
            self._guesses = {id(unit): _Guess(unit, self._awaited(unit)) for unit in self.units}

    def _expects(self, unit: Unit, position: int) -> bool:
        """Whether the parameter had a gradient in the last window, and so may have one in this."""
        return self._touched is None or bool(self._touched[unit.number][position])

    def _awaited(self, unit: Unit) -> set[int]:
        keys = _keys(unit)
        return set(keys) if unit.group.sharded else {key for key in keys if self._expects(unit, key)}

    def landed(self, group: ShardGroup, key: int) -> None:
        """The gradients of a segment (sharded groups) or parameter have been sent to host memory."""
        for number in self._of.get((id(group), key), ()):
            guess = self._guesses.get(number)
            if guess is None:
                continue
            guess.waiting.discard(key)
            if guess.job is not None:
                guess.wrong = True
            elif not guess.waiting:
                self._start(guess)

    def _start(self, guess: _Guess) -> None:
        group = self.base.param_groups[guess.unit.group.group_index]
        guess.settings = settings_of(group)
        guess.scale = self._scale
        event: Any = None
        if not get_accelerator().is_synchronized_device():
            event = get_accelerator().Event()
            event.record()
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="deepspeed-speculation")
        guess.job = self._worker.submit(self._update, guess, event)

    def _update(self, guess: _Guess, event: Any) -> bool:
        """On the worker: keep what is there, then update. False where the optimizer cannot take these tensors."""
        if event is not None:
            event.synchronize()
        unit, driven = guess.unit, rows_of(self.base)
        staged = self._stage(unit)
        rows: list[Row] = []
        for bound in unit.fragments:
            if not self._expects(unit, bound.position):
                unit.part(bound, staged).copy_(bound.leaf.detach())
                continue
            grad = unit.group.grad_of(bound)
            if grad is None:
                return False
            rows.append((bound.leaf, grad, unit.part(bound, staged)))
        if driven is None or not driven.takes_rows(rows):
            return False
        self._keep(guess)
        driven.update_from(rows, guess.scale)
        return True

    def _stage(self, unit: Unit) -> torch.Tensor:
        """Where the new weights wait, in the model's dtype.  # 1D"""
        staged = self._stages.get(id(unit))
        if staged is None:
            assert unit.group.host is not None
            staged = unit.group.host.zeros(unit.numel, unit.group.dtype, unit.group.device)
            self._stages[id(unit)] = staged
        return staged

    @torch.no_grad()
    def _keep(self, guess: _Guess) -> None:
        """Copies of masters and states, to put back."""
        unit = guess.unit
        for bound in unit.fragments:
            state = self.base.state.get(bound.leaf)
            guess.before[bound.leaf] = dict(state) if state else None
            tensors = {"": bound.leaf.detach()} | {
                key: value for key, value in (state or {}).items() if isinstance(value, torch.Tensor)
            }
            for key, tensor in tensors.items():
                place = (id(bound), key)
                kept = self._copies.get(place)
                if kept is None:
                    kept = self._copies[place] = torch.empty_like(tensor)
                guess.undo.append((tensor, kept.copy_(tensor)))

    # ---- at the boundary -------------------------------------------------------------------------------------------

    def settle(self, facts: BoundaryFacts, scale: float) -> None:
        """Wait for the worker, and put back every unit whose guess was not this step."""
        for guess in self._guesses.values():
            if not self._is_right(guess, facts, scale):
                self._undo(guess)
        self._touched = facts.touched

    def _is_right(self, guess: _Guess, facts: BoundaryFacts, scale: float) -> bool:
        if not self._has_ended_well(guess):
            return False
        unit = guess.unit
        group = self.base.param_groups[unit.group.group_index]
        settings = {key: value for key, value in group.items() if key != "params"}
        touched = facts.touched[unit.number]
        alike = all(bool(touched[b.position]) == self._expects(unit, b.position) for b in unit.fragments)
        return alike and not guess.wrong and guess.scale == scale and settings == guess.settings

    def _has_ended_well(self, guess: _Guess) -> bool:
        """Wait for the worker. A failure of its is one more wrong guess: the update at the boundary is another try."""
        try:
            return guess.job is not None and guess.job.result()
        except Exception as error:
            warning_once(
                f"an update of super_offload during backward has failed, and is undone: {type(error).__name__}: "
                f"{error}. Its unit is updated in step() instead, which raises if it fails there, too"
            )
            return False

    def commit(self, unit: Unit) -> bool:
        """Send the new weights of ``unit`` to the model if they are ready; False: it is to be updated as always."""
        guess = self._guesses.pop(id(unit), None)
        if guess is None or guess.job is None or not guess.undo:
            return False
        send(unit, self._stage(unit))
        self.right += 1
        return True

    def roll_back(self) -> None:
        """Put everything back that has been updated and not committed. No guess is left, nor made in this backward:

        who asked may go on to write to gradients, and some of them may still be on their way.
        """
        for guess in self._guesses.values():
            self._has_ended_well(guess)
            self._undo(guess)
        self._guesses.clear()

    @torch.no_grad()
    def _undo(self, guess: _Guess) -> None:
        if not guess.undo:
            return
        for tensor, kept in guess.undo:
            tensor.copy_(kept)
        for leaf, state in guess.before.items():
            if state is None:
                self.base.state.pop(leaf, None)
            else:
                self.base.state[leaf].update({k: v for k, v in state.items() if not isinstance(v, torch.Tensor)})
        guess.undo, guess.before = [], {}
        self.undone += 1

    def close(self) -> None:
        """Stop the worker."""
        self.roll_back()
        if self._worker is not None:
            self._worker.shutdown()
        self._stages.clear()
        self._copies.clear()


def _keys(unit: Unit) -> list[int]:
    if unit.group.sharded:
        return [segment.index for segment in unit.segments]
    return [bound.position for bound in unit.fragments]
