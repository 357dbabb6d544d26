"""Finishing steps of collectives: what `Pending.wait` runs once the backend has delivered.

Owns: the arithmetic between the delivered bytes and the caller's tensor. Objects with `__slots__` instead of closures:
they are made for each bucket of each step.
"""

from __future__ import annotations

import torch

from deepspeed.comm.group_facts import GroupFacts
from deepspeed.comm.rank_sum import sum_in_rank_order


class Scale:
    """Finishing step: multiply in place."""

    __slots__ = ("factor", "tensor")

    def __init__(self, tensor: torch.Tensor, factor: float) -> None:
        self.tensor = tensor
        self.factor = factor

    def __call__(self) -> None:
        self.tensor.mul_(self.factor)


class LocalSum:
    """Finishing step: sum the ranks' contributions into `output` and return the staging buffer."""

    __slots__ = ("accumulate", "factor", "facts", "output", "parts", "staging")

    def __init__(
        self,
        output: torch.Tensor,
        parts: list[torch.Tensor],
        factor: float | None,
        accumulate: bool,
        facts: GroupFacts,
        staging: torch.Tensor,
    ) -> None:
        self.output = output
        self.parts = parts
        self.factor = factor
        self.accumulate = accumulate
        self.facts = facts
        self.staging = staging

    def __call__(self) -> None:
        with torch.no_grad():
            sum_in_rank_order(self.output, self.parts, scale=self.factor, accumulate=self.accumulate)
        self.facts.give_buffer(self.staging)


class LandShard:
    """Finishing step of a native reduce-scatter whose result needs a conversion, a factor or an addition."""

    __slots__ = ("accumulate", "factor", "facts", "output", "shard")

    def __init__(
        self, output: torch.Tensor, shard: torch.Tensor, factor: float | None, accumulate: bool, facts: GroupFacts
    ) -> None:
        self.output = output
        self.shard = shard
        self.factor = factor
        self.accumulate = accumulate
        self.facts = facts

    def __call__(self) -> None:
        shard = self.shard[: self.output.numel()]
        with torch.no_grad():
            if self.accumulate:
                self.output.add_(shard, alpha=1.0 if self.factor is None else self.factor)
            else:
                self.output.copy_(shard)
                if self.factor is not None:
                    self.output.mul_(self.factor)
        self.facts.give_buffer(self.shard)
