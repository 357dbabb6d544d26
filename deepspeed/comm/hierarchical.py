"""Collectives over two levels of links: what crosses between nodes crosses once.

Owns: the two-hop all-gather, and the reduction of shards that inner groups have already summed. Does not own: the
groups (`mesh.py`, `levels.py`), the single hops (`collectives.py`) and packed transfers (`quantized.py`).

Bytes that leave a node of I ranks, of O nodes, for a gathered tensor of M bytes: M(O-1)/O, the least there is, against
I times as many where each rank sends its piece to every other. Inside the node M(I-1)/I per rank travel as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm import collectives
from deepspeed.comm.collectives import call_mark, check_shard, gather_pieces, launch
from deepspeed.comm.group_facts import Group, GroupFacts, facts_of
from deepspeed.comm.levels import Levels, TwoHops, one_level
from deepspeed.comm.pending import Pending, What, announce
from deepspeed.comm.same_host import channel_of

__all__ = ["all_gather", "all_reduce_shard"]


def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Group | Levels | None,
    *,
    what: What = "",
    async_op: bool = False,
    key: int = 0,
) -> Pending:
    """Concatenate the ranks' `input` into `output`, between nodes first, then inside each.

    The first hop brings this rank the pieces of its place in every node; the second spreads them over the node. All
    pieces land where they belong (backends that gather into one run of memory alone: after one copy of M/I bytes).

    Args:
        output: 1D, contiguous, N*k elements, in the order of `Levels.rank`.
        input: 1D, contiguous, k elements, the dtype of `output`; may be this rank's piece of `output` (no copy then).
        group: two levels, or one group (the plain all-gather then).
        key: see `collectives.reduce_scatter`.

    Returns:
        A handle; of two hops, `TwoHops`.
    """
    levels = one_level(group)
    if not isinstance(levels, Levels):
        return collectives.all_gather(output, input, levels[0], what=what, async_op=async_op, key=key)
    numel, rank = input.numel(), levels.rank
    check_shard("all_gather", input, output, levels.size)
    if output.dtype is not input.dtype:
        raise ValueError(f"all_gather: output is {output.dtype}, input is {input.dtype}; they must be equal")
    if numel == 0:
        return collectives.DONE
    own = output[rank * numel : (rank + 1) * numel]
    if own.data_ptr() != input.data_ptr():
        own.copy_(input)
    pending = two_hop_gather(output, levels, what=what, key=key)
    if not async_op:
        pending.wait()
    return pending


def two_hop_gather(
    output: torch.Tensor, levels: Levels, *, what: What, key: int, finish: Callable[[], None] | None = None
) -> TwoHops:
    """Fill `output`, which holds this rank's piece, in place; then `finish` runs. No level may have one rank."""
    inner, outer = facts_of(levels.inner), facts_of(levels.outer)
    nodes = output.view(outer.size, inner.size, -1)
    first = _gather_between(nodes[:, inner.rank], levels.outer, outer, what, key)

    def spread() -> Pending:
        return _gather_inside(nodes, levels.inner, inner, what, key, finish)

    return TwoHops(first, spread, inner, "all_gather", what, output.nbytes)


def all_reduce_shard(
    shard: torch.Tensor,
    levels: Levels,
    *,
    average: bool,
    what: What = "",
    async_op: bool = False,
    key: int = 0,
) -> Pending:
    """Sum a shard over the inner groups that each hold all shards, in place (MiCS, HSDP).

    `shard` is this rank's part of a `collectives.reduce_scatter` over `levels.inner`; replicas end with equal bits,
    summed in fp32 in the order of the outer ranks. Only the shard crosses between nodes, and with gradient
    accumulation only once per step.

    Args:
        shard: 1D, contiguous, any float dtype.
        average: divide by the number of inner groups (the inner reduction has divided by theirs).
        key: see `collectives.reduce_scatter`.
    """
    op = "avg" if average else "sum"
    return collectives.all_reduce(shard, levels.outer, op=op, what=what, async_op=async_op, deterministic=True, key=key)


def _fills_in_place(facts: GroupFacts, device: torch.device) -> bool:
    return facts.sums_locally(device) and facts.size <= collectives.BROADCAST_GATHER_MAX_RANKS


def _gather_between(pieces: torch.Tensor, group: Group | None, facts: GroupFacts, what: What, key: int) -> Pending:
    """Fill row r of `pieces` (ranks, k; rows apart in memory) with that of rank r."""
    if not _fills_in_place(facts, pieces.device):
        size, numel = pieces.shape
        staging = facts.take_buffer(pieces.numel(), pieces.dtype, pieces.device)
        rows = staging[: pieces.numel()]
        own = rows[facts.rank * numel : (facts.rank + 1) * numel].copy_(pieces[facts.rank])

        def land() -> None:
            pieces.copy_(rows.view(size, numel))
            facts.give_buffer(staging)

        announce(facts, "all_gather", what, rows.nbytes, call_mark(rows.nbytes, key))
        works = collectives.start_all_gather(rows, own, group, facts, what)
        return launch(works, land, facts, "all_gather", what, rows, True)
    nbytes = pieces.numel() * pieces.element_size()
    announce(facts, "all_gather", what, nbytes, call_mark(nbytes, key))
    facts.bytes_sent += nbytes // facts.size * (facts.size - 1)
    channel = channel_of(facts, pieces, "all_gather", what, nbytes)
    if channel is not None:
        work = channel.all_gather(pieces, pieces[facts.rank], pieces.stride(0) * pieces.element_size())
        return launch((work,), None, facts, "all_gather", what, pieces, True)
    pg: Any = group if group is not None else torch_dist.group.WORLD
    return launch(gather_pieces(pg, facts, pieces.unbind()), None, facts, "all_gather", what, pieces, True)


def _gather_inside(
    nodes: torch.Tensor,
    group: Group | None,
    facts: GroupFacts,
    what: What,
    key: int,
    finish: Callable[[], None] | None,
) -> Pending:
    """Fill `nodes` (outer ranks, inner ranks, k) where this rank holds `nodes[:, own place]`."""
    announce(facts, "all_gather", what, nodes.nbytes, call_mark(nodes.nbytes, key))
    facts.bytes_sent += nodes.nbytes // facts.size * (facts.size - 1)
    pg: Any = group if group is not None else torch_dist.group.WORLD
    works: tuple[Any, ...]
    channel = channel_of(facts, nodes, "all_gather", what, nodes.nbytes)
    if channel is not None:
        works = tuple(channel.all_gather(node, node[facts.rank]) for node in nodes)
    elif _fills_in_place(facts, nodes.device):
        works = tuple(work for node in nodes for work in gather_pieces(pg, facts, node.unbind()))
    else:
        rows = nodes.flatten(1)
        works = (pg.allgather_into_tensor_coalesced(list(rows.unbind()), list(nodes[:, facts.rank].unbind())),)
    return launch(works, finish, facts, "all_gather", what, nodes, True)
