"""From an optimizer's parameters to ShardGroups: which parameters share one, in what order, where each element lies.

Owns: the choice of groups and layouts, and the exchange of parameters for leaves in the base optimizer.
Does not own: the tensors (``shard_group.py``), what happens to them.
Invariant: the same parameters in the same order give the same layouts on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed.runtime.precision import PrecisionPolicy
from deepspeed.runtime.swap_tensor.host_store import HostMemory, is_apart
from deepspeed.runtime.zero.layout import ShardLayout
from deepspeed.runtime.zero.options import ZeroOptions
from deepspeed.runtime.zero.placement import Placement
from deepspeed.runtime.zero.routes import ShardRanks
from deepspeed.runtime.zero.shard_group import BoundFragment, GroupSpec, ShardGroup
from deepspeed.runtime.zero.sharded_module import ShardedModule

_ALIGN_BYTES = 64  # parameters and pieces start on cache lines, as torch's own allocations do
_MIN_AUTO_BUCKET = 1 << 20


@dataclass(frozen=True)
class Grouping:
    """Makes groups. ``names`` and ``order``: by id of the parameter, in registration order."""

    placement: Placement
    precision: PrecisionPolicy
    options: ZeroOptions
    shards: ShardRanks
    world: int  # ranks that gradients are averaged over
    names: dict[int, str]
    order: dict[int, int]
    host: HostMemory | None
    sharding: ShardedModule | None

    def groups_for(self, index: int, params: Sequence[nn.Parameter]) -> list[ShardGroup]:
        """The groups that hold ``params`` (trainable, of the optimizer's group ``index``)."""
        runs: dict[tuple[torch.dtype, torch.dtype, torch.device, bool], list[nn.Parameter]] = {}
        sharded = self.placement.state_sharded
        for param in params:
            rows = not sharded and self.world > 1 and id(param) in self.options.by_rows
            runs.setdefault((param.dtype, self._comm_dtype(param), param.device, rows), []).append(param)
        return [
            self._group(index, part, comm_dtype, rows, host)
            for (_, comm_dtype, device, rows), run in runs.items()
            for part, host in self._homes(run, device)
        ]

    def _homes(
        self, run: list[nn.Parameter], device: torch.device
    ) -> list[tuple[list[nn.Parameter], HostMemory | None]]:
        """``run`` in the parts whose states live on the device and in host memory."""
        offload = self.options.offload
        if offload is None or self.host is None or not (is_apart(device) or offload.disk or offload.zenflow):
            return [(run, None)]
        stays = (1.0 - offload.ratio) * sum(param.numel() for param in run)
        near: list[nn.Parameter] = []
        for param in run:
            if sum(held.numel() for held in near) + param.numel() > stays:
                break
            near.append(param)
        parts: list[tuple[list[nn.Parameter], HostMemory | None]] = [(near, None), (run[len(near) :], self.host)]
        return [part for part in parts if part[0]]

    def _comm_dtype(self, param: nn.Parameter) -> torch.dtype:
        wanted = self.options.comm_dtype_of(param) or self.precision.comm
        if wanted is not None:
            return wanted
        # What piles up locally in a wider dtype is sent in that dtype; what is sent at once needs no widening.
        local = self.options.accumulates and not self.placement.reduces_every_backward
        return self.precision.accum_dtype(param) if local else param.dtype

    def _group(
        self,
        index: int,
        params: list[nn.Parameter],
        comm_dtype: torch.dtype,
        by_rows: bool,
        host: HostMemory | None,
    ) -> ShardGroup:
        params = sorted(params, key=lambda param: -self.order.get(id(param), 0))  # backward meets the last one first
        world = self.shards.world if self.placement.state_sharded else 1
        if self.options.round_robin and world > 1:
            params = [params[i] for first in range(world) for i in range(first, len(params), world)]
        blocks = self.sharding.cut(params) if self.sharding is not None else [params]
        params = [param for block in blocks for param in block]
        spec = GroupSpec(
            group_index=index,
            names=tuple(self.names.get(id(param), f"group{index}.param{i}") for i, param in enumerate(params)),
            params=tuple(params),
            order=tuple(self.order.get(id(param), 0) for param in params),
            master_dtype=self.precision.master_dtype(params[0]),
            accum_dtype=self.precision.accum_dtype(params[0]),
            comm_dtype=comm_dtype,
            rank=self.shards.rank if world > 1 else 0,
            world=world,
            by_rows=by_rows,
            host=host,
            on_disk=host is not None and self.options.offload is not None and self.options.offload.disk is not None,
        )
        return ShardGroup(spec, self._layout(spec, [len(block) for block in blocks]), self.sharding)

    def _layout(self, spec: GroupSpec, block_lengths: Sequence[int]) -> ShardLayout:
        """Where the group's elements live. Optimizers that look at whole matrices get whole parameters."""
        run = [(name, param.numel()) for name, param in zip(spec.names, spec.params, strict=True)]
        itemsize = spec.params[0].element_size()
        align = self.sharding.align(itemsize) if self.sharding is not None else max(1, _ALIGN_BYTES // itemsize)
        whole = not self.options.elementwise and spec.world > 1
        if self.sharding is not None and not whole:
            parts = iter(run)
            blocks = [[next(parts) for _ in range(length)] for length in block_lengths]
            return ShardLayout.by_block(blocks, spec.world, param_align=align, piece_align=align)
        build = ShardLayout.by_parameter if whole else ShardLayout.by_element
        limit = self._segment_numel(sum(numel for _, numel in run))
        return build(run, spec.world, segment_numel=limit, param_align=align, piece_align=align)

    def _segment_numel(self, total: int) -> int:
        """Elements per bucket of a group of ``total``; a bucket is also what one all-gather publishes."""
        wanted = self.options.bucket_numel or max(_MIN_AUTO_BUCKET, -(-total // 4))
        gather = self.options.gather_numel if self.placement.state_sharded else None
        return min(wanted, gather) if gather else wanted


def exchange_for_leaves(base: torch.optim.Optimizer, groups: Sequence[ShardGroup]) -> None:
    """Put the leaves where the model's parameters were, in registration order, and carry existing state over."""
    leaves: dict[int, list[tuple[int, nn.Parameter]]] = {}
    for group in groups:
        for bound in group.fragments:
            leaves.setdefault(group.group_index, []).append((group.order[bound.position], bound.leaf))
    for index, base_group in enumerate(base.param_groups):
        ordered = sorted(leaves.get(index, []), key=lambda item: item[0])
        base_group["params"] = [leaf for _, leaf in ordered]
    for group in groups:
        for bound in group.fragments:
            if bound.param is not bound.leaf and bound.param in base.state:
                _carry_state(base, bound)
    held = {id(leaf) for base_group in base.param_groups for leaf in base_group["params"]}
    for param in [param for param in base.state if id(param) not in held]:
        del base.state[param]


def _carry_state(base: torch.optim.Optimizer, bound: BoundFragment) -> None:
    fragment, carried = bound.fragment, {}
    for key, value in base.state[bound.param].items():
        if isinstance(value, torch.Tensor) and value.shape == bound.param.shape and value.dim():
            piece = value.reshape(-1).narrow(0, fragment.param_start, fragment.numel)
            carried[key] = piece.to(bound.leaf.device, copy=True).view(bound.leaf.shape)
        else:
            carried[key] = value.clone() if isinstance(value, torch.Tensor) else value
    base.state[bound.leaf] = carried
