"""Gradient buckets: one per segment, filled in one go, all drawing on one kept workspace.

A bucket knows the slots of its segment, which of its parameters are still expected in the current backward, and how
to copy their gradients into (and, for replicated gradients, out of) a flat buffer. When a bucket goes and what is
done with it is ``reduce.py``'s matter.

[Note: kept workspace] Buffers are slices of one byte tensor that lives as long as the optimizer. Allocating a bucket
per step would cost a first touch of every page (several times the copy itself on Linux), and the boundary reuses the
same bytes as scratch for unscaled gradients.
"""

from __future__ import annotations

import torch

from deepspeed.comm.loco import LocoState
from deepspeed.runtime.zero.layout import Segment, Slot
from deepspeed.runtime.zero.shard_group import ShardGroup

_ALIGN_BYTES = 64


class Workspace:
    """``count`` equal buffers in one byte tensor. ``take`` hands out one of them, ``whole`` all bytes at once."""

    def __init__(self, nbytes: int, count: int, device: torch.device) -> None:
        self.stride = -(-max(nbytes, _ALIGN_BYTES) // _ALIGN_BYTES) * _ALIGN_BYTES
        self.count = count
        self.storage = torch.empty(self.stride * count, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self.storage.numel()

    def take(self, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Buffer ``index`` as ``numel`` elements of ``dtype``.  # 1D, uninitialised"""
        nbytes = numel * dtype.itemsize
        assert nbytes <= self.stride, "bucket larger than its workspace"
        return self.storage.narrow(0, index * self.stride, nbytes).view(dtype)

    def whole(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """All buffers as one run of ``numel`` elements of ``dtype``.  # 1D, uninitialised"""
        return self.storage.narrow(0, 0, numel * dtype.itemsize).view(dtype)

    def capacity(self, dtype: torch.dtype) -> int:
        """Elements of ``dtype`` that fit into the whole workspace."""
        return self.storage.numel() // dtype.itemsize


class Bucket:
    """The gradients of one segment of one group."""

    def __init__(self, group: ShardGroup, segment: Segment, index: int = 0) -> None:
        self.group = group
        self.segment = segment
        self.index = index  # place in the launch order, the same on every rank
        self.slots = list(group.layout.slots_in(segment))  # (position, slot, slot_start, segment_start, numel)
        self.positions = [position for position, *_ in self.slots]
        # A bucket is complete when its earliest-registered parameter is, since backward runs the other way.
        self.ready_key = min((group.order[position] for position in self.positions), default=0)
        self.dtype = group.comm_dtype
        self.covered = sum(numel for *_, numel in self.slots) == segment.numel
        self.missing = 0
        self.reduced = False  # its result of this window is in the gradient shard
        self.complete = False  # and it is the sum over all replicas of the shard
        self.loco: LocoState | None = None  # what packed reductions have lost of it
        self._views: dict[int, list[torch.Tensor]] = {}

    def arm(self, expected: bytes) -> None:
        """Wait, in the coming backward, for the parameters whose flag in ``expected`` is set."""
        self.missing = sum(expected[position] for position in self.positions)

    def describe(self) -> str:
        names = [self.group.names[position] for position in self.positions]
        shown = ", ".join(names[:3]) + (f" ... {names[-1]} ({len(names)} parameters)" if len(names) > 3 else "")
        return f"gradient bucket {self.index} of optimizer group {self.group.group_index}: {shown}"

    def buffer_views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """One view of ``buffer`` per slot: parameter-shaped when the whole parameter is here, else 1D."""
        key = buffer.data_ptr()
        if key not in self._views:
            views = []
            for position, slot, _, start, numel in self.slots:
                view = buffer.narrow(0, start, numel)
                views.append(view.view(self.group.shapes[position]) if numel == slot.numel else view)
            self._views[key] = views
        return self._views[key]

    def fill(self, buffer: torch.Tensor, sources: list[torch.Tensor | None]) -> None:
        """Copy each slot's part of its parameter's gradient into ``buffer``; absent ones and padding become zero."""
        into, held = [], []
        if not self.covered or any(source is None for source in sources):
            buffer.zero_()
        for view, source, slot in zip(self.buffer_views(buffer), sources, self.slots, strict=True):
            if source is not None:
                into.append(view)
                held.append(_part(source, slot))
        if into:
            torch._foreach_copy_(into, held)

    def spill(self, buffer: torch.Tensor, targets: list[torch.Tensor]) -> None:
        """Copy ``buffer`` into each slot's part of ``targets`` (whole gradients, contiguous)."""
        if targets:
            parts = [_part(target, slot) for target, slot in zip(targets, self.slots, strict=True)]
            torch._foreach_copy_(parts, self.buffer_views(buffer))


def _part(whole: torch.Tensor, slot: tuple[int, Slot, int, int, int]) -> torch.Tensor:
    _, placed, start, _, numel = slot
    return whole if numel == placed.numel else whole.reshape(-1).narrow(0, start, numel)
