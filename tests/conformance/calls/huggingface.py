"""Calls of accelerate, transformers, TRL and PEFT."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from tests.conformance.calls.table import backward, calls, changed, model, refused, settings, start, train, weights

# ---- accelerate ------------------------------------------------------------------------------------------------------


@calls(
    "accelerate",
    "comm.is_initialized()",
    "comm.init_distributed(dist_backend=None, auto_mpi_discovery=False, timeout=timedelta)",
)
def starts_once(folder: Path) -> None:
    assert deepspeed.comm.is_initialized() is True
    deepspeed.comm.init_distributed(dist_backend=None, auto_mpi_discovery=False, timeout=timedelta(minutes=3))
    assert deepspeed.comm.get_world_size() == 2


@calls(
    "accelerate",
    "initialize(model=, config_params=, model_parameters=[params])",
    "initialize(model=, config_params=, model_parameters=[groups])",
    "initialize(model=, config_params=) without an optimizer",
    "initialize(model=, config_params=, mpu=)",
)
def config_params(folder: Path) -> None:
    net = model()
    engine, optimizer, loader, schedule = deepspeed.initialize(
        model=net, config_params=settings(2), model_parameters=list(net.parameters())
    )
    assert isinstance(engine, nn.Module)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert (optimizer is engine.optimizer, loader, schedule) == (True, None, None)
    engine.destroy()

    net = model()
    groups = [{"params": [p], "weight_decay": 0.5 * i} for i, p in enumerate(net.parameters())]
    engine, optimizer, *_ = deepspeed.initialize(model=net, config_params=settings(1), model_parameters=groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.5, 1.0, 1.5]
    engine.destroy()

    for stage in (0, 3):
        plain = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        engine, optimizer, *_ = deepspeed.initialize(model=model(), config_params=plain, mpu=None)
        assert (optimizer is None) == (stage == 0)  # at stage 3 the object that pages parameters, for its hooks
        assert engine(torch.ones(1, 4)).shape == (1, 2)
        engine.destroy()


@calls(
    "accelerate",
    "initialize(optimizer=<torch>): param_groups stay live under the client's own scheduler",
    "initialize(lr_scheduler=<callable>) gets the base optimizer",
    "type(scheduler).__name__ in runtime.lr_schedules.VALID_LR_SCHEDULES",
)
def optimizers_and_schedules(folder: Path) -> None:
    net = model()
    base = torch.optim.AdamW(net.parameters(), lr=0.1)
    engine, optimizer, *_ = deepspeed.initialize(
        model=net, optimizer=base, config_params={**settings(2), "optimizer": None}
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(base, lambda step: 0.0)
    assert optimizer.param_groups is base.param_groups
    before = weights(engine)
    train(engine)
    assert not changed(before, weights(engine))  # the client's rate of 0 reached the step
    scheduler.step()
    engine.destroy()

    seen: list[Any] = []

    def make(given: Any) -> Any:
        seen.append(given)
        return deepspeed.runtime.lr_schedules.WarmupLR(given, warmup_num_steps=10)

    engine, optimizer, _, schedule = deepspeed.initialize(
        model=model(), config_params=settings(1), lr_scheduler=make
    )
    assert isinstance(seen[0], torch.optim.Optimizer)
    assert type(schedule).__name__ in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
    train(engine)
    assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    assert schedule.state_dict()["last_batch_iteration"] >= 0
    engine.destroy()


@calls(
    "accelerate",
    "DeepSpeedCPUAdam(groups, lr=, weight_decay=, adamw_mode=)",
    "DeepSpeedCPUAdagrad(groups, lr=, weight_decay=, adamw_mode=False)",
    "DeepSpeedCPULion(groups, lr=, weight_decay=, adamw_mode=False)",
)
def cpu_optimizers(folder: Path) -> None:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    for make in (DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion):
        param = nn.Parameter(torch.ones(8))
        optimizer: Any = make([{"params": [param]}], lr=0.5, weight_decay=0.0, adamw_mode=False)
        param.grad = torch.ones(8)
        optimizer.step()
        assert param[0].item() == pytest.approx(0.5, abs=1e-3)


@calls(
    "accelerate",
    "clone_tensors_for_torch_save(state_dict)",
    "set_z3_leaf_modules(model, [classes])",
    "zero.GatheredParameters(params, modifier_rank=, fwd_module=, enabled=)",
    "groups._get_sequence_parallel_{group,rank,world_size}()",
    "runtime.utils.move_to_device(obj, device)",
)
def helpers(folder: Path) -> None:
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
    from deepspeed.runtime.utils import move_to_device
    from deepspeed.utils import groups, set_z3_leaf_modules

    whole = torch.arange(8.0)
    cloned = clone_tensors_for_torch_save({"a": whole[2:4], "b": [whole[:1], 3]})
    assert cloned["a"].untyped_storage().nbytes() == 8
    assert cloned["b"][1] == 3
    net = model()
    assert set_z3_leaf_modules(net, [nn.Sequential]) == [net]
    assert net._z3_leaf is True
    assert move_to_device({"x": [whole]}, "cpu")["x"][0] is whole

    engine = start(3)
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, modifier_rank=0, fwd_module=engine.module, enabled=True):
        if dist.get_rank() == 0:
            params[0].data.fill_(2.0)
    with deepspeed.zero.GatheredParameters(params, modifier_rank=None, fwd_module=engine.module, enabled=True):
        assert params[0].shape == (8, 4)
        assert torch.all(params[0] == 2.0)
    with deepspeed.zero.GatheredParameters(params, enabled=False):
        assert params[0].ds_status == ZeroParamStatus.NOT_AVAILABLE
    assert (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()) == (1, 0)
    assert groups._get_sequence_parallel_group() is not None
    engine.destroy()


@calls(
    "accelerate",
    "set_gradient_accumulation_boundary(is_boundary=)",
    "backward(loss, scale_wrt_gas=False)",
    "step() at boundaries alone",
    "get_global_grad_norm()",
    "optimizer.overflow",
    "no_sync()",
)
def boundaries_by_hand(folder: Path) -> None:
    for stage in (1, 3):
        engine = start(stage, gradient_accumulation_steps=4)
        assert hasattr(engine.optimizer, "overflow")
        before = weights(engine)
        for boundary in (False, True):
            engine.set_gradient_accumulation_boundary(is_boundary=boundary)
            backward(engine, scale_wrt_gas=False)
            if boundary:
                engine.step()
        assert changed(before, weights(engine))
        assert engine.global_steps == 1
        assert float(engine.get_global_grad_norm()) > 0
        assert engine.optimizer.overflow is False
        engine.optimizer.step()  # no-ops of the client's wrapper stay off the engine's counters
        engine.destroy()
    engine = start(1)
    with getattr(engine, "no_sync", contextlib.nullcontext)():
        backward(engine)
    engine.destroy()


@calls(
    "accelerate",
    "save_checkpoint(dir, ckpt_id)",
    "load_checkpoint(dir, ckpt_id)",
    "zero_gather_16bit_weights_on_model_save()",
    "_zero3_consolidated_16bit_state_dict()",
    "_consolidated_16bit_state_dict()",
    "destroy()",
    "engine.config is the raw dict",
    "attributes of the model",
    "optimizer.{state,defaults,state_dict,load_state_dict,add_param_group}",
)
def saves_and_members(folder: Path) -> None:
    config = settings(3, zero={"stage3_gather_16bit_weights_on_model_save": True})
    net: Any = model()
    net.generate = lambda: "generated"
    engine = deepspeed.initialize(model=net, config_params=config)[0]
    assert engine.config is config
    assert engine.generate() == "generated"
    assert engine.zero_gather_16bit_weights_on_model_save() is True
    train(engine)
    for found in (engine._zero3_consolidated_16bit_state_dict(), engine._consolidated_16bit_state_dict()):
        assert (found is None) == (dist.get_rank() > 0)
        assert found is None or found["0.weight"].shape == (8, 4)
    engine.save_checkpoint(str(folder), "pytorch_model_1")
    kept = weights(engine)
    train(engine)
    path, client_state = engine.load_checkpoint(str(folder), "pytorch_model_1")
    assert "pytorch_model_1" in path
    assert client_state is not None
    assert not changed(kept, weights(engine))
    optimizer = engine.optimizer
    assert optimizer.state
    assert optimizer.defaults["lr"] == 0.1
    state = optimizer.state_dict()
    train(engine)
    optimizer.load_state_dict(state)
    assert not changed(kept, weights(engine))
    assert callable(optimizer.add_param_group)
    engine.destroy()


@calls(
    "accelerate",
    "deepspeed --hostfile F --no_local_rank --launcher NAME --exclude S --master_addr A --master_port P --module s",
    "deepspeed --hostfile F --node_rank N --no_ssh --include S --num_gpus N --no_python script",
    "launcher.runner.DEEPSPEED_ENVIRONMENT_NAME",
)
def command_lines(folder: Path) -> None:
    from deepspeed.launcher import runner

    line = "--hostfile F --no_local_rank --launcher pdsh --exclude b --master_addr A --master_port 77"
    found = runner.parse_args([*line.split(), "--module", "s", "--x", "1"])
    assert (found.hostfile, found.no_local_rank, found.launcher, found.exclude) == ("F", True, "pdsh", "b")
    assert (found.master_addr, found.master_port, found.module, found.user_script) == ("A", 77, True, "s")
    assert found.user_args == ["--x", "1"]
    line = "--hostfile F --node_rank 1 --no_ssh --include a:0,1 --no_python"
    found = runner.parse_args([*line.split(), "tool"])
    assert (found.node_rank, found.no_ssh, found.include, found.no_python) == (1, True, "a:0,1", True)
    assert runner.parse_args(["--num_gpus", "3", "s"]).num_gpus == 3
    assert runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"


refused(
    "accelerate",
    {
        "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF.register_with_transformers("
        "model_name_or_path=engine.module, sequence_parallel_size=2, micro_batch_size=1)": "sequence parallelism",
        "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter([], sp_rank=0, sp_group=None, "
        "sp_world_size=2, device='cpu')": "sequence parallelism",
    },
)

# ---- transformers ----------------------------------------------------------------------------------------------------


@calls("transformers", "zero.Init(config_dict_or_path=<dict with auto>)")
def init_of_an_unfinished_config(folder: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(deepspeed.zero.Init(config_dict_or_path=config))
        net = nn.Linear(6, 6)
    assert net.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    assert (net.weight.ds_numel, tuple(net.weight.ds_shape)) == (36, (6, 6))
    assert hasattr(net.weight, "ds_id")


@calls(
    "transformers",
    "GatheredParameters(<parameter>, modifier_rank=None)",
    "GatheredParameters([], modifier_rank=0)",
    "GatheredParameters([parameters, buffers, duplicates], modifier_rank=0)",
    "module.weight.data = ... inside the context",
    "zero.register_external_parameter(module, param)",
    "comm.get_rank()",
)
def gathered(folder: Path) -> None:
    engine = start(3)
    first, last = engine.module[0], engine.module[2]
    with deepspeed.zero.GatheredParameters(first.weight, modifier_rank=None):
        assert first.weight.shape == (8, 4)
    with deepspeed.zero.GatheredParameters([], modifier_rank=0):
        pass
    mixed = [first.weight, first.weight, torch.ones(2), nn.Parameter(torch.ones(3)), last.weight]
    with deepspeed.zero.GatheredParameters(mixed, modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            first.weight.data = torch.full((8, 4), 5.0)
            last.weight.data.copy_(torch.full((2, 8), 6.0))
    found = weights(engine)
    assert torch.all(found[0] == 5.0)
    assert torch.all(found[2] == 6.0)
    deepspeed.zero.register_external_parameter(last, first.weight)
    assert any(param is first.weight for _, param in last.ds_external_parameters())
    engine.destroy()


@calls(
    "transformers",
    "get_accelerator().current_device_name()",
    "groups._get_sequence_parallel_group() in torch.distributed.nn.functional.all_gather",
    "utils.logger.setLevel(int)",
    "utils.is_initialized()",
    "partition_parameters.{zero_wrapper_for_fp_tensor_constructor,_orig_torch_arange,get_accelerator}",
)
def small_things(folder: Path) -> None:
    import torch.distributed.nn.functional as differentiable

    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.utils import groups, logger

    assert torch.device(get_accelerator().current_device_name()).type == get_accelerator().device_name()
    engine = start(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch has another name for it
        parts = differentiable.all_gather(torch.ones(2), group=groups._get_sequence_parallel_group())
    assert len(parts) == groups._get_sequence_parallel_world_size()
    assert deepspeed.utils.is_initialized() is True
    level = logger.level
    logger.setLevel(logging.ERROR)
    assert logger.level == logging.ERROR
    logger.setLevel(level)
    assert callable(partition_parameters.zero_wrapper_for_fp_tensor_constructor)
    assert partition_parameters._orig_torch_arange is torch.arange
    assert partition_parameters.get_accelerator is get_accelerator
    engine.destroy()


@calls(
    "transformers",
    "inspect.signature(engine.save_checkpoint) lists exclude_frozen_parameters",
    "save_checkpoint(output_dir, exclude_frozen_parameters=True) makes global_step{N}",
    "load_checkpoint(path, load_module_strict=, load_optimizer_states=, load_lr_scheduler_states=)",
    "load_checkpoint(<nothing there>) gives None",
    "_zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)",
    "lr_scheduler.get_last_lr() before the first step",
)
def trainer_and_engine(folder: Path) -> None:
    assert "exclude_frozen_parameters" in inspect.signature(deepspeed.DeepSpeedEngine.save_checkpoint).parameters
    net: Any = model()
    net[0].weight.requires_grad_(False)
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.1}}
    config = settings(3, zero={"stage3_gather_16bit_weights_on_model_save": True}, scheduler=schedule)
    engine = deepspeed.initialize(model=net, config=config)[0]
    with contextlib.suppress(AssertionError):  # the client takes that for a rate of 0
        assert len(engine.lr_scheduler.get_last_lr()) == 1
    assert engine.load_checkpoint(str(folder / "none"))[0] is None
    train(engine)
    engine.save_checkpoint(str(folder), exclude_frozen_parameters=True)
    assert (folder / "global_step1").is_dir()
    path, _ = engine.load_checkpoint(
        str(folder), load_module_strict=False, load_optimizer_states=True, load_lr_scheduler_states=True
    )
    assert path is not None
    state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert state is None or "0.weight" not in state
    engine.destroy()


@calls("transformers", "a second engine on the same model")
def second_engine(folder: Path) -> None:
    net = model()
    for _ in range(2):
        engine = deepspeed.initialize(model=net, config=settings(3))[0]
        train(engine)
        engine.destroy()


refused(
    "transformers",
    {"deepspeed.tp_model_init(model=engine.module, tp_size=2, dtype=None, config={})": "tensor-parallel training"},
)

# ---- TRL and PEFT ----------------------------------------------------------------------------------------------------


@calls(
    "trl",
    "GatheredParameters(model.parameters())",
    "a GatheredParameters object entered later",
    "ZeroParamStatus.AVAILABLE and param.ds_status",
    "initialize(model=, config=<dotted keys>)",
    "parameter_offload.{module,forward_hooks,backward_hooks,_register_deepspeed_module,param_coordinator}",
    "module.ds_external_parameters(), param.ds_active_sub_modules.clear()",
)
def sharded_models(folder: Path) -> None:
    engine = start(3)
    net = engine.module
    with deepspeed.zero.GatheredParameters(net.parameters()):
        assert all(param.ds_status == ZeroParamStatus.AVAILABLE for param in net.parameters())
        assert net[0].weight.shape == (8, 4)
    later = deepspeed.zero.GatheredParameters(list(net.parameters()))
    assert all(param.ds_status == ZeroParamStatus.NOT_AVAILABLE for param in net.parameters())
    with later:
        assert net[0].weight.shape == (8, 4)
    offload = engine.optimizer.parameter_offload
    assert offload.module is net
    for hooks in (offload.forward_hooks, offload.backward_hooks):
        for hook in hooks:
            hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []
    offload._register_deepspeed_module(net)
    if offload.param_coordinator.is_invalid_trace() is False:
        offload.param_coordinator._invalidate_trace()
    assert all(list(module.ds_external_parameters()) == [] for module in net.modules())
    for param in net.parameters():
        param.ds_active_sub_modules.clear()
    train(engine)
    engine.destroy()
    config = {**settings(3), "zero_optimization.reduce_bucket_size": 16.5, "zero_optimization.stage3_x": 1}
    strict = os.environ.pop("DS_CONFIG_STRICT", None)  # which the tests set
    try:
        engine, *_ = deepspeed.initialize(model=model(), config=config)
    finally:
        os.environ.update({} if strict is None else {"DS_CONFIG_STRICT": strict})
    engine.destroy()


@calls(
    "peft",
    "utils.safe_get_full_grad(p)",
    "GatheredParameters(param | list | generator, modifier_rank=0, fwd_module=module)",
    "param.ds_shape, param.ds_numel, param.numel()",
)
def adapters(folder: Path) -> None:
    for stage in (1, 2, 3):
        engine = start(stage, gradient_accumulation_steps=2)
        backward(engine)
        backward(engine)
        for param in engine.module.parameters():
            grad = deepspeed.utils.safe_get_full_grad(param)
            assert grad.shape == getattr(param, "ds_shape", param.shape)
        engine.step()
        engine.destroy()
    engine = start(3)
    param = engine.module[0].weight
    # The client counts ds_numel where numel() is 0: either way the true number.
    assert (param.ds_numel if param.numel() == 0 else param.numel()) == param.ds_numel == 32
    rows, columns = param.ds_shape
    assert (rows, columns) == (8, 4)
    for form in (param, [param], (p for p in [param])):
        with deepspeed.zero.GatheredParameters(form, modifier_rank=0, fwd_module=engine.module):
            assert param.shape == (8, 4)
    engine.destroy()
