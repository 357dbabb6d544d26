"""The way of saved weights that lie in shards (``sharded_weight.py``) into a live module.

A live parameter that is sharded itself takes only this rank's elements from them; a whole one takes all,
one parameter at a time. So nobody needs memory for a second copy of the model.

Owns: copying such weights. Does not own: which weight goes where (``restore.py``), files (``reader.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.index import Extent, copy_into
from deepspeed.checkpoint.sharded_weight import ShardedWeight
from deepspeed.runtime.zero.sharded_parameter import block_of


@dataclass
class WeightPlan:
    """A live parameter, and where the elements come from that this rank holds of it."""

    param: nn.Parameter
    extents: list[Extent]

    @torch.no_grad()
    def apply(self) -> None:
        """Copy: into this rank's shard of a sharded parameter, or into a whole one. Local."""
        block = block_of(self.param)
        if block is None:
            fill(self.param.detach(), self.extents, 0)
        else:
            position: int = self.param._ds_position  # type: ignore[attr-defined]
            block.write_own(position, lambda elements, start: fill(elements, self.extents, start))


def plan_weights(module: nn.Module, saved: dict[str, ShardedWeight]) -> list[WeightPlan]:
    """Find the elements every parameter of ``module`` needs on this rank; ``saved`` by the module's own names.

    Raises CheckpointError for elements that are nowhere. Shapes have been compared before.
    """
    plans = []
    taken: set[int] = set()
    for name, param in module.named_parameters(remove_duplicate=False):
        weight = saved.get(name)
        if weight is None or id(param) in taken:
            continue
        taken.add(id(param))
        block = block_of(param)
        if block is None:
            start, numel = 0, math.prod(weight.shape)
        else:
            start, elements = block.own(param._ds_position)  # type: ignore[attr-defined]
            numel = elements.numel()
        if numel:  # else nothing is to be read, and no file is to be opened for it
            plans.append(WeightPlan(param, weight.cover(start, numel)))
    return plans


def fill(target: torch.Tensor, extents: list[Extent], start: int) -> None:
    """Fill ``target``, elements from ``start`` of its parameter, from flat extents; casts, and strides may be any."""
    if target.is_contiguous():
        copy_into(target, extents, start)
        return
    whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    copy_into(whole, extents, start)
    target.copy_(whole)


def split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, ShardedWeight]]:
    """``(values that are here, weights that lie in shards)`` of a saved module's state."""
    lying = {name: value for name, value in state.items() if isinstance(value, ShardedWeight)}
    return {name: value for name, value in state.items() if name not in lying}, lying


def made_whole(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` with every weight put together in host memory; tied ones stay one tensor."""
    return dict(_whole_items(state))


def _whole_items(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    made: dict[int, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, ShardedWeight):
            if id(value) not in made:
                made[id(value)] = value.whole()
            value = made[id(value)]
        yield name, value
