"""From the ZeRO++ and MiCS keys to the routes of parameters and gradients: which groups, and what travels over them.

Part of the composition root (``build.py``); nothing else reads these keys. The sizes:

    shards   the ranks that shards are spread over: mics_shard_size neighbours, else all that average gradients
    near     the ranks joined by fast links: zero_hpz_partition_size, else those of one host (LOCAL_WORLD_SIZE)

Where *near* does not cut the shards into several equal blocks there is one level of links, and packed collectives cross
it in one hop.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.comm import collectives
from deepspeed.comm.blockwise import INT4, INT8
from deepspeed.comm.mesh import ParallelMesh
from deepspeed.comm.rank_grid import refuse_uneven
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.routes import GatherRoute, GradRoute, ShardRanks
from deepspeed.utils.logging import log_dist_once

_MICS, _HPZ = "zero_optimization.mics_shard_size", "zero_optimization.zero_hpz_partition_size"
_GATHER = "gather"  # gathers have groups of their own, so that their order is independent of that of reductions


@dataclass(frozen=True)
class ZeroRoutes:
    """What stage 3 is put together from.

    ``gather_group``: the ranks of the shards, for gathers; ``align_numel``: see ``ShardedModule``; ``axis``: the mesh
    axis of the shards.
    """

    shards: ShardRanks
    gather_group: Any
    gather: GatherRoute
    gather_frozen: GatherRoute
    reduce: GradRoute
    align_numel: int = 1
    axis: str = "zero"


def zero_routes(config: DeepSpeedConfig, mesh: ParallelMesh, device: torch.device) -> ZeroRoutes:
    """The routes that ``config`` asks for. Collective over the ranks of zero.

    Raises ValueError, with the equation, for a size that does not divide the ranks it cuts.
    """
    zero = config.zero_config
    check_shard_sizes(zero, mesh)
    everyone = ShardRanks(mesh.group("zero"), mesh.rank("zero"), mesh.size("zero"))
    if int(zero.stage) < 3:
        return ZeroRoutes(everyone, everyone.group, GatherRoute(None), GatherRoute(None), GradRoute(everyone.group))
    shards = shard_ranks(zero.mics_shard_size, mesh, everyone)
    within = shards.world if shards.replicas is not None else None
    near = near_ranks(zero, mesh, shards, device)

    def cut(purpose: str) -> tuple[Any, Any]:
        """The ranks of the shards as one group, and as the two levels of links; (the same, where there is one)."""
        if within is not None:
            group: Any = mesh.levels(within, purpose=purpose, name=_MICS).inner
        else:
            group = mesh.separate_group("zero", purpose)
        if near == 1:
            return group, group
        return group, mesh.levels(near, within=within, purpose=purpose, name=_HPZ)

    group, levels = cut(_GATHER)
    secondary = levels.inner if zero.zero_hpz_partition_size > 1 else None
    others = everyone.group if within is not None else None
    in_two_hops = zero.mics_shard_size > 0 and zero.mics_hierarchical_params_gather
    exact = GatherRoute(levels if in_two_hops else group, secondary=secondary, everyone=others)
    packed = GatherRoute(levels, INT8, secondary=secondary, everyone=others)
    weights, gradients = zero.zero_quantized_weights, zero.zero_quantized_gradients
    frozen = weights or zero.zero_quantized_nontrainable_weights
    if weights:
        log_dist_once(
            "zero_quantized_weights: weights are gathered rounded, so that what forward writes through param.data is "
            "lost; write into the parameter itself under torch.no_grad()",
            ranks=[0],
        )
    reduce_group, reduce_levels = cut("") if gradients else (shards.group, None)
    return ZeroRoutes(
        shards=shards,
        gather_group=group,
        gather=packed if weights else exact,
        gather_frozen=packed if frozen else exact,
        reduce=GradRoute(reduce_levels, INT4, loco=zero.zeropp_loco_param, replicas=shards.replicas)
        if gradients
        else GradRoute(reduce_group, replicas=shards.replicas),
        axis="zero" if within is None else "zero_inner",
        align_numel=max(INT8.block, INT4.block) if frozen or gradients else 1,  # no scale is shared by two parameters
    )


def check_shard_sizes(zero: DeepSpeedZeroConfig, mesh: ParallelMesh) -> None:
    """Refuse sizes that do not divide the ranks they cut. Local, so that it costs nothing before the model is touched.

    Raises ValueError with the key, the equation and the sizes that fit.
    """
    if int(zero.stage) < 3:
        return
    shard, near = zero.mics_shard_size, zero.zero_hpz_partition_size
    if shard > 0:
        mesh.check_divides(shard, _MICS)
    if near > 1:
        mesh.check_divides(near, _HPZ)
        if shard > 0:
            refuse_uneven(_HPZ, near, shard, "of mics_shard_size")


def near_ranks(zero: DeepSpeedZeroConfig, mesh: ParallelMesh, shards: ShardRanks, device: torch.device) -> int:
    """Neighbours that fast links join, where something asks for two levels of links; else 1."""
    size = zero.zero_hpz_partition_size
    if size > 1:
        mesh.add_hpz(size)
        return size
    packs = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights or zero.zero_quantized_gradients
    return ranks_of_host(mesh, shards.world, device) if packs or zero.mics_hierarchical_params_gather else 1


def shard_ranks(size: int, mesh: ParallelMesh, everyone: ShardRanks) -> ShardRanks:
    """``mics_shard_size`` neighbours with their replicas on the other ranks; all ranks where it is off or as large."""
    if size <= 0 or size == everyone.world:
        return everyone
    levels = mesh.levels(size, name=_MICS)
    rank = mesh.rank("zero_inner", inner=size)
    return ShardRanks(levels.inner, rank, size, replicas=levels.outer)


def ranks_of_host(mesh: ParallelMesh, world: int, device: torch.device) -> int:
    """How many neighbours among ``world`` shards are on one host, as all ranks see it; 1 where that makes no blocks."""
    ranks = mesh.ranks("zero")
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or mesh.world_size)
    hosts = [rank // max(local, 1) for rank in ranks]
    size = hosts.count(hosts[0])
    regular = all(host == hosts[place - place % size] for place, host in enumerate(hosts)) and world % size == 0
    size = size if regular and size < world else 1
    if len(ranks) > 1:  # hosts of different sizes give different answers
        seen = torch.tensor([size, -size], dtype=torch.int64).to(device)
        collectives.all_reduce(seen, mesh.group("zero"), op="max", what="ranks of one host").wait()
        high, low = int(seen[0]), -int(seen[1])
        size = high if high == low else 1
    return size
