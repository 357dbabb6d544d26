"""Calls of Lightning, axolotl, LLaMA-Factory, ms-swift and OpenRLHF."""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from tests.conformance.calls.table import (
    backward,
    calls,
    changed,
    compiling,
    model,
    refused,
    settings,
    start,
    train,
    weights,
)

# ---- Lightning -------------------------------------------------------------------------------------------------------


@calls(
    "lightning",
    "deepspeed.utils.logging.logger.setLevel(level)",
    "init_distributed(backend, distributed_port=int, timeout=timedelta)",
    "initialize(args=Namespace(device_rank=), config=, model=, model_parameters=filter(...), optimizer=, "
    "lr_scheduler=, dist_init_required=False)",
    "initialize(..., model_parameters=[])",
    "isinstance(optimizer, runtime.base_optimizer.DeepSpeedOptimizer)",
    "backward(tensor, *a, **k), step(**kwargs), lr_scheduler = None, modules()",
)
def strategy_trains(folder: Path) -> None:
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

    logger = deepspeed.utils.logging.logger
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.setLevel(level)
    deepspeed.init_distributed("gloo", distributed_port=29500, timeout=timedelta(minutes=2))
    net = model()
    base = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(base, lambda step: 0.5**step)
    config = {**settings(2), "optimizer": None, "zero_allow_untested_optimizer": True}
    engine, optimizer, _, given = deepspeed.initialize(
        args=Namespace(device_rank=dist.get_rank()),
        config=config,
        model=net,
        model_parameters=filter(lambda p: p.requires_grad, net.parameters()),
        optimizer=base,
        lr_scheduler=schedule,
        dist_init_required=False,
    )
    assert given is schedule
    assert isinstance(optimizer, DeepSpeedOptimizer)
    assert {optimizer: 1}[engine.optimizer] == 1
    assert optimizer in (engine, engine.optimizer)
    assert net in list(engine.modules())
    engine.lr_scheduler = None
    before = weights(engine)
    train(engine)
    assert changed(before, weights(engine))
    engine.destroy()
    plain = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(
        args=Namespace(device_rank=0), config=plain, model=model(), model_parameters=[], dist_init_required=False
    )
    assert engine(torch.ones(1, 4)).shape == (1, 2)
    engine.destroy()


@calls(
    "lightning",
    "zero.Init(enabled=, remote_device=, config_dict_or_path=)",
    "GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0)",
    "param.ds_numel, param.partition_numel()",
    "checkpointing.configure(mpu_=None, partition_activations=, contiguous_checkpointing=, checkpoint_in_cpu=, "
    "profile=)",
)
def strategy_builds(folder: Path) -> None:
    for device in (None, "cpu"):
        with deepspeed.zero.Init(enabled=True, remote_device=device, config_dict_or_path=settings(3)):
            net = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        assert (net[0].weight.ds_numel, net[0].weight.partition_numel()) == (24, 12)
        for module in net.modules():  # a list is empty for two of them
            with deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
                for param in module.parameters(recurse=False):
                    param.data.fill_(1.5)
        with deepspeed.zero.GatheredParameters(net[0].weight):
            assert torch.all(net[0].weight == 1.5)
    with deepspeed.zero.Init(enabled=False, remote_device="cpu", config_dict_or_path=settings(3)):
        assert not hasattr(nn.Linear(2, 2).weight, "ds_id")
    deepspeed.checkpointing.configure(
        mpu_=None, partition_activations=None, contiguous_checkpointing=False, checkpoint_in_cpu=None, profile=None
    )
    assert deepspeed.checkpointing.is_configured()
    deepspeed.checkpointing.reset()


@calls(
    "lightning",
    'save_checkpoint(path, client_state=, tag="checkpoint", exclude_frozen_parameters=)',
    'load_checkpoint(path, tag="checkpoint", load_optimizer_states=, load_lr_scheduler_states=False, '
    "load_module_strict=)",
    "utils.zero_to_fp32.{get_optim_files,get_model_state_file,get_fp32_state_dict_from_zero_checkpoint}",
    'optim file ["optimizer_state_dict"]["zero_stage"]',
)
def strategy_saves(folder: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import (
        get_fp32_state_dict_from_zero_checkpoint,
        get_model_state_file,
        get_optim_files,
    )

    engine = start(2)
    train(engine)
    state = {"epoch": 3, "lr_scheduler": [1], "optimizer": {"mine": 2}}
    engine.save_checkpoint(str(folder), client_state=state, tag="checkpoint", exclude_frozen_parameters=False)
    kept = weights(engine)
    train(engine)
    path, client_state = engine.load_checkpoint(
        str(folder),
        tag="checkpoint",
        load_optimizer_states=True,
        load_lr_scheduler_states=False,
        load_module_strict=True,
    )
    assert path is not None
    assert client_state["epoch"] == 3
    assert not changed(kept, weights(engine))
    files = get_optim_files(str(folder / "checkpoint"))
    assert torch.load(files[0], weights_only=False)["optimizer_state_dict"]["zero_stage"] == 2
    assert Path(get_model_state_file(str(folder / "checkpoint"), 2)).is_file()
    assert (folder / "latest").read_text() == "checkpoint"
    assert (folder / "zero_to_fp32.py").is_file()
    found = get_fp32_state_dict_from_zero_checkpoint(str(folder), "checkpoint")
    assert torch.equal(found["0.weight"], kept[0])
    engine.destroy()


# ---- axolotl and LLaMA-Factory ---------------------------------------------------------------------------------------


@calls(
    "axolotl",
    'comm.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, dist_init_required=True)',
    "utils.set_z3_leaf_modules(model, [classes])",
    "TiledMLP.apply(fn, self, x, num_shards, compute_params)",
    'hasattr(param, "ds_id")',
)
def axolotl(folder: Path) -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    deepspeed.comm.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, dist_init_required=True)
    assert dist.get_backend() == "gloo"  # what is there stays
    net = model()
    assert deepspeed.utils.set_z3_leaf_modules(net, [nn.Sequential]) == [net]
    x = torch.randn(1, 6, 4, requires_grad=True)
    for params in (None, list(net.parameters())):
        tiled = TiledMLP.apply(lambda module, part: module(part), net, x, 3, params)
        assert torch.allclose(tiled, net(x), atol=1e-6)
    engine = start(3)
    assert all(hasattr(param, "ds_id") for param in engine.module.parameters())
    engine.destroy()


@calls(
    "llamafactory",
    'utils.set_z3_leaf_modules(model, [class or "ClassName"])',
    "GatheredParameters(list, modifier_rank=0): one object, entered twice",
    "engine.get_global_grad_norm() before the first step",
    "engine._accelerator = ...",
    "config keys _comment, comms_config, monitor_config",
)
def llamafactory(folder: Path) -> None:
    assert len(deepspeed.utils.set_z3_leaf_modules(model(), ["Linear"])) == 2
    engine = start(3, _comment="of the user")
    assert not engine.get_global_grad_norm()
    engine._accelerator = marker = object()
    assert engine._accelerator is marker
    param = engine.module[0].weight
    whole = deepspeed.zero.GatheredParameters([param], modifier_rank=0)
    for value in (3.0, 4.0):
        with whole:
            if dist.get_rank() == 0:
                param.data.fill_(value)
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        assert torch.all(weights(engine)[0] == value)
    engine.destroy()


# ---- ms-swift --------------------------------------------------------------------------------------------------------


@calls(
    "ms-swift",
    "initialize(args=None, model=, config=)",
    "GatheredParameters(<parameter>), (<list>), (..., modifier_rank=0)",
    "param.ds_tensor.data = ..., param.ds_tensor.device",
    "param.{ds_id,ds_shape,ds_status,ds_numel}",
)
def swift_moves_shards(folder: Path) -> None:
    engine, *_ = deepspeed.initialize(args=None, model=model(), config=settings(3))
    param = engine.module[0].weight
    assert isinstance(param.ds_id, int)
    assert (tuple(param.ds_shape), param.ds_numel) == ((8, 4), 32)
    assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
    before = weights(engine)
    away = param.ds_tensor.data.clone()
    assert param.ds_tensor.device == away.device
    param.ds_tensor.data = away.to("cpu")
    assert not changed(before, weights(engine))
    train(engine)
    assert changed(before, weights(engine))
    for given in (param, [param]):
        with deepspeed.zero.GatheredParameters(given):
            assert param.ds_status == ZeroParamStatus.AVAILABLE
    engine.destroy()


@calls(
    "ms-swift",
    "optimizer.state.items(): dicts of tensors whose .data is swapped",
    "bool(optimizer.state)",
    "deepspeed.git_version_info.version",
)
def swift_moves_states(folder: Path) -> None:
    for stage in (1, 3):
        engine, plain = start(stage), start(stage)
        assert not engine.optimizer.state
        train(engine)
        train(plain)
        assert engine.optimizer.state
        for _, state in engine.optimizer.state.items():
            for key, value in list(state.items()):
                if isinstance(value, torch.Tensor):
                    state[f"{key}_offload_buffer"] = value.data.to("cpu", copy=True)
                    value.data = state.pop(f"{key}_offload_buffer")
        train(engine)
        train(plain)
        assert not changed(weights(engine), weights(plain))
        engine.destroy()
        plain.destroy()
    assert deepspeed.git_version_info.version == deepspeed.__version__.split("+")[0]


refused(
    "ms-swift",
    {
        "deepspeed.elasticity.compute_elastic_config(ds_config={}, target_deepspeed_version='0.19.8', world_size=2)": (
            "elastic batch sizes"
        )
    },
)

# ---- OpenRLHF --------------------------------------------------------------------------------------------------------


def start_actor(net: nn.Module, config: dict[str, Any]) -> Any:
    """The 4-tuple of `initialize`, as the actor calls it."""
    groups = [{"params": list(net.parameters())[:2], "weight_decay": 0.1}, {"params": list(net.parameters())[2:]}]
    return deepspeed.initialize(
        model=net,
        optimizer=None,
        model_parameters=groups,
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5),
        config=config,
        args={"local_rank": dist.get_rank()},
        dist_init_required=True,
    )


@calls(
    "openrlhf",
    "init_distributed(timeout=timedelta)",
    'initialize(model=, optimizer=None, model_parameters=[two groups], lr_scheduler=partial, config=, '
    'args={"local_rank": n}, dist_init_required=True)',
    "initialize(model=, args=, config=, dist_init_required=True) for evaluation",
    "engine.{module,global_steps,config,zero_optimization_stage(),get_global_grad_norm()}",
    "engine.compile()",
    "save_checkpoint(dir, tag=, client_state=, save_latest=)",
    "load_checkpoint(dir, tag, load_module_strict=, load_optimizer_states=, load_lr_scheduler_states=, "
    "load_module_only=)",
)
def actor(folder: Path) -> None:
    deepspeed.init_distributed(timeout=timedelta(minutes=1))
    keys = ("sub_group_size", "reduce_bucket_size", "stage3_max_live_parameters")
    config = settings(3, zero=dict.fromkeys(keys, "auto"))
    engine, optimizer, _, schedule = start_actor(model(), config)
    assert len(optimizer.param_groups) == 2
    assert engine.zero_optimization_stage() == 3
    assert engine.config is config
    device = deepspeed.get_accelerator()
    backend = device.get_compile_backend()
    with compiling():
        device.set_compile_backend("eager")  # which needs no second to load
        engine.compile()
        device.set_compile_backend(backend)
        assert engine.is_compiled is True
    engine.destroy()
    engine, optimizer, _, schedule = start_actor(model(), config)
    train(engine)
    assert engine.global_steps == 1
    assert schedule.get_last_lr() == [0.05, 0.05]
    assert float(engine.get_global_grad_norm()) > 0
    engine.save_checkpoint(str(folder), tag="one", client_state={"consumed": 7}, save_latest=False)
    dist.barrier()
    assert not (folder / "latest").exists()
    options = {"load_optimizer_states": True, "load_lr_scheduler_states": True, "load_module_only": False}
    path, states = engine.load_checkpoint(str(folder), "one", load_module_strict=True, **options)
    assert path is not None
    assert states["consumed"] == 7
    engine.destroy()
    evaluation = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(
        model=model(), args={"local_rank": 0}, config=evaluation, dist_init_required=True
    )
    assert engine(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    engine.destroy()


@calls(
    "openrlhf",
    "engine.optimizer.offload_states(include=, device=, pin_memory=, non_blocking=)",
    "engine.reload_states(non_blocking=)",
    "engine.empty_partition_cache()",
    "engine._consolidated_16bit_state_dict()",
    "GatheredParameters([param], enabled=), (list, modifier_rank=0)",
    "utils.set_z3_leaf_modules(model, [classes])",
)
def sleeps_and_wakes(folder: Path) -> None:
    for stage in (1, 2, 3):
        gather = {"stage3_gather_16bit_weights_on_model_save": True}
        engine, plain = start(stage, zero=gather), start(stage, zero=gather)
        train(engine)
        train(plain)
        kinds = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.contiguous_grad_buffer]
        kinds += [OffloadStateTypeEnum.hp_params]
        engine.optimizer.offload_states(
            include=kinds, device=OffloadDeviceEnum.cpu, pin_memory=False, non_blocking=False
        )
        engine.empty_partition_cache()
        engine.reload_states(non_blocking=False)
        train(engine)
        train(plain)
        assert not changed(weights(engine), weights(plain))
        state = engine._consolidated_16bit_state_dict()
        assert (state is None) == (dist.get_rank() > 0)
        param = engine.module[0].weight
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            assert param.shape == (8, 4)
        engine.destroy()
        plain.destroy()


@calls("openrlhf", "param.{ds_shape,ds_id,ds_status} at stage 3 alone")
def attributes(folder: Path) -> None:
    for stage in (0, 2, 3):
        engine = start(stage)
        backward(engine)
        found = [hasattr(engine.module[0].weight, name) for name in ("ds_shape", "ds_id", "ds_status")]
        assert found == [stage == 3] * 3
        engine.destroy()


refused(
    "openrlhf",
    {
        "deepspeed.tp_model_init(model=engine.module, tp_size=2, dtype=None)": "tensor-parallel training",
        "deepspeed.module_inject.layers.GatherReplacedLayerParams([], engine.module, enabled=True)": "kernel injection",
    },
)
