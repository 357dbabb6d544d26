"""How sharded parameters and gradients travel: values that choose among the collectives of ``deepspeed.comm``.

    GatherRoute   parameters: over one group or two levels, exact or packed (qwZ), and where a second copy of a gathered
                  block is kept (hpZ)
    GradRoute     gradients: over one group or two levels, exact or packed (qgZ) with error feedback (LoCo), and which
                  replicas of the shards are added up at the boundary (MiCS)

Everything else of stage 3 is the same whatever stands here. What a route does not change: shards and masters, which are
always exact; which ranks own what (``layout.py``); when things travel (``gather.py``, ``reduce.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.comm import collectives, hierarchical, quantized
from deepspeed.comm.blockwise import Packing
from deepspeed.comm.group_facts import Group, facts_of
from deepspeed.comm.levels import Levels, TwoHops
from deepspeed.comm.loco import LocoState
from deepspeed.comm.pending import Pending, What

_PACKABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ShardRanks:
    """The ranks that the shards are spread over: all that average gradients, or (MiCS) a block of these.

    Attributes:
        group, rank, world: a process group (None: the default one), this rank's place in it, and its size.
        replicas: the ranks that hold the same shard, where there are several; else None.
    """

    group: Group | None
    rank: int
    world: int
    replicas: Group | None = None


@dataclass(frozen=True)
class GatherRoute:
    """How a block of parameters is made whole.

    Attributes:
        group: the ranks that hold its shards, as one group or as two levels.
        packing: what travels instead of floats; None: the floats themselves.
        secondary: a group of neighbours that share a second copy, gathered again among them alone; None: no copy.
        everyone: all ranks that use the block, where replicas of its shards are on ranks outside ``group``.
    """

    group: Group | Levels | None
    packing: Packing | None = None
    secondary: Group | None = None
    everyone: Group | None = None

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether gathered values of this dtype differ from those of the shards."""
        return self.packing is not None and dtype in _PACKABLE

    def gather(
        self, full: torch.Tensor, shard: torch.Tensor, *, exact: bool, what: What, async_op: bool, key: int
    ) -> Pending:
        """Fill ``full`` from the shards of all ranks; ``exact``: with their very values. Collective."""
        if exact or not self.rounds(shard.dtype):
            return hierarchical.all_gather(full, shard, self.group, what=what, async_op=async_op, key=key)
        assert self.packing is not None
        return quantized.all_gather(
            full, shard, self.group, what=what, async_op=async_op, key=key, packing=self.packing
        )


class SecondaryShard:
    """A copy of a gathered block, cut over a group of neighbours, good as long as the block's values stay (hpZ).

    Invariant: it is filled, used and outdated on all ranks at the same place, since every rank's block counts the same
    ``generation``.
    """

    def __init__(self, group: Group | None) -> None:
        self.group = group
        self.piece: torch.Tensor | None = None  # 1D, this rank's part of the copy
        self.rounded = False  # the copy is of values that a packed gather had rounded
        self._generation = -1

    def holds(self, generation: int) -> bool:
        """Whether the copy is that of the values of ``generation``."""
        return self.piece is not None and self._generation == generation

    @torch.no_grad()
    def keep(self, full: torch.Tensor, generation: int, *, rounded: bool) -> None:
        """Take a copy of ``full``.

        Of exact values always, since nothing counts what forward writes through ``param.data``. Packed ones stay those
        of the first gather: what is written into them that way is lost.
        """
        if rounded and self.holds(generation):
            return
        facts = facts_of(self.group)
        numel = full.numel() // facts.size
        own = full.narrow(0, facts.rank * numel, numel)
        if self.piece is None:
            self.piece = own.clone()
        else:
            self.piece.copy_(own)
        self._generation, self.rounded = generation, rounded

    def gather(self, full: torch.Tensor, *, what: What, key: int) -> Pending:
        """Start to fill ``full`` from the copies of the neighbours. Collective over them."""
        assert self.piece is not None
        return collectives.all_gather(full, self.piece, self.group, what=what, async_op=True, key=key)


@dataclass(frozen=True)
class GradRoute:
    """How the gradients of a bucket are added up.

    Attributes:
        group: the ranks that hold the shards, as one group or as two levels.
        packing: what travels instead of floats; None: the floats themselves.
        loco: settings of the error feedback of packed gradients (``zeropp_loco_param``); None: no feedback.
        replicas: ranks with the same shard, whose sums are added once per step; None: there are none.
    """

    group: Group | Levels | None
    packing: Packing | None = None
    loco: Mapping[str, Any] | None = field(default=None)
    replicas: Group | None = None

    @property
    def replica_count(self) -> int:
        """Ranks that hold the same shard."""
        return facts_of(self.replicas).size if self.replicas is not None else 1

    def feedback(self, dtype: torch.dtype) -> LocoState | None:
        """A fresh error feedback for one bucket of this dtype; None where there is none to give."""
        if self.packing is None or self.loco is None or dtype not in _PACKABLE:
            return None
        return LocoState.from_config(self.loco)

    def reduce_scatter(
        self,
        piece: torch.Tensor,
        bucket: torch.Tensor,
        *,
        scale: float,
        accumulate: bool,
        loco: LocoState | None,
        what: What,
        async_op: bool,
        key: int,
    ) -> Pending:
        """``piece (+)= scale * sum over ranks of the own part of bucket``. Collective."""
        if self.packing is None or bucket.dtype not in _PACKABLE or piece.dtype not in _PACKABLE:
            group: Any = self.group
            return collectives.reduce_scatter(
                piece, bucket, group, average=False, scale=scale, accumulate=accumulate, what=what,
                async_op=async_op, key=key,
            )  # fmt: skip
        return quantized.reduce_scatter(
            piece, bucket, self.group, average=False, scale=scale, accumulate=accumulate, what=what,
            async_op=async_op, key=key, packing=self.packing, loco=loco,
        )  # fmt: skip

    def release_buffers(self) -> None:
        """Free the staging buffers that the collectives of this route keep for the next call."""
        for group in self.group if isinstance(self.group, Levels) else (self.group,):
            collectives.release_buffers(group)

    def add_replicas(self, piece: torch.Tensor, *, what: What, async_op: bool, key: int) -> Pending:
        """Add up ``piece`` over the ranks that hold the same shard, in place; equal bits on all. Collective."""
        levels = Levels(None, self.replicas)
        return hierarchical.all_reduce_shard(piece, levels, average=False, what=what, async_op=async_op, key=key)


def push_on(pending: Pending) -> None:
    """Start the second hop of a collective over two levels, once its first has arrived."""
    if isinstance(pending, TwoHops):
        pending.advance()


__all__ = ["GatherRoute", "GradRoute", "SecondaryShard", "ShardRanks", "push_on"]
