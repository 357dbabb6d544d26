"""What others look up, write and move in a ``ZeroOptimizer`` between steps: parameters, masters, states, bytes held.

Owns: finding a parameter's shard, taking up edits of weights or masters, and the calls that move states away and back.
Does not own: the step and what leads to it (``optimizer.py``).
Invariant: whatever reads or writes masters and states first waits for the threads that do.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from deepspeed.runtime.zero import accounting
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import offload_zero_states, reload_zero_states
from deepspeed.runtime.zero.shard_group import BoundFragment, ShardGroup

if TYPE_CHECKING:
    from deepspeed.runtime.zero.executors import Executors


class OptimizerAccess:
    """Mixin of ``ZeroOptimizer``, whose attributes these are."""

    groups: list[ShardGroup]
    names: dict[int, str]
    reducer: Any
    publisher: Any
    executors: Executors
    await_readers: Callable[[], None]

    def hold_still(self) -> None: ...
    def _refuse_if_destroyed(self) -> None: ...

    def find(self, param: nn.Parameter) -> tuple[ShardGroup, int]:
        """``(group, position)`` of ``param``. Raises KeyError naming it when this optimizer does not hold it."""
        for group in self.groups:
            for position, held in enumerate(group.params):
                if held is param:
                    return group, position
        raise KeyError(
            f"parameter {self.names.get(id(param), '?')!r} is not held by this optimizer (frozen or foreign)"
        )

    def bound_to(self, param: nn.Parameter) -> list[BoundFragment]:
        """This rank's fragments of ``param`` (empty when other ranks own all of it)."""
        group, position = self.find(param)
        return [bound for bound in group.fragments if bound.position == position]

    def refresh_fp32_params(self) -> None:
        """Masters take the model's current weights (after weights were written behind the optimizer's back)."""
        for group in self.groups:
            group.absorb_edits(everything=True)
            group.pull_masters()

    def absorb_edits(self) -> None:
        """Masters follow weights written in place; called before anything reads or updates masters."""
        self.hold_still()
        self._absorb_edits()

    def _absorb_edits(self) -> None:
        self._refuse_if_destroyed()
        self.await_readers()
        for group in self.groups:
            group.absorb_edits()

    def publish_masters(self) -> None:
        """The model takes the masters' values, on every rank (after masters were written). Collective."""
        if self.executors.zenflow is not None:
            self.executors.zenflow.hold_still()  # masters of important columns are elsewhere
        self.reducer.forget_feedback()
        for group in self.groups:
            if not group.sharded:
                group.push_masters()
                continue
            if group.on_disk:
                group.push_masters()
            for segment in group.layout.segments:
                if group.master is not None:
                    piece = group.master.narrow(0, segment.shard_start, segment.piece_numel)
                    group.model_piece(segment).copy_(piece)
                self.publisher.publish(group, segment)
        self.publisher.wait()

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """See :func:`offload_states.offload_zero_states`."""
        self.hold_still()
        if self.executors.zenflow is not None:
            self.executors.zenflow.leave_device()
        offload_zero_states(cast(Any, self), include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """See :func:`offload_states.reload_zero_states`."""
        self.hold_still()
        reload_zero_states(cast(Any, self), non_blocking)

    # ---- accounting ------------------------------------------------------------------------------------------------

    def model_state_bytes(self) -> dict[str, int]:
        """See :func:`accounting.held_bytes`."""
        return accounting.held_bytes(cast(Any, self))

    def expected_state_bytes(self) -> dict[str, int]:
        """See :func:`accounting.expected_bytes`."""
        return accounting.expected_bytes(cast(Any, self))
