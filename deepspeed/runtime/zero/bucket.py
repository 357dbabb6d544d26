"""Gradient buckets: one per segment, filled in one go, and the workspace their buffers come from.

A bucket knows the slots of its segment, which of its parameters are still expected in the current backward, and how
to copy their gradients into (and, for replicated gradients, out of) a flat buffer. When a bucket goes and what is
done with it is ``reduce.py``'s matter.

[Note: kept or borrowed] A kept workspace is one byte tensor, made when it is first asked for, that lives as long as the
optimizer; buffers are slices of it. Allocating a bucket per step would cost a first touch of every page (several times
the copy itself on Linux), and the boundary reuses the same bytes as scratch for unscaled gradients. Where blocks of
parameters are released after use (stage 3, a model that does not fit), a kept bucket would cost as much as a gathered
block. There a bucket travels in parts, straight from the gradients; or, to overlap, in the memory of its block, whose
full buffer is let go of when the bucket is filled.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed.comm.loco import LocoState
from deepspeed.runtime.zero.layout import Segment, Slot
from deepspeed.runtime.zero.shard_group import ShardGroup

_ALIGN_BYTES = 64
# Parts of a bucket, and bytes below which a part is not worth a collective. Three of them (what goes, what comes, and
# fp32 copies of it) are a fifth of a bucket.
_PARTS = 16
_MIN_PART = 1 << 17


class Workspace:
    """``count`` equal buffers of ``nbytes``. ``take`` hands out one of them, ``whole`` scratch for the boundary.

    ``kept``: in one byte tensor that stays; else each is memory that was lent, or fresh, and goes with its last user.
    ``scratch``: most bytes of fresh memory that ``whole`` gives; None: all kept bytes at once.
    """

    def __init__(
        self, nbytes: int, count: int, device: torch.device, *, kept: bool = True, scratch: int | None = None
    ) -> None:
        assert kept or scratch is not None
        self.scratch = scratch
        self.stride = -(-max(nbytes, _ALIGN_BYTES) // _ALIGN_BYTES) * _ALIGN_BYTES
        self.count = count
        self.device = device
        self.kept = kept
        self._storage: torch.Tensor | None = None  # 1D uint8
        self._lent: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._storage.numel() if self._storage is not None else 0

    @property
    def storage(self) -> torch.Tensor:
        """The kept bytes.  # 1D uint8"""
        if self._storage is None:
            with torch.inference_mode(False):  # else a workspace born in an evaluation could not serve in training
                self._storage = torch.empty(self.stride * self.count, dtype=torch.uint8, device=self.device)
        return self._storage

    def drop(self) -> None:
        """Let go of the kept bytes; the next use makes them again."""
        self._storage = None

    def lend(self, buffers: list[torch.Tensor]) -> None:
        """What ``take`` may hand out until the next ``lend``, in place of fresh memory; nobody else may hold it.

        The list is emptied: no reference to a buffer stays with the caller.
        """
        self._lent = buffers[:]
        buffers.clear()

    def take(self, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Buffer ``index`` as ``numel`` elements of ``dtype``.  # 1D, uninitialised"""
        nbytes = numel * dtype.itemsize
        assert nbytes <= self.stride, "bucket larger than its workspace"
        if self.kept:
            return self.storage.narrow(0, index * self.stride, nbytes).view(dtype)
        for place, buffer in enumerate(self._lent):
            if buffer.nbytes >= nbytes and buffer.device == self.device:
                return self._lent.pop(place).view(torch.uint8).narrow(0, 0, nbytes).view(dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def owns(self, buffer: torch.Tensor) -> bool:
        """Whether ``buffer`` lies in the kept bytes."""
        return self._storage is not None and buffer.untyped_storage().data_ptr() == self._storage.data_ptr()

    def whole(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """One run of ``numel`` elements of ``dtype``, at most ``capacity``.  # 1D, uninitialised"""
        if self.scratch is not None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return self.storage.narrow(0, 0, numel * dtype.itemsize).view(dtype)

    def capacity(self, dtype: torch.dtype) -> int:
        """Elements of ``dtype`` that ``whole`` gives at most."""
        return (self.stride * self.count if self.scratch is None else self.scratch) // dtype.itemsize


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
        self._landing: torch.Tensor | None = None  # on the device, where gradients are kept in host memory
        self._views: dict[int, list[torch.Tensor]] = {}

    def open_piece(self, *, holds: bool) -> torch.Tensor:
        """Where the result of a reduction is added; it counts after :meth:`close_piece`.  # 1D, piece_numel

        ``holds``: what is there already counts; else all of it is written over. Offloaded gradients come to the device
        for it.
        """
        piece = self.group.grad_piece(self.segment, written=not holds)
        if not self.group.offloaded:
            return piece
        self._landing = torch.empty_like(piece, device=self.group.device)
        if holds:
            self._landing.copy_(piece, non_blocking=True)
        return self._landing

    def close_piece(self) -> None:
        """The result is there: offloaded gradients go to host memory while backward goes on."""
        if self._landing is not None:
            self.group.grad_piece(self.segment).copy_(self._landing, non_blocking=True)
            if self.group.on_device_grad is not None:
                self.group.on_device_grad(self.group, self.segment.index, self._landing)
            self._landing = None

    def arm(self, expected: bytes) -> None:
        """Wait, in the coming backward, for the parameters whose flag in ``expected`` is set."""
        self.missing = sum(expected[position] for position in self.positions)

    def parts(self) -> Iterator[tuple[int, int]]:
        """``(start, length)`` in a rank's piece of what travels at a time where the bucket is sent in parts."""
        piece, length = self.segment.piece_numel, part_length(self.segment, self.group.world, self.dtype)
        for start in range(0, piece, max(length, 1)):
            yield start, min(length, piece - start)

    def fill_part(self, buffer: torch.Tensor, sources: list[torch.Tensor | None], start: int) -> None:
        """What every rank's piece has from ``start`` on, one rank's after the other's, as much as ``buffer`` takes.

        ``sources``: one flat gradient per slot; absent ones and padding become zero.
        """
        piece, world = self.segment.piece_numel, self.group.world
        length = buffer.numel() // world
        if not self.covered or any(source is None for source in sources):
            buffer.zero_()
        for rank in range(world):
            low, high = rank * piece + start, rank * piece + start + length
            for source, (_, _, slot_start, begin, numel) in zip(sources, self.slots, strict=True):
                first, last = max(low, begin), min(high, begin + numel)
                if source is not None and first < last:
                    into = buffer.narrow(0, rank * length + first - low, last - first)
                    into.copy_(source.narrow(0, slot_start + first - begin, last - first))

    def describe(self) -> str:
        names = [self.group.names[position] for position in self.positions]
        shown = ", ".join(names[:3]) + (f" ... {names[-1]} ({len(names)} parameters)" if len(names) > 3 else "")
        return f"gradient bucket {self.index} of optimizer group {self.group.group_index}: {shown}"

    def as_it_lies(self, sources: list[torch.Tensor | None]) -> torch.Tensor | None:
        """The one gradient of this bucket as its buffer, where no copy is needed to make it one.  # 1D"""
        (source, *more) = sources or (None,)
        if source is None or more or not self.covered or source.numel() != self.segment.numel:
            return None
        return source.view(-1) if source.dtype is self.dtype and source.is_contiguous() else None

    def buffer_views(self, buffer: torch.Tensor, *, remember: bool = True) -> list[torch.Tensor]:
        """One view of ``buffer`` per slot: parameter-shaped when the whole parameter is here, else 1D.

        ``remember``: the buffer comes again, at the same address.
        """
        views = self._views.get(buffer.data_ptr()) if remember else None
        if views is None:
            views = []
            for position, slot, _, start, numel in self.slots:
                view = buffer.narrow(0, start, numel)
                views.append(view.view(self.group.shapes[position]) if numel == slot.numel else view)
            if remember:
                self._views[buffer.data_ptr()] = views
        return views

    def forget_views(self) -> None:
        """The buffers seen so far are gone."""
        self._views.clear()

    def fill(self, buffer: torch.Tensor, sources: list[torch.Tensor | None], *, remember: bool = True) -> None:
        """Copy each slot's part of its parameter's gradient into ``buffer``; absent ones and padding become zero."""
        into, held = [], []
        if not self.covered or any(source is None for source in sources):
            buffer.zero_()
        views = self.buffer_views(buffer, remember=remember)
        for view, source, slot in zip(views, sources, self.slots, strict=True):
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


def part_length(segment: Segment, world: int, dtype: torch.dtype) -> int:
    """Elements of every rank's piece of ``segment`` that travel at a time where it is sent in parts."""
    return min(segment.piece_numel, max(-(-segment.piece_numel // _PARTS), _MIN_PART // (world * dtype.itemsize)))


def part_nbytes(segment: Segment, world: int, dtype: torch.dtype) -> int:
    """Bytes of the parts of all ranks' pieces that travel together."""
    return world * part_length(segment, world, dtype) * dtype.itemsize


def _part(whole: torch.Tensor, slot: tuple[int, Slot, int, int, int]) -> torch.Tensor:
    _, placed, start, _, numel = slot
    return whole if numel == placed.numel else whole.reshape(-1).narrow(0, start, numel)
