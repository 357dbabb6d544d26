"""Calls of Megatron-DeepSpeed and gpt-neox."""

from __future__ import annotations

import argparse
import base64
import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from tests.conformance.calls.table import (
    Mpu,
    backward,
    calls,
    changed,
    environment,
    model,
    refused,
    settings,
    start,
    train,
    weights,
)

# ---- Megatron-DeepSpeed ----------------------------------------------------------------------------------------------


@calls(
    "Megatron-DeepSpeed",
    "args.deepspeed_config and config= together; args.deepspeed_config=None",
    "initialize(model=, optimizer=, args=, lr_scheduler=, mpu=, config=)",
    'forward, backward(loss), step(lr_kwargs={"increment": n})',
    "was_step_applied(), get_global_grad_norm(), optimizer.cur_scale, set_train_batch_size(n)",
    "engine.global_steps = n, _config.zero_enabled = flag",
    "random_ltd_enabled()",
)
def training(folder: Path) -> None:
    class Increments(torch.optim.lr_scheduler.LRScheduler):
        seen = 0

        def get_lr(self) -> list[float]:
            return [group["lr"] for group in self.optimizer.param_groups]

        def step(self, epoch: Any = None, increment: int = 0) -> None:
            self.seen += increment

    fp16 = {"enabled": True, "initial_scale_power": 4}
    config = settings(1, optimizer=None, gradient_accumulation_steps=1, fp16=fp16)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = Increments(optimizer)
    parts: dict[str, Any] = {"model": net, "optimizer": optimizer, "lr_scheduler": schedule, "mpu": Mpu()}
    with pytest.raises(ValueError, match="deepspeed_config"):
        deepspeed.initialize(args=Namespace(deepspeed_config="x.json"), config=config, **parts)
    args = Namespace(deepspeed_config=None, deepspeed=True)
    engine, _, _, schedule = deepspeed.initialize(args=args, config=config, **parts)
    backward(engine)
    engine.step(lr_kwargs={"increment": 16})
    assert schedule.seen == 16
    assert engine.was_step_applied() is True
    assert float(engine.get_global_grad_norm()) > 0
    assert engine.optimizer.cur_scale == 16.0
    engine.global_steps = 5
    engine._config.zero_enabled = False
    engine._config.zero_enabled = True
    engine.set_train_batch_size(8)
    assert (engine.global_steps, engine.gradient_accumulation_steps()) == (5, 2)
    assert engine.random_ltd_enabled() is False
    engine.destroy()


@calls(
    "Megatron-DeepSpeed",
    "save_checkpoint(dir, client_state=) with universal_checkpoint_info()",
    "load_checkpoint(dir, load_module_strict=, load_optimizer_states=, load_lr_scheduler_states=, load_module_only=, "
    "tag=None | '.')",
    "deepspeed.checkpoint.{UNIVERSAL_CHECKPOINT_*,*_PATTERNS,ORIGINAL_VOCAB_SIZE,PADDED_VOCAB_SIZE}",
    "module.state_dict replaced by the client",
)
def checkpoints(folder: Path) -> None:
    from deepspeed import checkpoint as keys

    info = {
        keys.UNIVERSAL_CHECKPOINT_VERSION_KEY: keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        keys.VOCABULARY_PARAMETER_PATTERNS: [r"0\.weight"],
        keys.PIPELINE_REPLICATED_PARAMETER_PATTERNS: [],
        keys.TP_REPLICATED_PARAMETER_PATTERNS: [],
        keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: [],
        keys.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0: [],
        keys.ORIGINAL_VOCAB_SIZE: 7,
        keys.PADDED_VOCAB_SIZE: 8,
    }
    net: Any = model()
    net.universal_checkpoint_info = lambda: info
    engine = deepspeed.initialize(model=net, config=settings(1), mpu=Mpu())[0]
    train(engine)
    plain, seen = net.state_dict, []
    net.state_dict = lambda *args, **kwargs: seen.append(1) or plain(*args, **kwargs)
    engine.save_checkpoint(str(folder), client_state={"iteration": 9, keys.UNIVERSAL_CHECKPOINT_INFO: info})
    del net.state_dict
    assert seen or dist.get_rank() > 0  # rank 0 writes the module
    kept = weights(engine)
    train(engine)
    path, state = engine.load_checkpoint(
        str(folder),
        load_module_strict=True,
        load_optimizer_states=True,
        load_lr_scheduler_states=True,
        load_module_only=False,
        tag=None,
    )
    assert path is not None
    assert state["iteration"] == 9
    assert state[keys.UNIVERSAL_CHECKPOINT_INFO][keys.PADDED_VOCAB_SIZE] == 8
    assert not changed(kept, weights(engine))
    train(engine)
    assert engine.load_checkpoint(str(folder / "global_step1"), tag=".", load_module_only=True)[0] is not None
    assert not changed(kept, weights(engine))
    engine.destroy()


@calls(
    "Megatron-DeepSpeed",
    "zero.Init(sequence_data_parallel_group= | data_parallel_group=, remote_device=, config_dict_or_path=, enabled=, "
    "mpu=)",
    "runtime.zero.GatheredParameters",
    "GatheredParameters(..., enable=) is a TypeError",
    "utils.safe_get_full_fp32_param(p)",
    "runtime.utils.PartitionedTensor(...), .from_meta(meta=, local_part=, group=)",
    "runtime.dataloader.RepeatingLoader(loader), runtime.utils.see_memory_usage(msg, force=)",
)
def sharded_tools(folder: Path) -> None:
    from deepspeed.runtime.dataloader import RepeatingLoader
    from deepspeed.runtime.utils import PartitionedTensor, see_memory_usage
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    group = deepspeed.comm.get_world_group()
    for options in (
        {"data_parallel_group": group},
        {"sequence_data_parallel_group": group},
        {"mpu": Mpu()},
        {"data_parallel_group": group, "remote_device": None, "mpu": None},
    ):
        with deepspeed.zero.Init(config_dict_or_path=settings(3), enabled=True, **options):
            net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        assert net[0].weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    with pytest.raises(TypeError, match="enable"):
        GatheredParameters(net.parameters(), enable=True)
    engine = start(2, bf16={"enabled": True})
    train(engine)
    master = safe_get_full_fp32_param(engine.module[0].weight)
    assert (master.dtype, master.shape) == (torch.float32, (8, 4))
    assert torch.equal(master.bfloat16(), engine.module[0].weight)
    engine.destroy()
    whole = torch.arange(10.0)
    part = PartitionedTensor(tensor=whole, group=group)
    again = PartitionedTensor.from_meta(meta=part.to_meta(), local_part=part.data(), group=group)
    assert torch.equal(again.full(), whole)
    assert next(iter(RepeatingLoader([3]))) == 3
    see_memory_usage("here", force=False)


@calls(
    "Megatron-DeepSpeed",
    "checkpointing.configure(mpu, deepspeed_config=, partition_activations=, contiguous_checkpointing=, "
    "num_checkpoints=, checkpoint_in_cpu=, synchronize=, profile=)",
    "checkpointing.{is_configured(),checkpoint(fn, *args),get_cuda_rng_tracker()}",
    "checkpointing.{model_parallel_cuda_manual_seed(seed),model_parallel_reconfigure_tp_seed(seed)}",
    "runtime.pipe.topology.PipeModelDataParallelTopology(num_pp=, num_mp=, num_dp=)",
)
def recomputation(folder: Path) -> None:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    mpu = Mpu()
    checkpointing.configure(
        mpu,
        deepspeed_config=None,
        partition_activations=False,
        contiguous_checkpointing=False,
        num_checkpoints=2,
        checkpoint_in_cpu=False,
        synchronize=False,
        profile=False,
    )
    assert deepspeed.checkpointing.is_configured()
    net = model()
    x = torch.ones(2, 4, requires_grad=True)
    net(x).sum().backward()
    expected = net[0].weight.grad.clone()
    net.zero_grad()
    deepspeed.checkpointing.checkpoint(net, x).sum().backward()
    assert torch.equal(net[0].weight.grad, expected)
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(5)
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    with tracker.fork():
        first = torch.rand(1)
    deepspeed.checkpointing.model_parallel_reconfigure_tp_seed(5)
    with tracker.fork():
        assert first.shape == torch.rand(1).shape
    checkpointing.reset()
    tracker.reset()
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=2)
    assert topology.get_coord(3)._asdict() == {"pipe": 1, "data": 1, "model": 0}


@calls(
    "Megatron-DeepSpeed",
    "tensor types: {Long,Float,Int,Half,BFloat16,Double,Byte}Tensor",
    "default_generators, lazy_call(cb), on_accelerator(t), get_op_builder(name)",
    "device_name(i) current_device_name() communication_backend_name() is_available() _name",
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved reset_peak_memory_stats total_memory",
    "manual_seed manual_seed_all initial_seed get_rng_state set_rng_state default_generator",
    "env_report.main(), ops.op_builder.builder.OpBuilder.is_rocm_pytorch()",
    "utils.timer.BACKWARD_{GLOBAL,MICRO,INNER_GLOBAL,INNER_MICRO}_TIMER",
)
def accelerator(folder: Path) -> None:
    import contextlib
    import io

    from deepspeed import env_report
    from deepspeed.accelerator.real_accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.utils import timer

    device = get_accelerator()
    made = {name: getattr(device, f"{name}Tensor")([1, 0]) for name in ("Long", "Float", "Int", "Double", "Byte")}
    kinds = {"Long": torch.int64, "Float": torch.float32, "Int": torch.int32, "Double": torch.float64}
    assert {name: tensor.dtype for name, tensor in made.items()} == {**kinds, "Byte": torch.uint8}
    assert (device.HalfTensor(2).dtype, device.BFloat16Tensor(2).dtype) == (torch.float16, torch.bfloat16)
    called: list[int] = []
    device.lazy_call(lambda: called.append(1))
    assert called == [1]
    assert device.on_accelerator(torch.ones(1)) is True
    assert device.get_op_builder("FusedAdamBuilder") is not None
    assert (device._name, device.device_name(), device.is_available()) == ("cpu", "cpu", True)
    assert device.communication_backend_name() == "gloo"
    numbers = [device.memory_allocated(), device.max_memory_allocated(), device.memory_reserved()]
    numbers += [device.max_memory_reserved(), device.total_memory()]
    assert min(numbers) > 0
    device.reset_peak_memory_stats()
    state = device.get_rng_state()
    device.manual_seed(3)
    device.manual_seed_all(3)
    assert device.initial_seed() == device.default_generator(0).initial_seed() == 3
    device.set_rng_state(state)
    assert torch.equal(device.get_rng_state(), state)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        env_report.main(hide_operator_status=True)
    assert "torch ......" in printed.getvalue()
    assert OpBuilder.is_rocm_pytorch() is False
    names = [getattr(timer, f"BACKWARD_{kind}_TIMER") for kind in ("GLOBAL", "MICRO", "INNER_GLOBAL", "INNER_MICRO")]
    assert names == ["bwd", "bwd_microstep", "bwd_inner", "bwd_inner_microstep"]


_MEGATRON = {
    "pipeline parallelism": """
        deepspeed.PipelineEngine deepspeed.pipe.PipelineModule deepspeed.pipe.LayerSpec deepspeed.pipe.TiedLayerSpec
        deepspeed.runtime.pipe.schedule.TrainSchedule deepspeed.runtime.pipe.schedule.ForwardPass(0)
        deepspeed.runtime.pipe.schedule.OptimizerStep() deepspeed.runtime.pipe.engine.PipelineEngine
        engine.train_batch(data_iter=iter([])) engine.eval_batch(iter([])) engine.set_batch_fn(None)
        engine.get_additional_losses() engine.reset_activation_shape() engine.grid.get_pipe_parallel_rank()
        engine.pipe_buffers engine.grad_layer engine.is_pipe_partitioned engine.is_grad_partitioned
        engine.pipe_partition_input_meta_cache engine.using_bf16_optimizer engine._compute_loss engine.fwd_outputs
        engine.mem_status('x') engine._INSTRUCTION_MAP""",
    "curriculum learning": """
        engine.set_data_post_process_func(None)
        deepspeed.runtime.data_pipeline.curriculum_scheduler.CurriculumScheduler({})""",
    "random layerwise token dropping": """
        engine.random_ltd_scheduler
        deepspeed.runtime.data_pipeline.data_routing.helper.remove_random_ltd_state_dict({})""",
    "curriculum sampling and data analysis": "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer.DataAnalyzer",
    "compression": "deepspeed.compression.compress.init_compression(engine.module,None)",
    "mixture of experts": "deepspeed.moe.layer.MoE(4,None,num_experts=2,ep_size=1,k=1,use_tutel=False)",
    "merging and splitting Megatron checkpoints": "deepspeed.runtime.state_dict_factory.MegatronSDLoader.sanity_check",
    "sequence parallelism": """
        deepspeed.sequence.layer.DistributedAttention(None,None,gather_idx=1)
        deepspeed.sequence.fpdt_layer.FPDT_Attention deepspeed.sequence.fpdt_layer.FPDT_FFN
        deepspeed.sequence.fpdt_layer.FPDT_LogitsLoss deepspeed.sequence.fpdt_layer.FPDT_InputConstruct""",
    "the inference engine": "deepspeed.init_inference(model=engine.module,mp_size=1,moe_experts=1,moe_type='standard')",
}
refused("Megatron-DeepSpeed", {text: feature for feature, texts in _MEGATRON.items() for text in texts.split()})

# ---- gpt-neox --------------------------------------------------------------------------------------------------------


@calls(
    "gpt-neox",
    "launcher.runner.{EXPORT_ENVS.append,DLTS_HOSTFILE,fetch_hostfile(path),parse_inclusion_exclusion(pool, i, e)}",
    "--deepspeed_config <base64-urlsafe JSON>",
    "initialize(model=, optimizer=, args=, lr_scheduler=, dist_init_required=False, model_parameters=, mpu=)",
    "initialize(..., config_params=)",
    "init_distributed(dist_backend=, auto_mpi_discovery=, distributed_port=, verbose=)",
    "comm.mpi_discovery(distributed_port=, verbose=)",
)
def neox_starts(folder: Path) -> None:
    from deepspeed.launcher import runner

    assert runner.EXPORT_ENVS == ["MLFLOW", "PYTHON", "MV2", "UCX"]
    runner.EXPORT_ENVS.append("MINE")
    runner.EXPORT_ENVS.remove("MINE")
    assert not runner.fetch_hostfile(str(folder / "none"))
    pool = {"one": 4, "two": 4}
    assert dict(runner.parse_inclusion_exclusion(pool, "", "two")) == {"one": [0, 1, 2, 3]}
    assert dict(runner.parse_inclusion_exclusion(pool, "one:0,2@two:1", "")) == {"one": [0, 2], "two": [1]}
    place = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    given = {f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()}
    unset = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"))
    with environment(MASTER_ADDR="10.0.0.1", **given, **unset):
        deepspeed.comm.mpi_discovery(distributed_port=29511, verbose=False)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        assert [os.environ[name] for name in names] == ["1", "4", "1", "10.0.0.1", "29511"]
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, distributed_port=29500, verbose=False)
    config = settings(1)
    text = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    for args in (parser.parse_args(["--deepspeed_config", text]), Namespace(deepspeed_config=config)):
        net = model()
        engine, *_ = deepspeed.initialize(
            model=net,
            optimizer=torch.optim.AdamW(net.parameters(), lr=0.1),
            args=args,
            lr_scheduler=None,
            dist_init_required=False,
            model_parameters=list(net.parameters()),
            mpu=Mpu(),
        )
        train(engine)
        engine.destroy()
    engine, *_ = deepspeed.initialize(model=model(), optimizer=None, config_params=config, mpu=None)
    engine.destroy()


@calls(
    "gpt-neox",
    "isinstance(optimizer, runtime.bf16_optimizer.BF16_Optimizer)",
    "ops.adam.{FusedAdam,DeepSpeedCPUAdam}, ops.lion.FusedLion as optimizer=",
    'optimizer.{overflow,cur_scale}, optimizer.state_dict()["optimizer_state_dict"]["state"]',
    "engine.{global_steps,steps_per_print(),wall_clock_breakdown()}, total_params = n, lr_scheduler.optimizer = ...",
    "hasattr-guarded timer_values, store_gradients",
)
def neox_trains(folder: Path) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lion import FusedLion
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    for make in (FusedAdam, DeepSpeedCPUAdam, FusedLion):
        net = model()
        optimizer = make([{"params": list(net.parameters()), "weight_decay": 0.1}], lr=0.1, betas=(0.9, 0.95))
        config = settings(1, optimizer=None, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
        engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
        assert isinstance(engine.optimizer, BF16_Optimizer)
        train(engine)
        engine.total_params = 7
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        engine.lr_scheduler = schedule
        engine.lr_scheduler.optimizer = engine.optimizer
        assert (engine.global_steps, engine.total_params, engine.wall_clock_breakdown()) == (1, 7, False)
        assert not hasattr(engine, "timer_values")
        engine.store_gradients = False
        engine.destroy()
    engine = start(0, fp16={"enabled": True, "initial_scale_power": 4})
    train(engine)
    assert (engine.optimizer.overflow, engine.optimizer.cur_scale) == (False, 16.0)
    engine.destroy()


@calls(
    "gpt-neox",
    "checkpointing.{configure,reset,checkpoint,get_cuda_rng_tracker,model_parallel_cuda_manual_seed}",
    "checkpointing.{_CUDA_RNG_STATE_TRACKER,_MODEL_PARALLEL_RNG_TRACKER_NAME,_set_cuda_rng_state}",
    "zero.Init(config_dict_or_path=)",
)
def neox_random(folder: Path) -> None:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    checkpointing.configure(Mpu(), partition_activations=True)
    checkpointing.model_parallel_cuda_manual_seed(11)
    tracker = checkpointing.get_cuda_rng_tracker()
    assert checkpointing._CUDA_RNG_STATE_TRACKER is tracker
    assert checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME in tracker.get_states()
    state = deepspeed.get_accelerator().get_rng_state()
    first = torch.rand(1)
    checkpointing._set_cuda_rng_state(state)
    assert torch.equal(first, torch.rand(1))
    checkpointing.reset()
    tracker.reset()
    with deepspeed.zero.Init(config_dict_or_path=settings(3)):
        assert hasattr(nn.Linear(4, 4).weight, "ds_id")


_NEOX = {
    "pipeline parallelism": """
        deepspeed.pipe.PipelineModule engine.train_batch(iter([])) engine.eval_batch(iter([]),return_logits=True)
        engine.set_has_attention_mask(True) engine.micro_batches engine.first_output_send engine.pipe_recv_buf
        engine.grid.stage_to_global(0) engine.num_stages engine.is_pipe_parallel engine.is_data_parallel
        engine.is_last_stage()""",
    "curriculum learning": "deepspeed.runtime.data_pipeline.curriculum_scheduler.CurriculumScheduler({})",
    "block-sparse attention": "deepspeed.ops.sparse_attention.sparsity_config",
    "1-bit optimizers": "deepspeed.runtime.fp16.onebit deepspeed.runtime.config.ONEBIT_LAMB_OPTIMIZER",
    "the DeeperSpeed fork": "engine.timer_values engine.stored_gradients",
}
refused("gpt-neox", {text: feature for feature, texts in _NEOX.items() for text in texts.split()})
