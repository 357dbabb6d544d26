"""Rank 0's values of a block on their way to the ranks that keep them, while models are built under ``zero.Init``.

Owns: the runs in which they travel. Does not own: the collective (``comm/send_pieces.py``), the blocks and how long
sends may be under way (``init_shard.py``).
Invariant: every rank cuts the same runs, from what all know of the block; together they fill its piece, padding too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.comm.pending import Pending
from deepspeed.comm.send_pieces import scatter
from deepspeed.runtime.zero.param_block import Place

__all__ = ["Ranks", "Values", "runs_of_one_parameter", "send_pieces"]

_CHUNK_NBYTES = 8 << 20  # on the source, all ranks' pieces of one scatter together
_LARGE_NBYTES = 1 << 18  # a copy of less costs less than a scatter of its own


@dataclass(frozen=True)
class Ranks:
    """Who shares the parameters: a process group (None: the default one), and this rank's place in it."""

    group: Any
    rank: int
    world: int


class Values:
    """The values of several parameters as one flat run: views where that is possible, else small copies."""

    def __init__(self, places: Sequence[Place], dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.parts = [(place.start, place.param.data.reshape(-1)) for place in places if place.numel]

    def read(self, start: int, numel: int) -> torch.Tensor:
        """Elements ``start .. start + numel`` in the wanted dtype, 0 between parameters.  # 1D"""
        inside = [(at, flat) for at, flat in self.parts if at < start + numel and start < at + flat.numel()]
        if len(inside) == 1:
            at, flat = inside[0]
            if at <= start and start + numel <= at + flat.numel():
                return flat.narrow(0, start - at, numel).to(dtype=self.dtype, device=self.device)
        copy = torch.zeros(numel, dtype=self.dtype, device=self.device)
        for at, flat in inside:
            low, high = max(at, start), min(at + flat.numel(), start + numel)
            copy.narrow(0, low - start, high - low).copy_(flat.narrow(0, low - at, high - low))
        return copy


def send_pieces(shard: torch.Tensor, source: Values | None, ranks: Ranks, places: Sequence[Place]) -> Iterator[Pending]:
    """Every rank gets its piece of the values of group rank 0, in its ``shard``. Each step starts a collective."""
    piece, item = shard.numel(), shard.element_size()
    chunk, large = max(1 << 14, _CHUNK_NBYTES // (ranks.world * item)), _LARGE_NBYTES // item

    def what() -> str:
        shown = ", ".join(place.name for place in places[:3]) + (" ..." if len(places) > 3 else "")
        return f"initial values of {shown} under zero.Init"

    for start, numel in runs_of_one_parameter(places, piece, chunk, large):
        sent = [source.read(r * piece + start, numel) for r in range(ranks.world)] if source is not None else None
        yield scatter(shard.narrow(0, start, numel), sent, 0, ranks.group, what=what, async_op=True)


def runs_of_one_parameter(places: Sequence[Place], piece: int, most: int, large: int) -> Iterator[tuple[int, int]]:
    """Cut a piece of ``piece`` elements into runs (start, numel) of at most ``most``, the same for every rank's piece.

    Runs of ``large`` or more end where some rank's values begin or end, so that they are views of one parameter and
    need no copy. What is smaller goes together.
    """
    ends = {edge % piece for place in places for edge in (place.start, place.start + place.numel)} - {0}
    edges = [*sorted(ends), piece]
    start = 0
    while start < piece:
        at = bisect_right(edges, start)
        end, limit = edges[at], min(start + most, piece)
        if end - start < large:
            while end < limit and edges[at + 1] - end < large:
                at += 1
                end = edges[at]
        end = min(end, limit)
        yield start, end - start
        start = end
