"""``ZenFlow``: the boundary in which only the important columns wait for nobody.

    every step           important columns: Adam on the device, at once; the others: summed up in host memory
    every window         the sums are applied in host memory; with ``overlap`` while the next steps run
    every select_steps   what waits is applied, then columns are chosen anew from the gradients of this step
    first warm_up steps  as without ZenFlow

Source of the algorithm: "ZenFlow: Enabling Stall-Free Offloading Training via Asynchronous Updates". What is important,
how moments follow their elements and what becomes of a window is written down in docs/offload.md.

Owns: when what happens, who is up to date, resuming. Does not own: the two updates (``important.py``, ``deferred.py``),
the choice (``selection.py``), the order of collectives (``stepper.py``).
Invariants: a step's result depends on nothing but gradients, hyper-parameters and step numbers, however fast a thread
is. Readers of masters and states call :meth:`hold_still` first; from then to the next step the host's copies count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.comm import collectives
from deepspeed.runtime.zero.options import ZenFlowOptions
from deepspeed.runtime.zero.routes import ShardRanks
from deepspeed.runtime.zero.shard_group import HostGrads, ShardGroup
from deepspeed.runtime.zero.stepper import Unit
from deepspeed.runtime.zero.zenflow import resume
from deepspeed.runtime.zero.zenflow.deferred import DeferredPart, PieceGrad
from deepspeed.runtime.zero.zenflow.important import ImportantPart
from deepspeed.runtime.zero.zenflow.pieces import Piece
from deepspeed.runtime.zero.zenflow.selection import chosen_count, column_squares, largest, move

if TYPE_CHECKING:
    from deepspeed.runtime.zero.norm import BoundaryFacts


class ZenFlow:
    """See the module docstring. ``units`` are all of the stepper, ``base`` their optimizer: one of our Adams.

    ``shards``: the ranks that share the states. ``publish(group, segment)`` sends new weights on their way.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        groups: Sequence[ShardGroup],
        units: Sequence[Unit],
        options: ZenFlowOptions,
        shards: ShardRanks,
        publish: Callable[[ShardGroup, Any], None],
    ) -> None:
        self.base, self.groups, self.options, self.shards, self.publish = base, list(groups), options, shards, publish
        self.units = [unit for unit in units if unit.group.offloaded]
        self.left = [unit for unit in units if not unit.group.offloaded]  # updated as always (twin-flow)
        self.pieces = [Piece(unit, bound) for unit in self.units for bound in unit.fragments if bound.fragment.numel]
        host = next(unit.group.host for unit in self.units if unit.group.host is not None)
        self.important = ImportantPart(base, self.pieces, host, offload=options.offload)
        self.deferred = DeferredPart(
            base,
            [piece for piece in self.pieces if piece.columns > 1],
            overlap=options.overlap,
            measure=options.update_interval is None,
            threads=options.threads,
            told_at_boundary=shards.world > 1,
        )
        self.select_steps = options.select_steps  # steps between choices; None: to be set before the first step
        self.rounds = 0  # steps made, those of the warm-up included
        self.selected = False  # every piece has its columns
        self.outdated = False  # and they are to be chosen anew at once
        self._host_counts = True  # leaves and states in host memory are up to date, and the packed copies need not be
        self._spare: dict[int, HostGrads] = {}  # by group, read by the accumulator since the last step
        self._landing: dict[tuple[int, int], list[Piece]] = {}  # (group, segment or position) -> pieces
        for piece in self.pieces:
            key = piece.bound.segment if piece.group.sharded else piece.bound.position
            self._landing.setdefault((id(piece.group), key), []).append(piece)
        for group in {id(unit.group): unit.group for unit in self.units}.values():
            group.on_device_grad = self._take

    def chosen_of(self, columns: int) -> int:
        """How many of the columns of a weight are important."""
        return chosen_count(columns, self.options.topk)

    # ---- during backward -------------------------------------------------------------------------------------------

    def _take(self, group: ShardGroup, key: int, grad: torch.Tensor) -> None:
        """``grad`` is on the device, and on its way to host memory: a segment's piece, or a parameter's gradient."""
        for piece in self._landing.get((id(group), key), ()):
            held = group.grad_of(piece.bound)
            taken = self.important.take(piece, group.grad_view(piece.bound, grad) if group.sharded else grad)
            piece.landed = held._version if taken and held is not None else -1

    # ---- the boundary ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, facts: BoundaryFacts, scale: float) -> list[Unit]:
        """One step from the gradients of this window, multiplied by ``scale``. Collective.

        Returns the units that are to be updated as without ZenFlow. A failure of the host update is raised here where
        there is one rank; else at the next boundary, by all (:meth:`failure`).
        """
        squares = self.deferred.wait_for_gradients()
        self._take_back()
        self.rounds += 1
        if self.rounds <= self.options.warm_up and not self.selected:
            return [*self.units, *self.left]
        landed: list[Piece] = []
        due = (self.rounds - self.options.warm_up - 1) % self._interval() == 0
        if due or self.outdated or not self.selected:
            landed += self._select(facts)
        touched = [piece for piece in self.pieces if facts.touched[piece.unit.number][piece.bound.position]]
        ends = self._window_ends(squares, scale, touched)
        if ends and self.options.overlap:
            landed += self.deferred.land()
        self._fetch_important(touched)
        self.important.update(touched, scale)
        self._defer(touched, scale, ends=ends)
        if ends and not self.options.overlap:
            landed += self.deferred.land()
        self.important.publish({id(piece): piece for piece in [*landed, *touched]}.values())
        for unit in self.units:
            for segment in unit.segments if unit.group.sharded else ():
                self.publish(unit.group, segment)
        return self.left

    def failure(self) -> BaseException | None:
        """What has gone wrong in the host update of this rank, if anything. For the boundary, before the update."""
        return self.deferred.failure()

    def _interval(self) -> int:
        assert self.select_steps is not None, "nobody has said how many steps an epoch has"
        return self.select_steps

    def _window_ends(self, squares: float, scale: float, touched: Sequence[Piece]) -> bool:
        """Whether this step is the last of its window. With an interval of "auto" all ranks ask each other."""
        if self.options.update_interval is not None:
            return self.deferred.steps + 1 >= self.options.update_interval
        self._fetch_important(touched)
        own = torch.tensor([squares, self.important.squares(touched, scale)], dtype=torch.float64)
        if self.shares():
            own = own.to(self.groups[0].device)
            what = "ZenFlow's pending and important norms"
            collectives.all_reduce(own, self.shards.group, op="sum", what=what, deterministic=True).wait()
        pending, important = own.tolist()
        return math.sqrt(pending) > self.options.auto_ratio * math.sqrt(important) if self.deferred.steps else False

    def shares(self) -> bool:
        """Whether other ranks own parts of the weights, so that what is decided is decided together."""
        return any(group.sharded for group in self.groups) and self.shards.world > 1

    def _fetch_important(self, touched: Sequence[Piece]) -> None:
        """What is not on the device comes from host memory: columns are new, or somebody has written to gradients."""
        for piece in touched:
            held = piece.group.grad_of(piece.bound)
            if held is not None and piece.landed != held._version:
                self.important.take(piece, held)
                piece.landed = held._version

    def _defer(self, touched: Sequence[Piece], scale: float, *, ends: bool) -> None:
        given: list[PieceGrad] = []
        for piece in touched:
            grad = piece.group.grad_of(piece.bound)
            if grad is not None and not piece.whole:
                given.append((piece, grad))
        for piece in self.pieces:
            piece.landed = -1
        self.deferred.add(given, scale, ends=ends)
        if self.options.overlap:  # backward fills other memory while these are read
            for group in {id(unit.group): unit.group for unit in self.units}.values():
                self._spare[id(group)] = group.exchange_host_grads(self._spare.pop(id(group), None))

    def _select(self, facts: BoundaryFacts) -> list[Piece]:
        """Apply what waits, then choose; returns the pieces whose weights have changed in the model."""
        landed = self.settle()
        if self.selected:
            self.important.publish(landed)  # with the columns of before
            self.important.store()
        sums = column_squares(self.groups, self.shards.group)
        numbers = {id(group): number for number, group in enumerate(self.groups)}
        for piece in self.pieces:
            count = self.chosen_of(piece.columns)
            place = (numbers[id(piece.group)], piece.bound.position)
            chosen: Sequence[int] | None = None if count == piece.columns else largest(sums[place], count)
            without = not facts.touched[piece.unit.number][piece.bound.position]
            if without and piece.cut is not None and piece.columns > 1:
                chosen = piece.cut.chosen  # a weight without a gradient has no reason to change its mind
            move(self.base, piece, chosen)
        self.selected, self.outdated = True, False
        self.important.load()
        return landed

    def settle(self) -> list[Piece]:
        """Apply all that waits for the end of its window; returns the pieces whose weights changed in the model."""
        landed = self.deferred.land()
        if self.deferred.steps:
            self.deferred.begin_update()
            landed += self.deferred.land()
        return landed

    # ---- between steps ---------------------------------------------------------------------------------------------

    def hold_still(self) -> None:
        """Masters and states in host memory are those of the last step when this returns, and may be written to.

        What waits for its window is beside them, in states that :meth:`adopt` reads back.
        """
        self.deferred.hold_still()
        if self._host_counts:
            return
        self.important.store()
        resume.write(self)
        self._host_counts = True

    def _take_back(self) -> None:
        """The packed copies count again."""
        if self._host_counts:
            resume.forget(self)
            if self.selected:
                self.important.load()
        self._host_counts = False

    def leave_device(self) -> None:
        """Let go of what is on the device until the next step. Readers' rules hold: see :meth:`hold_still`."""
        self.hold_still()
        self.important.drop()

    def adopt(self, *, with_states: bool) -> None:
        """Go on from leaves and states that were loaded. Collective.

        ``with_states`` False: only weights and masters were; the window that had begun is given up.
        """
        if with_states:
            self.deferred.forget_failure()  # all that it may have spoilt has been loaded anew
        self.deferred.hold_still()
        self._spare = {}
        self.important.drop()
        resume.read(self, with_states=with_states)
        self._host_counts = True

    def close(self) -> None:
        """End the threads, once they are done, and let go of everything."""
        for unit in self.units:
            unit.group.on_device_grad = None
        self.deferred.close()
        self._spare, self._landing = {}, {}

    # ---- accounts --------------------------------------------------------------------------------------------------

    def storages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(kind, tensor)`` of everything held beside the groups; kinds as in ``accounting.py``."""
        yield from self.important.storages()
        yield from (("host", tensor) for tensor in self.deferred.storages())
        for spare in self._spare.values():
            yield from (("host", tensor) for tensor in spare.storages())

    def expected_bytes(self) -> dict[str, int]:
        """The formula of docs/offload.md for this rank, by kind; before the first choice to the nearest column."""
        options = self.options
        sums = (0 if options.update_interval == 1 else 4) * (2 if options.overlap else 1)
        totals = {"master": 0, "optimizer": 0, "gradient": 0, "host": 0}
        for piece in self.pieces:
            numel = piece.bound.fragment.numel
            share = self.chosen_of(piece.columns) / piece.columns
            important = piece.cut.numel if piece.cut is not None else int(numel * share)
            width = piece.bound.leaf.element_size()
            totals["master"] += important * width
            totals["host" if options.offload else "optimizer"] += 2 * important * width
            totals["gradient"] += important * piece.group.accum_dtype.itemsize
            totals["host"] += numel * (sums + piece.group.dtype.itemsize) if share < 1 else 0
            totals["host"] += numel * piece.group.accum_dtype.itemsize if options.overlap else 0
        return totals
