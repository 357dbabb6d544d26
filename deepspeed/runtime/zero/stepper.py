"""The boundary: from accumulated gradients to updated parameters on every rank.

    finish reductions -> agree and take the norm -> overflow? -> unscale and clip -> update -> cast -> publish

The update runs over *units*: fragments whose gradients, cast to the master dtype, fit the workspace. So a bf16 or
fp16 model never holds a full fp32 copy of its gradients. Where gradients already have the master's dtype there is one
unit and no copy. Our own optimizers with kernels need no cast gradients at all (``fused_update.py``).

The executor here is inline: one unit after the other on the calling thread. Pipelined, speculative and asynchronous
ones stand beside it (``executors.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepspeed.runtime.zero.bucket import Workspace
from deepspeed.runtime.zero.fused_update import FusedUpdate, rows_of
from deepspeed.runtime.zero.layout import Segment
from deepspeed.runtime.zero.norm import BoundaryFacts
from deepspeed.runtime.zero.publish import Publisher
from deepspeed.runtime.zero.shard_group import BoundFragment, ShardGroup
from deepspeed.runtime.zero.slices import can_slice, step_in_slices

if TYPE_CHECKING:
    from deepspeed.runtime.zero.executors import Executors


@dataclass(slots=True, eq=False)
class Unit:
    """Fragments of one group updated by one call of the base optimizer, and the segments they complete."""

    group: ShardGroup
    number: int  # of the group
    fragments: list[BoundFragment]
    segments: list[Segment]
    shard_start: int
    numel: int  # from shard_start on, padding included

    def part(self, bound: BoundFragment, whole: torch.Tensor) -> torch.Tensor:
        """The elements of ``bound`` in a tensor laid out like the unit's masters, in the leaf's shape."""
        fragment = bound.fragment
        start = fragment.shard_start - self.shard_start if fragment.numel else 0
        return whole.narrow(0, start, fragment.numel).view(bound.leaf.shape)


class InlineStepper:
    """Updates ``groups`` with ``base`` (a torch optimizer whose parameters are the groups' leaves)."""

    def __init__(
        self,
        groups: Sequence[ShardGroup],
        base: torch.optim.Optimizer,
        workspace: Workspace,
        publisher: Publisher,
        executors: Executors,
        *,
        split: bool,
        offload_numel: int = 0,
    ) -> None:
        """``executors`` are asked first for each unit.

        ``offload_numel``: at most this many elements of an offloaded group are updated at a time.
        """
        self.groups = list(groups)
        self.fused = FusedUpdate(base)
        self.offload_numel = offload_numel
        self.base = base
        self.workspace = workspace
        self.publisher = publisher
        self.executors = executors
        # ``split``: the base optimizer may be called once per unit (its update of one leaf does not look at others).
        self.split = split
        self.units = [unit for number, group in enumerate(self.groups) for unit in self._units(number, group)]

    # ---- plan ------------------------------------------------------------------------------------------------------

    def _units(self, number: int, group: ShardGroup) -> list[Unit]:
        if not self.split:
            limit = None
        elif group.offloaded:
            limit = self.offload_numel
        elif group.accum_dtype == group.master_dtype == group.dtype:
            limit = None
        else:
            limit = self.workspace.capacity(group.master_dtype)
        if group.sharded:
            return _units_by_segment(number, group, limit)
        return _units_by_parameter(number, group, limit)

    # ---- update ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, facts: BoundaryFacts, scale: float) -> None:
        """One optimizer step. Gradients are multiplied by ``scale`` (unscale, clip, op) on the way."""
        speculation, zenflow, disk = self.executors.speculation, self.executors.zenflow, self.executors.disk
        if speculation is not None:
            speculation.settle(facts, scale)
        # Gradients used where they lie go first, in one call: a later call must not find them on their leaves again.
        units = self.units if zenflow is None else zenflow.update(facts, scale)
        left = [unit for unit in units if not self._update_fused(unit, facts, scale)]
        in_place = [unit for unit in left if self._in_place(unit, facts) and not unit.group.on_disk]
        for unit in in_place:
            self._hand_over(unit, facts, scale)
        self._apply(in_place)
        chosen = {id(unit) for unit in in_place}
        for unit in left:
            if id(unit) not in chosen and not self._step_in_slices(unit, facts, scale):
                self._hand_over(unit, facts, scale)
                self._apply([unit])
                if disk is not None:
                    disk.settle_unit(unit)
        if disk is not None:
            disk.finish()
        # Schedulers look at it, to tell who steps first; a rank that owns nothing has called no ``step``.
        self.base._opt_called = True  # type: ignore[attr-defined]
        self.publisher.wait()

    def _update_fused(self, unit: Unit, facts: BoundaryFacts, scale: float) -> bool:
        touched = facts.touched[unit.number]
        speculation, disk = self.executors.speculation, self.executors.disk
        if speculation is not None and speculation.commit(unit):
            done = True
        elif disk is not None and disk.holds(unit):
            if rows_of(self.base) is None:
                return False
            with disk.at_hand(unit):
                done = self.fused.update(unit, touched, scale)
            disk.settle_unit(unit)
        else:
            done = self.fused.update(unit, touched, scale)
        if not done:
            return False
        for bound in unit.fragments:
            bound.leaf.grad = None
        if unit.group.sharded:
            for segment in unit.segments:
                self.publisher.publish(unit.group, segment)
        else:
            self._drop_used(unit)
        return True

    def _in_place(self, unit: Unit, facts: BoundaryFacts) -> bool:
        """Whether the gradients have the masters' dtype already (or none are there); alike on ranks that publish."""
        group = unit.group
        if group.sharded:
            return group.accum_dtype == group.master_dtype or not unit.numel
        touched = facts.touched[unit.number]
        grads = (group.grad_of(bound) for bound in unit.fragments if touched[bound.position])
        found = next((grad.dtype for grad in grads if grad is not None), group.master_dtype)
        return found == group.master_dtype

    def _step_in_slices(self, unit: Unit, facts: BoundaryFacts, scale: float) -> bool:
        """Update a whole parameter whose cast gradient is larger than the workspace; False where that is not the case.

        Not in its first step: the optimizer has yet to make its states, and the memory of them is still free.
        """
        group = unit.group
        room = self.workspace.capacity(group.master_dtype)
        if group.sharded or group.offloaded or not self.split or unit.numel <= room or len(unit.fragments) != 1:
            return False
        (bound,) = unit.fragments
        grad = group.grad_of(bound) if facts.touched[unit.number][bound.position] else None
        if grad is None or grad.is_sparse or grad.dtype == group.master_dtype or not can_slice(self.base, bound.leaf):
            return False
        step_in_slices(self.base, bound.leaf, grad, self.workspace.whole(room, group.master_dtype), scale)
        self._finish_replicated(unit)
        return True

    def _finish_replicated(self, unit: Unit) -> None:
        unit.group.push_masters(unit.fragments)
        self._drop_used(unit)

    @staticmethod
    def _drop_used(unit: Unit) -> None:
        group = unit.group
        for bound in unit.fragments:
            if bound.leaf is not bound.param:  # used up: room for the states and casts of the units to come
                bound.param.grad = group.accum[bound.position] = None

    def _apply(self, units: Sequence[Unit]) -> None:
        if not units:
            return
        self.base.step()
        for unit in units:
            for bound in unit.fragments:
                bound.leaf.grad = None
            group = unit.group
            if not group.sharded:
                self._finish_replicated(unit)
                continue
            if group.on_disk:
                group.push_masters(unit.fragments)
            for segment in unit.segments:
                if group.master is not None:
                    piece = group.master.narrow(0, segment.shard_start, segment.piece_numel)
                    group.model_piece(segment).copy_(piece, non_blocking=group.offloaded)
                self.publisher.publish(group, segment)

    def _hand_over(self, unit: Unit, facts: BoundaryFacts, scale: float) -> None:
        """Give every touched leaf its scaled gradient: where it lies, or cast in the workspace."""
        group, touched = unit.group, facts.touched[unit.number]
        if group.sharded:
            self._hand_over_shard(unit, touched, scale)
            return
        live = [(bound, group.grad_of(bound)) for bound in unit.fragments if touched[bound.position]]
        for bound in unit.fragments:
            if not touched[bound.position]:
                bound.leaf.grad = None
        grads = [grad for _, grad in live if grad is not None]
        if not grads:
            return
        if grads[0].dtype == group.master_dtype:
            if scale != 1.0:
                scale_in_place(grads, scale)
            for bound, grad in live:
                if bound.leaf is not bound.param:
                    bound.leaf.grad = grad
            return
        space, offset = self._scratch(sum(grad.numel() for grad in grads), group), 0
        views = []
        for bound, grad in live:
            if grad is None:
                continue
            view = space.narrow(0, offset, grad.numel()).view(bound.leaf.shape)
            offset += grad.numel()
            views.append(view)
        torch._foreach_copy_(views, [grad.to_dense() if grad.is_sparse else grad for grad in grads])
        space.narrow(0, 0, offset).mul_(scale)
        for (bound, _), view in zip([pair for pair in live if pair[1] is not None], views, strict=True):
            bound.leaf.grad = view

    def _hand_over_shard(self, unit: Unit, touched: bytes, scale: float) -> None:
        group = unit.group
        if not unit.numel:
            return
        pieces = [group.grad_piece(segment) for segment in unit.segments]
        if group.accum_dtype == group.master_dtype:
            if scale != 1.0:
                torch._foreach_mul_(pieces, scale)
        else:
            scratch = self._scratch(unit.numel, group)
            cast = list(scratch.split([piece.numel() for piece in pieces]))
            torch._foreach_copy_(cast, pieces)
            if scale != 1.0:
                scratch.mul_(scale)
            pieces = cast
        held = {segment.index: piece for segment, piece in zip(unit.segments, pieces, strict=True)}
        for bound in unit.fragments:
            bound.leaf.grad = group.grad_view(bound, held[bound.segment]) if touched[bound.position] else None

    def _scratch(self, numel: int, group: ShardGroup) -> torch.Tensor:
        if numel <= self.workspace.capacity(group.master_dtype) and not group.offloaded:
            return self.workspace.whole(numel, group.master_dtype)
        return torch.empty(numel, dtype=group.master_dtype, device=group.state_device)


def scale_in_place(grads: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply dense and sparse gradients by ``factor``."""
    dense = [grad for grad in grads if not grad.is_sparse]
    if dense:
        torch._foreach_mul_(dense, factor)
    for grad in grads:
        if grad.is_sparse:
            grad.mul_(factor)


def _units_by_segment(number: int, group: ShardGroup, limit: int | None) -> list[Unit]:
    units: list[Unit] = []
    for segment in group.layout.segments:
        last = units[-1] if units else None
        if last is None or (limit is not None and last.numel + segment.piece_numel > limit):
            units.append(Unit(group, number, [], [segment], segment.shard_start, segment.piece_numel))
        else:
            last.segments.append(segment)
            last.numel += segment.piece_numel
    if not units and group.fragments:  # a run of zero-size parameters has no segment
        units.append(Unit(group, number, [], [], 0, 0))
    ends = [unit.shard_start + unit.numel for unit in units]
    current = 0
    for bound in group.fragments:
        start = bound.fragment.shard_start if bound.fragment.numel else 0
        while current < len(units) - 1 and start >= ends[current]:
            current += 1
        (units[current] if bound.fragment.numel else units[0]).fragments.append(bound)
    return units


def _units_by_parameter(number: int, group: ShardGroup, limit: int | None) -> list[Unit]:
    units: list[Unit] = []
    for bound in group.fragments:
        fragment = bound.fragment
        if not units:
            units.append(Unit(group, number, [], [], 0, 0))
        start, end = fragment.shard_start, fragment.shard_start + fragment.numel
        if limit is not None and units[-1].numel and fragment.numel and end - units[-1].shard_start > limit:
            units.append(Unit(group, number, [], [], start, 0))
        units[-1].fragments.append(bound)
        if fragment.numel:
            units[-1].numel = end - units[-1].shard_start
    return units
