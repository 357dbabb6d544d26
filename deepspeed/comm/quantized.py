"""Collectives that pack what they send: int8 weights (qwZ), int4 gradients in two hops (qgZ), error feedback (LoCo).

Owns: which pieces are packed for whom, and the sums in between. Does not own: the format and its arithmetic
(`blockwise.py`), the groups (`levels.py`, `mesh.py`).
Invariants: the ranks of an all-gather end with equal bits; sums run in fp32, in rank order; a number that is not finite
arrives as nan. A group of one rank sends nothing, so nothing is packed there and nothing is lost.

Bytes, for M elements over N = O nodes x I ranks, P(k) = `Packing.nbytes(k)`:
    all_gather                 per rank P(M/N) to the others of a group;
                               two levels: leaving a node I*P(M/N)*(O-1)
    reduce_scatter, one level  per rank P(M/N)*(N-1)
    reduce_scatter, two levels per rank O*P(M/N)*(I-1) inside, P(M/N)*(O-1) between nodes
A rank's own contribution to its own piece is never packed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist

from deepspeed.comm import collectives
from deepspeed.comm.blockwise import INT4, INT8, Packing, dequantize, quantize, sum_packed
from deepspeed.comm.collectives import DONE, call_mark, check_shard, launch, total_factor
from deepspeed.comm.exchanges import start_all_to_all
from deepspeed.comm.group_facts import Group, facts_of
from deepspeed.comm.hierarchical import two_hop_gather
from deepspeed.comm.levels import Levels, TwoHops, one_level
from deepspeed.comm.loco import LocoState
from deepspeed.comm.pending import Pending, WaitMode, What, announce
from deepspeed.comm.same_host import in_background

__all__ = ["LocoState", "all_gather", "reduce_scatter"]


def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Group | Levels | None,
    *,
    what: What = "",
    async_op: bool = False,
    key: int = 0,
    packing: Packing = INT8,
) -> Pending:
    """Concatenate the ranks' `input` into `output`, each element within half a step of its block (qwZ).

    Args:
        output: 1D, contiguous, N*k elements, fp32, bf16 or fp16; written in `wait`.
        input: 1D, contiguous, k elements, fp32, bf16 or fp16 (not necessarily the dtype of `output`). Free to change
            after the call. May be this rank's piece of `output`, which then becomes what the other ranks see of it.
        group: one group, or two levels (see `hierarchical.all_gather`).
        key: see `collectives.reduce_scatter`.

    Extra memory: the packed form of `output`, kept for the next call.
    """
    levels = one_level(group)
    facts = facts_of(levels[0])
    size, rank = (levels.size, levels.rank) if isinstance(levels, Levels) else (facts.size, facts.rank)
    numel = input.numel()
    check_shard("all_gather", input, output, size)
    if size == 1 or numel == 0:
        if numel and output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return DONE
    nbytes = packing.nbytes(numel)
    staging = facts.take_buffer(size * nbytes, torch.uint8, input.device)
    pieces = staging[: size * nbytes]
    own = pieces[rank * nbytes : (rank + 1) * nbytes]
    quantize(own, input, packing)

    def unpack() -> None:
        dequantize(output.view(size, numel), pieces.view(size, nbytes), packing)
        facts.give_buffer(staging)

    pending: Pending
    if isinstance(levels, Levels):
        pending = two_hop_gather(pieces, levels, what=what, key=key, finish=unpack)
    else:
        announce(facts, "all_gather", what, pieces.nbytes, call_mark(pieces.nbytes, key))
        works = collectives.start_all_gather(pieces, own, levels[0], facts, what)
        pending = launch(works, unpack, facts, "all_gather", what, pieces, True)
    if not async_op:
        pending.wait()
    return pending


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Group | Levels | None,
    *,
    average: bool,
    what: What = "",
    async_op: bool = False,
    accumulate: bool = False,
    scale: float | None = None,
    key: int = 0,
    packing: Packing = INT4,
    loco: LocoState | None = None,
) -> Pending:
    """Sum `input` over the ranks; rank r keeps piece r: `output (+)= scale * mean_or_sum(input[r*k:(r+1)*k])` (qgZ).

    Over two levels the ranks of a node first sum what each of them will send on, so that between nodes M/I elements
    travel instead of M. Each hop loses up to half a step per contribution.

    Args:
        output: 1D, k elements, fp32, bf16 or fp16; may be this rank's piece of `input` (not with `accumulate`).
        input: 1D, contiguous, N*k elements, fp32, bf16 or fp16. Must stay unchanged until `wait`.
        group: one group, or two levels; pieces are in the order of `Levels.rank`.
        average, accumulate, scale, key: see `collectives.reduce_scatter`.
        loco: what earlier calls have lost of this bucket, sent now; changed.

    Returns:
        A handle; of two levels, `TwoHops`.

    Extra memory: two packed buckets; of two levels M/I elements of fp32 while the second hop is packed, and this rank's
    M/N until `wait`.
    """
    levels = one_level(group)
    size = levels.size if isinstance(levels, Levels) else facts_of(levels[0]).size
    check_shard("reduce_scatter", output, input, size)
    if size == 1:
        return collectives.reduce_scatter(output, input, levels[0], average=average, accumulate=accumulate, scale=scale)
    if output.numel() == 0:
        return DONE
    factor = total_factor(average, scale, size)
    if loco is not None:
        loco.begin_call(input.dtype)
    sender = _Sender(packing, what, key, loco)
    pending: Pending
    if isinstance(levels, Levels):
        pending = _reduce_two_levels(output, input, levels, factor, accumulate, sender)
    else:
        hop = _Hop(sender, "inner", levels[0], input.view(size, 1, output.numel()))
        pending = hop.start(lambda: hop.sum_into(output.unsqueeze(0), factor, accumulate))
    if not async_op:
        pending.wait()
    return pending


class _Sender(NamedTuple):
    """What the hops of one reduction share."""

    packing: Packing
    what: What
    key: int
    loco: LocoState | None


def _reduce_two_levels(
    output: torch.Tensor, input: torch.Tensor, levels: Levels, factor: float | None, accumulate: bool, sender: _Sender
) -> TwoHops:
    inner, outer = facts_of(levels.inner), facts_of(levels.outer)
    numel = output.numel()
    # To the inner rank i go the pieces of place i of every node, already in the order in which it will send them on.
    inside = _Hop(sender, "inner", levels.inner, input.view(outer.size, inner.size, numel).transpose(0, 1))
    first = inside.start(None)

    def start_between() -> Pending:
        staging = outer.take_buffer(outer.size * numel, torch.float32, input.device)
        sums = staging[: outer.size * numel].view(outer.size, 1, numel)
        inside.sum_into(sums.squeeze(1), None, False)
        between = _Hop(sender, "outer", levels.outer, sums)
        pending = between.start(lambda: between.sum_into(output.unsqueeze(0), factor, accumulate), keep_own=True)
        outer.give_buffer(staging)
        return pending

    return TwoHops(first, start_between, outer, "reduce_scatter", sender.what, input.nbytes)


class _Hop:
    """One packed exchange: rank r is sent `pieces[r]`, and what comes back is summed with the own `pieces[own]`."""

    def __init__(self, sender: _Sender, name: str, group: Group | None, pieces: torch.Tensor) -> None:
        """`name`: "inner" or "outer"; `pieces`: (ranks, pieces per rank, elements of a piece)."""
        self.facts = facts_of(group)
        self._sender = sender
        self._name = name
        self._group = group
        self._pieces: torch.Tensor | None = pieces
        self._own: torch.Tensor | None = pieces[self.facts.rank]
        ranks, count, numel = pieces.shape
        self._shape = (ranks - 1, count, sender.packing.nbytes(numel))
        self._nbytes = prod(self._shape)
        self._outgoing, self._incoming = (
            self.facts.take_buffer(self._nbytes, torch.uint8, pieces.device) for _ in range(2)
        )

    def start(self, finish: Callable[[], None] | None, *, keep_own: bool = False) -> Pending:
        """Pack and send; `finish` runs when the peers' pieces are here.

        `keep_own`: the memory of the pieces is free when this returns; the own one is copied.
        """
        facts, sender = self.facts, self._sender
        self._pack()
        if keep_own and self._own is not None:
            self._own = self._own.clone()
        per_rank = self._nbytes // (facts.size - 1)
        splits = [0 if peer == facts.rank else per_rank for peer in range(facts.size)]
        nbytes = per_rank * facts.size
        announce(facts, "all_to_all", sender.what, nbytes, call_mark(nbytes, sender.key))
        pg: Any = self._group if self._group is not None else torch_dist.group.WORLD
        incoming, outgoing = self._incoming[: self._nbytes], self._outgoing[: self._nbytes]
        work = start_all_to_all(pg, facts, incoming, outgoing, splits, splits, sender.what)
        facts.bytes_sent += self._nbytes

        def end() -> None:
            facts.give_buffer(self._outgoing)
            if finish is not None:
                finish()

        mode = WaitMode.SLICES if facts.blocks_host(incoming.device) else WaitMode.STREAM
        pending = Pending((work,), end, facts, "all_to_all", sender.what, nbytes, mode)
        in_background((work,))
        return pending

    def sum_into(self, output: torch.Tensor, factor: float | None, accumulate: bool) -> None:
        """`output` (pieces per rank, elements): the sum over the ranks, once the exchange has been waited for."""
        rank, packing = self.facts.rank, self._sender.packing
        parts = self._incoming[: self._nbytes].view(self._shape)
        sum_packed(output, parts, packing, own=self._own, own_place=rank, scale=factor, accumulate=accumulate)
        self.facts.give_buffer(self._incoming)
        self._own = None  # a view: the handle lives on, and who asks who holds the memory must not find it

    def _pack(self) -> None:
        packed = self._outgoing[: self._nbytes].view(self._shape)
        loco, packing = self._sender.loco, self._sender.packing
        pieces, self._pieces = self._pieces, None
        assert pieces is not None, "an exchange is started once"
        peers = [peer for peer in range(self.facts.size) if peer != self.facts.rank]
        if loco is None:
            for slot, peer in enumerate(peers):
                quantize(packed[slot], pieces[peer], packing)
            return
        errors = loco.errors(self._name, (len(peers), *pieces.shape[1:]), pieces.device)
        for slot, peer in enumerate(peers):
            quantize(packed[slot], pieces[peer], packing, error=errors[slot], err_beta=loco.err_beta)
