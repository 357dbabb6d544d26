"""From the config to the ZeRO core: who shards the parameters, and what the optimizer around the base one is told.

Part of the composition root (``build.py``). Offload sections are read in ``build_offload.py``, which ranks a block or
bucket travels over in ``build_routes.py``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import collectives
from deepspeed.comm.mesh import ParallelMesh
from deepspeed.runtime.accumulation import GradAccumulation
from deepspeed.runtime.build_offload import offload_options, offloads_parameters, parameter_home
from deepspeed.runtime.build_routes import ZeroRoutes
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.optimizers import is_elementwise
from deepspeed.runtime.precision import PrecisionPolicy, low_precision_safe_params
from deepspeed.runtime.zero.block_cut import CutOptions
from deepspeed.runtime.zero.gather import GatherOptions
from deepspeed.runtime.zero.historical import optimizer_class
from deepspeed.runtime.zero.optimizer import ZeroOptimizer
from deepspeed.runtime.zero.options import ZeroOptions
from deepspeed.runtime.zero.placement import Placement
from deepspeed.runtime.zero.sharded_module import ShardedModule
from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config

AUTO_BLOCK = 1 << 20  # elements: parameters that may stay gathered are moved in blocks of at least these
GATHERED_SHARE = 8  # of the free memory, the part that gathered parameters may take when the config does not say


def shard_module(
    model: nn.Module,
    config: DeepSpeedConfig,
    mesh: ParallelMesh,
    names: dict[int, str],
    device: torch.device,
    routes: ZeroRoutes,
) -> ShardedModule | None:
    """Who shards and gathers the parameters at stage 3; None where every rank keeps them whole."""
    zero = config.zero_config
    world = routes.shards.world
    offload = offloads_parameters(config, device)
    if not Placement.for_stage(int(zero.stage), world, offload=offload).parameter_sharded:
        return None
    apply_zero_leaf_module_config(model, zero.leaf_module)
    total = sum(param.numel() for param in model.parameters())
    width = max((param.element_size() for param in model.parameters()), default=4)
    max_live = zero.max_live_parameters
    if "max_live_parameters" not in zero.model_fields_set:
        max_live = min(max_live, agreed_budget(device, mesh.group("zero")) // width)
    set_by_user = "reduce_bucket_size" in zero.model_fields_set
    fits = total <= max_live
    target = zero.reduce_bucket_size if set_by_user else max(AUTO_BLOCK, -(-total // 4)) if fits else None
    return ShardedModule(
        model,
        process_group=routes.gather_group,
        rank=routes.shards.rank,
        world=world,
        names=names,
        gather=GatherOptions(
            max_live=max_live,
            max_reuse=zero.max_reuse_distance,
            prefetch=zero.prefetch_bucket_size,
            overlap=bool(zero.overlap_comm),
        ),
        cut_options=CutOptions(
            target=target,
            split_atoms=set_by_user,
            max_block=zero.reduce_bucket_size,
            persistent=zero.param_persistence_threshold,
            max_persistent=zero.model_persistence_threshold,
            granularity=zero.module_granularity_threshold,
        ),
        route=routes.gather,
        frozen_route=routes.gather_frozen,
        align_numel=routes.align_numel,
        host=parameter_home(config, device),
    )


def agreed_budget(device: torch.device, group: Any) -> int:
    """Bytes of gathered parameters every rank can afford: a share of the free memory of the rank that has least."""
    free = get_accelerator().available_memory()
    if device.type == "cpu":
        free //= int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    least = torch.tensor([float(free)], dtype=torch.float64).to(device)
    collectives.all_reduce(least, group, op="min", what="free memory of the ranks").wait()
    return int(least.item()) // GATHERED_SHARE


def wrap_optimizer(
    basic: torch.optim.Optimizer,
    config: DeepSpeedConfig,
    mesh: ParallelMesh,
    precision: PrecisionPolicy,
    names: dict[int, str],
    model: nn.Module,
    accumulation: GradAccumulation,
    sharded: ShardedModule | None,
    routes: ZeroRoutes,
) -> ZeroOptimizer:
    """``basic`` inside the ZeRO core, with the placement of the configured stage."""
    zero = config.zero_config
    world = mesh.size("zero")
    offload = sharded is not None and sharded.host is not None
    placement = Placement.for_stage(int(zero.stage), routes.shards.world, routes.axis, offload=offload)
    scaler = None
    if precision.fp16_scaling:
        fp16 = config.float16_config
        dynamic = not fp16.loss_scale
        scaler = CreateLossScaler(
            dtype=torch.float16,
            static_loss_scale=fp16.loss_scale or 1.0,
            dynamic_scaling=dynamic,
            dynamic_loss_args=config.float16_config.dynamic_loss_scale_args() if dynamic else None,
        )
    set_by_user = zero.model_fields_set
    bucket = zero.reduce_bucket_size if "reduce_bucket_size" in set_by_user else None
    gather = zero.allgather_bucket_size if "allgather_bucket_size" in set_by_user else None
    safe = (
        {id(p) for p in low_precision_safe_params(model, precision.autocast_comm_modules)}
        if precision.autocast
        else set()
    )
    options = ZeroOptions(
        bucket_numel=bucket,
        gather_numel=gather or None,
        accept_unused=zero.ignore_unused_parameters or not zero.stage,
        overlap=bool(zero.overlap_comm),
        pre_divide=pre_divide(config, world),
        sum_gradients=config.gradient_allreduce_op == "sum",
        clip=float(config.gradient_clipping or 0.0),
        compute_norm=zero.compute_grad_norm,
        elementwise=is_elementwise(basic),
        round_robin=zero.round_robin_gradients,
        accumulates=accumulation.steps > 1 or not accumulation.managed,
        by_rows=row_wise_parameters(model, every_embedding=config.sparse_gradients_enabled),
        comm_dtype_of=lambda param: precision.autocast if id(param) in safe else None,
        offload=offload_options(config, basic, precision, routes.shards.world),
    )
    return optimizer_class(int(zero.stage), precision, basic, mics=zero.mics_shard_size > 0)(
        basic,
        names=names,
        placement=placement,
        precision=precision,
        process_group=mesh.group("zero"),
        rank=mesh.rank("zero"),
        world=world,
        options=options,
        scaler=scaler,
        sharding=sharded,
        shards=routes.shards,
        grad_route=routes.reduce,
    )


def row_wise_parameters(model: nn.Module, *, every_embedding: bool) -> frozenset[int]:
    """``id()`` of embedding weights whose gradients are sparse, or (``sparse_gradients``) of all embeddings.

    Only unsharded gradients can travel as rows; shards are summed densely.
    """
    return frozenset(
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (module.sparse or every_embedding)
    )


def pre_divide(config: DeepSpeedConfig, world: int) -> float:
    """What gradients are divided by before the sum (the rest of ``world`` comes after it)."""
    if config.prescale_gradients:
        factor = float(config.gradient_predivide_factor)
        return factor if factor != 1.0 else float(world)
    return 1.0
