"""Scatter: one rank's pieces go to the ranks they belong to.

Owns: the one collective that `collectives.py` does not need. Moves (N-1)/N of the pieces out of the source and 1/N into
each other rank, where a broadcast would bring all of it to everybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm.collectives import DONE, call_mark, launch
from deepspeed.comm.group_facts import Group, facts_of
from deepspeed.comm.pending import Pending, What, announce

__all__ = ["scatter"]


def scatter(
    output: torch.Tensor,
    pieces: Sequence[torch.Tensor] | None,
    src_rank_in_group: int,
    group: Group | None,
    *,
    what: What = "",
    async_op: bool = False,
    key: int = 0,
) -> Pending:
    """Rank r receives `pieces[r]` of the source in `output`.

    Args:
        output: 1D, contiguous, k elements.
        pieces: on the source, one 1D contiguous tensor of k elements and the dtype of `output` per rank; else unused.
            Must stay unchanged until `wait`.
        key: see `collectives.reduce_scatter`.

    Raises ValueError when the source has not one fitting piece per rank.
    """
    facts = facts_of(group)
    is_source = facts.rank == src_rank_in_group
    if is_source and (
        pieces is None
        or len(pieces) != facts.size
        or any(piece.shape != output.shape or piece.dtype is not output.dtype for piece in pieces)
    ):
        found = [(tuple(piece.shape), piece.dtype) for piece in pieces or ()][:4]
        raise ValueError(
            f"scatter: the source needs {facts.size} pieces of shape {tuple(output.shape)} and {output.dtype}; "
            f"found {found}"
        )
    if facts.size == 1 or output.numel() == 0:
        if pieces is not None and output.numel() and pieces[0].data_ptr() != output.data_ptr():
            output.copy_(pieces[0])
        return DONE
    announce(facts, "scatter", what, output.nbytes, call_mark(output.nbytes, key) + src_rank_in_group)
    options: Any = torch_dist.ScatterOptions()
    options.rootRank = src_rank_in_group
    # As bytes: backends move them alike, and not every backend knows every dtype.
    given = [[piece.view(torch.uint8) for piece in pieces]] if is_source and pieces is not None else []
    pg: Any = group if group is not None else torch_dist.group.WORLD
    work = pg.scatter([output.view(torch.uint8)], given, options)
    if is_source:
        facts.bytes_sent += output.nbytes * (facts.size - 1)
    return launch((work,), None, facts, "scatter", what, output, async_op)
