"""The composition root: from what the user passed to ``deepspeed.initialize`` to an engine.

The only place that reads feature config and puts collaborators together, as small functions in reading order:

    config -> mesh -> module -> precision -> optimizer -> scheduler -> data -> callbacks -> engine

What the ZeRO core is told stands beside it: ``build_zero.py``, ``build_offload.py``, ``build_routes.py``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.mesh import ParallelMesh, set_current_mesh
from deepspeed.runtime import summary
from deepspeed.runtime.accumulation import GradAccumulation
from deepspeed.runtime.applied_config import apply_config, check_tested, dump_state
from deepspeed.runtime.build_offload import offloads_parameters, start_zenflow, takes_host_optimizer
from deepspeed.runtime.build_routes import check_shard_sizes, zero_routes
from deepspeed.runtime.build_zero import shard_module, wrap_optimizer
from deepspeed.runtime.callbacks import CallbackList
from deepspeed.runtime.config import STRICT_VARIABLE, DeepSpeedConfig
from deepspeed.runtime.config_alike import settings_of_all_ranks
from deepspeed.runtime.config_source import load_source
from deepspeed.runtime.config_types import torch_dtype
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.engine import DeepSpeedEngine, EngineParts
from deepspeed.runtime.lr_schedules import build_scheduler
from deepspeed.runtime.optimizers import build_optimizer
from deepspeed.runtime.precision import PrecisionPolicy, cast_module
from deepspeed.runtime.precision_config import DEFAULT_AUTOCAST_MODULES
from deepspeed.runtime.replicas import agree_on_start, broadcast_module
from deepspeed.runtime.watchers import default_callbacks
from deepspeed.runtime.zero.admission import take_over
from deepspeed.runtime.zero.init_shard import make_whole
from deepspeed.runtime.zero.meta_parameters import take_off_meta
from deepspeed.runtime.zero.muon.tagging import set_optimizer_flags
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.placement import Placement
from deepspeed.utils.logging import log_dist


def build_engine(
    *,
    args: Any,
    model: nn.Module,
    optimizer: Any,
    model_parameters: Any,
    training_data: Any,
    lr_scheduler: Any,
    distributed_port: int,
    mpu: Any,
    dist_init_required: bool | None,
    collate_fn: Any,
    config: Any,
    mesh_param: Any,
) -> DeepSpeedEngine:
    """Everything ``deepspeed.initialize`` does after its arguments have been looked at."""
    if not dist.is_initialized() and dist_init_required is not False:
        dist.init_distributed(
            dist_backend=None, distributed_port=distributed_port, dist_init_required=dist_init_required
        )
    mesh = build_mesh(config, mpu, mesh_param)
    parsed = DeepSpeedConfig.parse(config, strict=strict_config(), dp_world_size=mesh.size("dp"))
    check_shard_sizes(parsed.zero_config, mesh)
    apply_config(parsed, mesh, mpu)
    take_over(model.parameters())
    device = local_device()
    unshard_below_stage_3(model, parsed)
    precision, report = prepare_module(model, parsed, device, mesh)
    names = name_parameters(model)
    group = mesh.group("zero")
    if mesh.size("zero") > 1:
        agree_on_start(model, settings_of_all_ranks(parsed), group)
        broadcast_module(model, group)
    accumulation = GradAccumulation(parsed.gradient_accumulation_steps or 1, parsed.managed_gradient_accumulation)
    basic = choose_optimizer(parsed, model, optimizer, model_parameters, precision)
    if basic is not None:
        check_tested(basic, parsed)
    routes = zero_routes(parsed, mesh, device)
    sharded = shard_module(model, parsed, mesh, names, device, routes)
    wrapped = (
        wrap_optimizer(basic, parsed, mesh, precision, names, model, accumulation, sharded, routes)
        if basic is not None
        else None
    )
    if sharded is not None:
        sharded.shard_rest()
        sharded.install_hooks()
    offload = DeepSpeedZeRoOffload(model, sharded) if int(parsed.zero_config.stage) == 3 else None
    if wrapped is not None and offload is not None:
        wrapped.parameter_offload = offload
    schedule = choose_scheduler(parsed, lr_scheduler, basic)
    loaders = LoaderFactory(parsed, mesh)
    engine = DeepSpeedEngine(
        EngineParts(
            module=model,
            config=parsed,
            mesh=mesh,
            precision=precision,
            accumulation=accumulation,
            device=device,
            param_names=names,
            sharded_module=sharded,
            parameter_offload=offload,
            optimizer=wrapped,
            basic_optimizer=basic,
            lr_scheduler=schedule,
            client_lr_scheduler=lr_scheduler,
            collate_fn=collate_fn,
            args=args,
            mpu=mpu,
            callbacks=CallbackList(default_callbacks(parsed)),
            make_checkpoint_manager=checkpoint_manager,
            make_dataloader=loaders,
            cast_report=report,
        )
    )
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    start_zenflow(parsed, wrapped, engine.training_dataloader, accumulation.steps)
    summary.announce(engine)
    if parsed.dump_state:
        dump_state(engine)
    return engine


# ---- mesh and config -----------------------------------------------------------------------------------------------


def build_mesh(config: Any, mpu: Any, mesh_param: Any) -> ParallelMesh:
    """The mesh of ranks: from an ``mpu`` object, from ``mesh_param`` (dp, sp), from the config, or all-dp.

    Raises ValueError when the sizes do not multiply to the world, with the equation.
    """
    if mpu is not None:
        mesh = ParallelMesh.from_mpu(mpu)
    else:
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        mesh = ParallelMesh.build(world, rank=rank, sp=sequence_size(config, mesh_param, world))
    set_current_mesh(mesh)
    return mesh


def sequence_size(config: Any, mesh_param: Any, world: int) -> int:
    """Ranks that share one sequence. A size that is no count is left to the config's own check."""
    data = load_source(config).data
    keys = ("data_parallel_size", "sequence_parallel_size")
    sizes: dict[str, int] = {}
    for key in keys:
        size = data.get(key)
        if isinstance(size, (int, float)) and not isinstance(size, bool) and size >= 1:
            sizes[key] = int(size)
    where = " and ".join(sizes)
    if mesh_param is not None:
        given = dict(zip(keys, map(int, mesh_param), strict=True))
        if any(given[key] != size for key, size in sizes.items()):
            raise ValueError(
                f"mesh_param={tuple(mesh_param)} (data, sequence parallel) differs from the config: {sizes}"
            )
        sizes, where = given, f"mesh_param={tuple(mesh_param)}"
    sequence = sizes.get("sequence_parallel_size", 1)
    replicas = sizes.get("data_parallel_size", max(1, world // sequence))
    if replicas * sequence != world:
        raise ValueError(
            f"{where}: {replicas} data-parallel x {sequence} sequence-parallel = {replicas * sequence} ranks; the "
            f"world has {world}"
        )
    return sequence


def strict_config() -> bool:
    """DS_CONFIG_STRICT=1: unknown keys are errors."""
    return os.environ.get(STRICT_VARIABLE, "0").strip().lower() in ("1", "true", "yes", "on")


def local_device() -> torch.device:
    """The accelerator device of this rank."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    accelerator.set_device(local)
    return torch.device(accelerator.device_name(local))


# ---- module and precision ------------------------------------------------------------------------------------------


def unshard_below_stage_3(model: nn.Module, config: DeepSpeedConfig) -> None:
    """Parameters that ``zero.Init`` has sharded become whole where the stage wants them so. Collective."""
    stage = int(config.zero_config.stage)
    if stage < 3:
        count = make_whole(model.parameters())
        if count:
            log_dist(
                f"zero_optimization.stage is {stage}, but the model was built sharded: its {count} parameters are made "
                "whole. Give zero.Init the same config, and nothing is sharded",
                ranks=[0],
            )


def prepare_module(
    model: nn.Module, config: DeepSpeedConfig, device: torch.device, mesh: ParallelMesh
) -> tuple[PrecisionPolicy, dict[str, list[str]]]:
    """Cast and move ``model`` in place; returns the policy and what was cast."""
    precision = build_precision(config, model, shares_sequences=mesh.size("sp") > 1)
    report = cast_module(model, precision)
    stage = int(config.zero_config.stage)
    offload = offloads_parameters(config, device)
    sharded = Placement.for_stage(stage, mesh.size("zero"), offload=offload).parameter_sharded
    take_off_meta(model, device, stage, sharded=sharded)
    model.to(device)
    return precision, report


def build_precision(config: DeepSpeedConfig, model: nn.Module, *, shares_sequences: bool = False) -> PrecisionPolicy:
    """The dtype record; ranks that share sequences reduce in a dtype of their own.

    Raises ValueError for a dtype the accelerator cannot compute with.
    """
    fp16, bf16, types, autocast = (
        config.float16_config,
        config.bfloat16_config,
        config.data_types,
        config.torch_autocast,
    )
    accelerator = get_accelerator()
    if fp16.enabled and not accelerator.is_fp16_supported():
        raise ValueError(
            f"fp16.enabled: accelerator {accelerator.device_name()!r} cannot compute in fp16; use bf16 or fp32"
        )
    if bf16.enabled and not accelerator.is_bf16_supported():
        raise ValueError(f"bf16.enabled: accelerator {accelerator.device_name()!r} cannot compute in bf16; use fp32")
    dtype = torch.float16 if fp16.enabled else torch.bfloat16 if bf16.enabled else torch.float32
    low_masters = fp16.fp16_master_weights_and_grads or bf16.bf16_master_weights_and_grads
    autocast_dtype = (torch_dtype(autocast.dtype) or torch.bfloat16) if autocast.enabled else None
    modules = autocast.lower_precision_safe_modules
    return PrecisionPolicy(
        model=dtype,
        master=dtype if low_masters else torch.float32,
        accum=torch_dtype(types.grad_accum_dtype),
        comm=config.seq_parallel_communication_data_type if shares_sequences else config.communication_data_type,
        buffer=torch_dtype(types.buffer_dtype),
        autocast=autocast_dtype,
        autocast_comm_modules=tuple(DEFAULT_AUTOCAST_MODULES if modules is None else modules),
        keep_fp32=fp32_patterns(types.keep_in_fp32_modules, model),
        check_overflow=fp16.enabled or (bf16.enabled and bf16.check_grad_overflow) or autocast_dtype == torch.float16,
        cast_inputs=fp16.enabled and fp16.auto_cast,
        fp16_scaling=fp16.enabled or autocast_dtype == torch.float16,
    )


def fp32_patterns(setting: str | list[str], model: nn.Module) -> tuple[str, ...]:
    """Module patterns that stay fp32: the list given, or ("auto") what a transformers model declares for itself."""
    if setting != "auto":
        return tuple(setting)
    declared: list[str] = []
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        declared += list(getattr(model, attribute, None) or ())
    return tuple(dict.fromkeys(declared))


def name_parameters(model: nn.Module) -> dict[int, str]:
    """``id(parameter) -> name`` in registration order; a tied parameter has its first name."""
    return {id(param): clean_name(name) for name, param in model.named_parameters()}


def clean_name(name: str) -> str:
    """``name`` without the prefix torch.compile puts on the modules it wraps."""
    return name.replace("_orig_mod.", "")


# ---- optimizer -----------------------------------------------------------------------------------------------------


def choose_optimizer(
    config: DeepSpeedConfig,
    model: nn.Module,
    client: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None,
    model_parameters: Any,
    precision: PrecisionPolicy,
) -> torch.optim.Optimizer | None:
    """The torch optimizer: the client's instance, what the client's callable returns, or the config's; else None."""
    params = param_groups(model, model_parameters)
    if client is not None and config.optimizer is not None and config.optimizer.type is not None:
        log_dist(
            f"optimizer.type={config.optimizer.type!r} has no effect: the optimizer passed to deepspeed.initialize "
            f"({getattr(client, '__name__', type(client).__name__)}) is used",
            ranks=[0],
            level=logging.WARNING,
        )
    if isinstance(client, torch.optim.Optimizer):
        return client
    if callable(client):
        made = client(params)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer: the callable must return a torch.optim.Optimizer; it returned {type(made).__name__}"
            )
        return made
    if client is not None:
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer or a callable that makes one; found {type(client).__name__}"
        )
    section = config.optimizer
    if section is None or section.type is None:
        if config.zero_config.stage in (1, 2):
            raise ValueError(
                f"zero_optimization.stage={int(config.zero_config.stage)} shards optimizer state, but there is no "
                "optimizer: pass optimizer= to deepspeed.initialize, add an `optimizer` block to the config, or set "
                "stage 0 or 3, which run without one (to evaluate)"
            )
        return None
    set_optimizer_flags(config, model)
    settings = dict(section.params or {})
    if precision.master is not torch.float32 and not config.bfloat16_config.bf16_optimizer_states:
        settings.setdefault("fp32_optimizer_states", True)
    elif config.bfloat16_config.bf16_optimizer_states:
        settings["fp32_optimizer_states"] = False
    return build_optimizer(
        section.type,
        settings,
        params,
        host_states=takes_host_optimizer(config),
        low_precision_masters=precision.master is not torch.float32,
    )


def param_groups(model: nn.Module, model_parameters: Any) -> list[dict[str, Any]]:
    """``model_parameters`` as a list of group dicts; default: all parameters in one group.

    Frozen ones are in it too: they cost nothing, and train when they are unfrozen later, as in plain torch.
    """
    if model_parameters is None:
        return [{"params": list(model.parameters())}]
    if isinstance(model_parameters, nn.Module):
        model_parameters = model_parameters.parameters()
    listed = list(model_parameters)
    if listed and isinstance(listed[0], dict):
        groups = []
        for group in listed:
            members = group["params"]
            members = [members] if isinstance(members, torch.Tensor) else list(members)
            groups.append({**group, "params": members})
        return groups
    if listed and isinstance(listed[0], tuple):
        listed = [param for _, param in listed]
    return [{"params": listed}]


# ---- scheduler and data --------------------------------------------------------------------------------------------


def choose_scheduler(config: DeepSpeedConfig, client: Any, basic: torch.optim.Optimizer | None) -> Any:
    """The schedule: the client's instance, what its callable makes of the optimizer, or the config's; else None."""
    if client is not None:
        if hasattr(client, "step"):
            return client
        if callable(client):
            return client(basic)
        raise TypeError(
            f"lr_scheduler: expected a scheduler or a callable that makes one; found {type(client).__name__}"
        )
    section = config.scheduler
    if section is None or section.type is None:
        return None
    if basic is None:
        log_dist(
            f"scheduler.type={section.type!r} has no effect: without an optimizer this engine only evaluates", ranks=[0]
        )
        return None
    return build_scheduler(section.type, dict(section.params or {}), basic)


class LoaderFactory:
    """Makes data loaders with the engine's batch size and this rank's share of the samples."""

    def __init__(self, config: DeepSpeedConfig, mesh: ParallelMesh) -> None:
        self.config, self.mesh = config, mesh

    def __call__(self, dataset: Any, *, batch_size: int, route: str, pin_memory: bool, data_sampler: Any,
                 collate_fn: Any, num_local_io_workers: int | None) -> DeepSpeedDataLoader:  # fmt: skip
        if route not in ("train", "eval", "predict"):
            raise ValueError(f"deepspeed_io: route must be 'train', 'eval' or 'predict'; found {route!r}")
        return DeepSpeedDataLoader(
            dataset=dataset,
            batch_size=batch_size,
            pin_memory=pin_memory and get_accelerator().device_name() != "cpu",
            local_rank=self.mesh.rank("dp"),
            data_sampler=data_sampler,
            collate_fn=collate_fn,
            num_local_io_workers=num_local_io_workers,
            data_parallel_world_size=self.mesh.size("dp"),
            data_parallel_rank=self.mesh.rank("dp"),
            dataloader_drop_last=self.config.dataloader_drop_last,
        )


def checkpoint_manager(engine: DeepSpeedEngine) -> Any:
    from deepspeed.checkpoint.manager import CheckpointManager

    return CheckpointManager(engine)
