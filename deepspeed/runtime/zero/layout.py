"""Where every element of a parameter group lives: pure integers, no tensors, no processes.

A *run* is the ordered list of parameters of one group and one dtype. The run is laid end to end in one flat
index space (each parameter starts at a multiple of ``param_align``), that space is cut into *segments*, and every
segment is cut evenly into ``world`` *pieces*. Rank ``r`` owns piece ``r`` of every segment; its *shard* is the
concatenation of those pieces. A *fragment* is the part of one parameter that lies in one shard.

    flat     |  p0   |    p1     |p2|      p3      |pad|      numel = sum of segments
    segments |------ 0 ------|------ 1 ------|--- 2 ---|      one collective each
    pieces   |  r0   |  r1   |  r0   |  r1   | r0 | r1 |
    shard r1 =  [segment 0, piece 1][segment 1, piece 1][segment 2, piece 1]

Because each segment is cut over all ranks, its reduce-scatter lands every rank's piece in place and its all-gather
refills the flat parameter buffer without a copy: a step moves 2*numel*(world-1)/world elements in all. One segment
for the whole run is the historical stage 1/2 order.

``ShardLayout.by_block`` never lets a segment end inside a parameter: at stage 3 a segment is what is gathered at once.

``ShardLayout.by_parameter`` never cuts a parameter: a rank owns whole tensors, which optimizers that look at a whole
matrix (LAMB, Muon, Adafactor, any unknown one) need to stay equal to plain torch.

Invariants, checked at construction: slots lie inside the flat space, do not overlap, and pieces tile it exactly.
All offsets and sizes are in elements.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of the run: ``numel`` elements from flat index ``start``."""

    name: str
    numel: int
    start: int

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Segment:
    """Flat elements ``start .. start + numel``, cut into ``world`` pieces of ``piece_numel``."""

    start: int
    numel: int
    piece_numel: int
    shard_start: int  # where this segment's piece begins inside a rank's shard
    index: int = 0  # position in ShardLayout.segments

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Fragment:
    """``numel`` elements of parameter ``name``: from ``param_start`` in the parameter, ``shard_start`` in the shard."""

    name: str
    index: int  # position of the parameter in the run
    param_start: int
    shard_start: int
    numel: int


@dataclass(frozen=True)
class ShardLayout:
    """The layout of one run over ``world`` ranks. See the module docstring."""

    slots: tuple[Slot, ...]
    segments: tuple[Segment, ...]
    world: int

    def __post_init__(self) -> None:
        end = 0
        for slot in self.slots:
            assert slot.start >= end, f"slot {slot.name} overlaps its predecessor"
            end = slot.end
        assert end <= self.numel, "slots exceed the flat space"
        flat = shard = 0
        for segment in self.segments:
            assert (segment.start, segment.shard_start) == (flat, shard), "segments must tile the flat space"
            assert segment.numel == segment.piece_numel * self.world, "pieces must tile their segment"
            flat, shard = segment.end, shard + segment.piece_numel

    # ---- construction ----------------------------------------------------------------------------------------------

    @classmethod
    def by_element(
        cls,
        run: Sequence[tuple[str, int]],
        world: int,
        *,
        segment_numel: int | None = None,
        param_align: int = 1,
        piece_align: int = 1,
    ) -> ShardLayout:
        """Cut anywhere: even shards, at most ``segment_numel`` elements per collective (None: one segment).

        Segment bounds are multiples of ``world * piece_align``, so only the last segment carries padding and every
        parameter stays contiguous in the flat space.
        """
        slots, offset = _place(run, param_align)
        unit = world * piece_align
        total = round_up(offset, unit)
        step = total if segment_numel is None else max(unit, segment_numel // unit * unit)
        segments: list[Segment] = []
        for start in range(0, total, step or 1):
            numel = min(step, total - start)
            segments.append(Segment(start, numel, numel // world, start // world, len(segments)))
        return cls(slots, tuple(segments), world)

    @classmethod
    def by_block(
        cls,
        blocks: Sequence[Sequence[tuple[str, int]]],
        world: int,
        *,
        param_align: int = 1,
        piece_align: int = 1,
    ) -> ShardLayout:
        """One segment per block of parameters, each padded by itself and cut anywhere: what stage 3 gathers at once."""
        slots: list[Slot] = []
        segments: list[Segment] = []
        flat = 0
        for block in blocks:
            placed, used = _place(block, param_align)
            numel = round_up(used, world * piece_align)
            slots += [Slot(slot.name, slot.numel, slot.start + flat) for slot in placed]
            segments.append(Segment(flat, numel, numel // world, flat // world, len(segments)))
            flat += numel
        return cls(tuple(slots), tuple(segments), world)

    @classmethod
    def by_parameter(
        cls,
        run: Sequence[tuple[str, int]],
        world: int,
        *,
        segment_numel: int | None = None,
        param_align: int = 1,
        piece_align: int = 1,
    ) -> ShardLayout:
        """Cut only between parameters: each rank owns whole tensors, balanced by size (longest first).

        A segment collects parameters until it holds ``segment_numel`` elements; its pieces are as long as the fullest
        rank's load, so a few large tensors can leave padding. ``slots`` come out in flat order, not in run order.
        """
        align = max(param_align, 1)
        slots: list[Slot] = []
        segments: list[Segment] = []
        flat = shard = 0
        for chunk in _chunks(run, segment_numel):
            loads = [0] * world
            owned: list[list[tuple[str, int]]] = [[] for _ in range(world)]
            for name, numel in sorted(chunk, key=lambda item: -item[1]):
                owner = min(range(world), key=loads.__getitem__)
                owned[owner].append((name, numel))
                loads[owner] += round_up(numel, align)
            piece = round_up(max(loads), max(piece_align, 1))
            for rank, names in enumerate(owned):
                offset = flat + rank * piece
                for name, numel in names:
                    slots.append(Slot(name, numel, offset))
                    offset += round_up(numel, align)
            segments.append(Segment(flat, piece * world, piece, shard, len(segments)))
            flat, shard = flat + piece * world, shard + piece
        return cls(tuple(slots), tuple(segments), world)

    # ---- sizes -----------------------------------------------------------------------------------------------------

    @cached_property
    def numel(self) -> int:
        """Elements of the flat space, padding included."""
        return self.segments[-1].end if self.segments else 0

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, padding included."""
        return self.numel // self.world if self.world else 0

    @cached_property
    def param_numel(self) -> int:
        """Elements of all parameters, padding excluded."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def max_segment_numel(self) -> int:
        return max((segment.numel for segment in self.segments), default=0)

    # ---- queries ---------------------------------------------------------------------------------------------------

    @cached_property
    def _slot_starts(self) -> list[int]:
        return [slot.start for slot in self.slots]

    def slots_in(self, segment: Segment) -> Iterator[tuple[int, Slot, int, int, int]]:
        """``(slot index, slot, start in the slot, start in the segment, numel)`` of each slot in ``segment``."""
        first = max(bisect_right(self._slot_starts, segment.start) - 1, 0)
        for index in range(first, len(self.slots)):
            slot = self.slots[index]
            if slot.start >= segment.end:
                break
            low, high = max(slot.start, segment.start), min(slot.end, segment.end)
            if low < high:
                yield index, slot, low - slot.start, low - segment.start, high - low

    def fragments(self, rank: int) -> Iterator[Fragment]:
        """The fragments rank ``rank`` owns, in shard order; neighbours that continue each other are one fragment.

        A zero-size parameter yields an empty fragment on rank 0, so that some rank answers for it.
        """
        pending: Fragment | None = None
        for segment in self.segments:
            low = segment.start + rank * segment.piece_numel
            piece = Segment(low, segment.piece_numel, segment.piece_numel, segment.shard_start)
            for index, slot, param_start, offset, numel in self.slots_in(piece):
                fragment = Fragment(slot.name, index, param_start, piece.shard_start + offset, numel)
                joined = _join(pending, fragment)
                if joined is None and pending is not None:
                    yield pending
                pending = joined or fragment
        if pending is not None:
            yield pending
        if rank == 0:
            for index, slot in enumerate(self.slots):
                if slot.numel == 0:
                    yield Fragment(slot.name, index, 0, 0, 0)

    def as_record(self) -> dict[str, object]:
        """Plain data for the layout record of a checkpoint; :meth:`from_record` reads it back."""
        return {
            "version": 1,
            "world": self.world,
            "slots": [(slot.name, slot.numel, slot.start) for slot in self.slots],
            "segments": [(segment.numel, segment.piece_numel) for segment in self.segments],
        }

    @classmethod
    def from_record(cls, record: dict) -> ShardLayout:
        """Rebuild a layout from :meth:`as_record`. Raises ValueError for a version this release cannot read."""
        if record.get("version") != 1:
            raise ValueError(f"layout record has version {record.get('version')!r}; this release reads version 1")
        segments: list[Segment] = []
        flat = shard = 0
        for numel, piece_numel in record["segments"]:
            segments.append(Segment(flat, numel, piece_numel, shard, len(segments)))
            flat, shard = flat + numel, shard + piece_numel
        return cls(tuple(Slot(*slot) for slot in record["slots"]), tuple(segments), record["world"])


def _place(run: Sequence[tuple[str, int]], align: int) -> tuple[tuple[Slot, ...], int]:
    slots, offset = [], 0
    for name, numel in run:
        offset = round_up(offset, align)
        slots.append(Slot(name, numel, offset))
        offset += numel
    return tuple(slots), offset


def _chunks(run: Sequence[tuple[str, int]], limit: int | None) -> Iterator[list[tuple[str, int]]]:
    chunk: list[tuple[str, int]] = []
    held = 0
    for name, numel in run:
        chunk.append((name, numel))
        held += numel
        if limit is not None and held >= limit:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def _join(left: Fragment | None, right: Fragment) -> Fragment | None:
    """One fragment for two that continue each other in parameter and shard, else None."""
    if (
        left is None
        or left.index != right.index
        or left.param_start + left.numel != right.param_start
        or left.shard_start + left.numel != right.shard_start
    ):
        return None
    return Fragment(left.name, left.index, left.param_start, left.shard_start, left.numel + right.numel)
