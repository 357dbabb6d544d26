"""Calls of DeepSpeedExamples."""

from __future__ import annotations

import argparse
import json
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import deepspeed
from deepspeed import comm
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from tests.conformance.calls.table import (
    Mpu,
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

# ---- starting -------------------------------------------------------------------------------------


@calls(
    "examples",
    "add_config_arguments(parser): --deepspeed, --deepspeed_config, --deepscale, --deepscale_config",
    "init_distributed()",
    "DeepSpeedConfig(json_path).fp16_enabled",
    "constants.{CROSS_RANK,CROSS_SIZE,TORCH_DISTRIBUTED_DEFAULT_PORT}",
    "runtime.utils.{see_memory_usage(msg, force),set_random_seed}",
    "utils.RepeatingLoader, utils.logger.info, utils.logging.logger.info",
)
def command_line(folder: Path) -> None:
    from deepspeed import constants
    from deepspeed.runtime.utils import see_memory_usage, set_random_seed
    from deepspeed.utils import RepeatingLoader, logger

    (folder / "ds.json").write_text(json.dumps(settings(1, fp16={"enabled": True})))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(folder / "ds.json")])
    assert args.deepspeed is True
    assert deepspeed.DeepSpeedConfig(args.deepspeed_config).fp16_enabled is True
    assert parser.parse_args(["--deepscale", "--deepscale_config", "x.json"]).deepscale_config == "x.json"
    deepspeed.init_distributed()
    assert (constants.CROSS_RANK, constants.CROSS_SIZE) == ("CROSS_RANK", "CROSS_SIZE")
    assert constants.TORCH_DISTRIBUTED_DEFAULT_PORT == 29500
    see_memory_usage("here", force=True)
    set_random_seed(5)
    first = torch.rand(1)
    set_random_seed(5)
    assert torch.equal(first, torch.rand(1))
    endless = iter(RepeatingLoader([1, 2]))
    assert [next(endless) for _ in range(5)] == [1, 2, 1, 2, 1]
    logger.debug("through utils")
    deepspeed.utils.logging.logger.debug("through the module")


@calls(
    "examples",
    "initialize(args, model, model_parameters)",
    "initialize(args, model, model_parameters, training_data, collate_fn)",
    "initialize(args, model, model_parameters, training_data, config)",
    "initialize(args, model, optimizer, lr_scheduler, dist_init_required[, config])",
    "initialize(args, model, optimizer, lr_scheduler, training_data, collate_fn)",
    "initialize(model, config), (model, model_parameters, config), (model, config_params), (args, model)",
    "initialize(model, optimizer, config, mpu)",
)
def ways_to_start(folder: Path) -> None:
    path = folder / "ds.json"
    path.write_text(json.dumps(settings(2)))
    args = Namespace(deepspeed=True, deepspeed_config=str(path), local_rank=0)
    plain = Namespace(local_rank=0)
    data = TensorDataset(torch.ones(8, 4))

    def stack(rows: list[Any]) -> torch.Tensor:
        return torch.stack([row[0] for row in rows]) * 2

    for form in (
        {"args": args, "with": "parameters"},
        {"args": args, "with": "parameters", "training_data": data, "collate_fn": stack},
        {"args": plain, "with": "parameters", "training_data": data, "config": settings(1)},
        {"args": args, "with": "optimizer", "dist_init_required": True},
        {"args": plain, "with": "optimizer", "dist_init_required": True, "config": settings(1)},
        {"args": args, "with": "optimizer", "training_data": data, "collate_fn": stack},
        {"config": settings(0)},
        {"with": "parameters", "config": str(path)},
        {"config_params": settings(3)},
        {"args": args},
        {"with": "optimizer", "config": settings(1), "mpu": Mpu()},
    ):
        net, options = model(), dict(form)
        kind = options.pop("with", "")
        if kind == "parameters":
            options["model_parameters"] = list(net.parameters())
        if kind == "optimizer":
            options["optimizer"] = torch.optim.AdamW(net.parameters(), lr=0.1)
            options["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(options["optimizer"], 1)
        engine, _, loader, schedule = deepspeed.initialize(model=net, **options)
        assert (loader is not None) == ("training_data" in options)
        assert (schedule is not None) == (kind == "optimizer")
        before = weights(engine)
        if loader is not None:
            assert loader is engine.training_dataloader
            batch = next(iter(loader))
            batch = batch if "collate_fn" in options else batch[0]
            assert batch[0, 0] == (2.0 if "collate_fn" in options else 1.0)
        train(engine)
        assert changed(before, weights(engine))
        engine.destroy()


@calls(
    "examples",
    "zero.Init(config_dict_or_path=)",
    "OnDevice(dtype=, device=)",
    "GatheredParameters(x, enabled=), (x, modifier_rank=), (x, modifier_rank=, enabled=)",
    "ops.adam.{DeepSpeedCPUAdam,FusedAdam}(groups, lr=, betas=)",
    "runtime.fp16.{fused_optimizer.FP16_Optimizer,unfused_optimizer.FP16_UnfusedOptimizer}",
    "saving stage 3 by ds_id and ds_status",
)
def models_and_optimizers(folder: Path) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        assert (nn.Linear(2, 2).weight.device.type, nn.Linear(2, 2).weight.dtype) == ("meta", torch.bfloat16)
    with deepspeed.zero.Init(config_dict_or_path=settings(3)):
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    for options in ({"enabled": True}, {"modifier_rank": 0}, {"modifier_rank": 0, "enabled": True}):
        with deepspeed.zero.GatheredParameters(net[0].weight, **options):
            assert net[0].weight.shape == (8, 4)
    for make in (DeepSpeedCPUAdam, FusedAdam):
        groups = [{"params": [p], "weight_decay": 0.0} for p in model().parameters()]
        assert [group["betas"] for group in make(groups, lr=0.1, betas=(0.9, 0.95)).param_groups] == [(0.9, 0.95)] * 4
    engine, *_ = deepspeed.initialize(model=net, config=settings(3))
    train(engine)
    saved = {}
    for name, param in engine.module.named_parameters():
        left = [p for p in [param] if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        with deepspeed.zero.GatheredParameters(left, enabled=len(left) > 0):
            saved[name] = param.detach().cpu().clone()
    assert saved["0.weight"].shape == (8, 4)
    engine.destroy()
    lamb = {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}}
    for unfused, more in ((False, {}), (True, lamb)):
        engine = start(0, fp16={"enabled": True, "initial_scale_power": 4}, **more)
        assert isinstance(engine.optimizer, FP16_Optimizer)
        assert isinstance(engine.optimizer, FP16_UnfusedOptimizer) is unfused
        assert (engine.optimizer.cur_scale, engine.optimizer.overflow) == (16.0, False)
        engine.destroy()


# ---- deepspeed.comm -------------------------------------------------------------------------------


@calls(
    "examples",
    "comm.{get_rank,get_world_size,get_local_rank,barrier,is_initialized}()",
    "comm.all_reduce(t, async_op=), comm.broadcast(t, src, async_op=)",
    "comm.all_to_all_single(out, in, async_op=)",
    "comm.allgather_fn(out, in, group=, async_op=), comm.has_all_gather_into_tensor()",
    "comm.send(t, dst), recv(t, src=), isend, irecv(t, src=)",
    "comm.TorchBackend.get_all_gather_function()",
    "comm.all_gather(list, t)",
    "prof, log_name and debug by position; unknown keywords",
)
def collectives(folder: Path) -> None:
    rank = comm.get_rank()
    other = 1 - rank
    assert (comm.get_world_size(), comm.is_initialized()) == (2, True)
    assert comm.get_local_rank() == rank
    comm.barrier()
    for wait in (False, True):
        total = torch.full((4,), rank + 1.0)
        handle = comm.all_reduce(total, async_op=wait)
        assert (handle is not None) == wait
        if handle is not None:
            handle.wait()
        assert torch.all(total == 3.0)
        handle = comm.broadcast(total.mul_(rank + 1), 1, async_op=wait)
        if handle is not None:
            handle.wait()
        assert torch.all(total == 6.0)
        out = torch.empty(4)
        handle = comm.all_to_all_single(out, torch.full((4,), float(rank)), async_op=wait)
        if handle is not None:
            handle.wait()
        assert out.tolist() == [0.0, 0.0, 1.0, 1.0]
        handle = comm.allgather_fn(out, torch.full((2,), float(rank)), group=None, async_op=wait)
        if handle is not None:
            handle.wait()
        assert out.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert comm.has_all_gather_into_tensor() is True
    pieces = [torch.empty(2), torch.empty(2)]
    comm.all_gather(pieces, torch.full((2,), float(rank)))
    assert [piece[0].item() for piece in pieces] == [0.0, 1.0]
    received = torch.empty(2)
    if rank == 0:
        comm.send(torch.full((2,), 7.0), 1)
        comm.recv(received, src=1)
    else:
        comm.recv(received, src=0)
        comm.send(received + 1, 0)
    assert received[0] == (8.0 if rank == 0 else 7.0)
    sent = comm.isend(torch.full((2,), float(rank)), other)
    comm.irecv(received, src=other).wait()
    sent.wait()
    assert received[0] == other
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch has another name for it
        comm.TorchBackend.get_all_gather_function()(out, torch.full((2,), float(rank)))
    assert out.tolist() == [0.0, 0.0, 1.0, 1.0]

    comm.configure(enabled=True, prof_all=False, prof_ops=[])
    try:
        comm.all_reduce(torch.ones(2), comm.ReduceOp.SUM, None, False, True, "of_the_user", "caller")
        comm.all_reduce(torch.ones(2), comm.ReduceOp.SUM, None, False, False, "not_seen")
        assert comm.get_logged_comm_ops() == ["of_the_user"]
        comm.configure(prof_all=True)
        everyone: list[Any] = [None, None]
        comm.all_gather_object(everyone, {"rank": rank})
        assert everyone == [{"rank": 0}, {"rank": 1}]
        assert "all_gather" in " ".join(comm.get_logged_comm_ops())
    finally:
        comm.configure(enabled=False, prof_all=True)
        comm.reset_log()
    with pytest.raises(TypeError, match="async_opp"):
        comm.all_reduce(torch.ones(2), async_opp=True)


# ---- the engine -----------------------------------------------------------------------------------


@calls(
    "examples",
    "save_checkpoint(dir), (dir, tag), (dir, tag, client_state) by position; the truthy result",
    "load_checkpoint(dir, tag)",
    "is_gradient_accumulation_boundary()",
    "fp16_enabled() bfloat16_enabled() optimizer_name() steps_per_print() wall_clock_breakdown() get_lr()",
    "train_micro_batch_size_per_gpu() gradient_accumulation_steps()",
    "local_rank device train eval lr_scheduler (assignable) data_parallel_group",
    "tput_timer.update_epoch_count()",
    "optimizer.{param_groups,cur_scale,overflow,optimizer,zero_grad}",
    "optimizer.check_overflow(external=True), optimizer.skip_step = True",
    "attributes of the model: engine.forward_value, .generate, .gradient_checkpointing_enable, .model",
)
def members(folder: Path) -> None:
    net: Any = model()
    net.forward_value = lambda x: x + 1
    net.generate = lambda: "text"
    net.model = "inner"
    engine = deepspeed.initialize(model=net, config=settings(1, gradient_accumulation_steps=2, steps_per_print=7))[0]
    assert engine.is_gradient_accumulation_boundary() is False
    backward(engine)
    engine.step()
    assert engine.is_gradient_accumulation_boundary() is True
    backward(engine)
    engine.step()
    assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.optimizer_name()) == (False, False, "adamw")
    assert (engine.steps_per_print(), engine.wall_clock_breakdown(), engine.get_lr()) == (7, False, [0.1])
    assert (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()) == (2, 2)
    assert engine.local_rank == comm.get_rank()
    assert torch.device(engine.device).type == "cpu"
    assert comm.get_world_size(engine.data_parallel_group) == 2
    engine.eval()
    assert not net.training
    engine.train()
    assert net.training
    engine.lr_scheduler = marker = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
    assert engine.lr_scheduler is marker
    engine.tput_timer.update_epoch_count()
    assert engine.tput_timer.epoch_count == 1
    assert (engine.forward_value(1), engine.generate(), engine.model) == (2, "text", "inner")
    assert engine.optimizer.optimizer.param_groups is engine.optimizer.param_groups
    assert engine.optimizer.overflow is False
    engine.optimizer.zero_grad()
    engine.lr_scheduler = None
    assert engine.optimizer.check_overflow(external=True) is False
    engine.optimizer.skip_step = True
    before = weights(engine)
    train(engine, steps=2)
    assert (engine.skipped_steps, changed(before, weights(engine))) == (1, False)
    assert engine.save_checkpoint(str(folder))
    assert engine.save_checkpoint(str(folder), "named")
    assert engine.save_checkpoint(str(folder), "more", {"epoch": 2})
    assert engine.load_checkpoint(str(folder), "more")[1]["epoch"] == 2
    engine.destroy()


@calls(
    "examples",
    "loss.backward() and engine.step() (bf16_master_weight)",
    "offload_states(include=), reload_states()",
    "compile(backend)",
    "destroy()",
)
def other_ways_to_train(folder: Path) -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    engine = start(1, bf16=bf16)
    before = weights(engine)
    engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean().backward()
    engine.step()
    assert changed(before, weights(engine))
    engine.destroy()
    engine = start(3)
    train(engine)
    engine.offload_states(include=["optim_states"])
    engine.reload_states()
    train(engine)
    with compiling():
        engine.compile("eager")  # test_patched_names.py trains a compiled engine
        assert engine.is_compiled is True
    engine.destroy()
    assert engine.optimizer is None


@calls(
    "examples",
    "AsyncIOBuilder().load().aio_handle(...).{sync_pwrite,sync_pread,new_cpu_locked_tensor,free_cpu_locked_tensor}",
    "GDSBuilder().load()",
)
def files(folder: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder

    handle = AsyncIOBuilder().load().aio_handle(1024, 4, False, False, 1)
    buffer = handle.new_cpu_locked_tensor(1024, torch.empty(0, dtype=torch.uint8))
    buffer.fill_(5)
    path = str(folder / f"{comm.get_rank()}.bin")
    handle.sync_pwrite(buffer, path)
    buffer.zero_()
    handle.sync_pread(buffer, path)
    assert torch.all(buffer == 5)
    handle.free_cpu_locked_tensor(buffer)
    with pytest.raises(ValueError, match="not been implemented on the cpu backend"):
        GDSBuilder().load()


_EXAMPLES = {
    "the inference engine": """
        deepspeed.init_inference(engine.module,mp_size=1)
        deepspeed.inference.RaggedInferenceEngineConfig(tensor_parallel={})
        deepspeed.inference.DeepSpeedTPConfig(tp_size=1)""",
    "tensor-parallel training": "deepspeed.tp_model_init(engine.module,tp_size=1,dtype=None)",
    "the fused transformer layer": "deepspeed.DeepSpeedTransformerLayer deepspeed.DeepSpeedTransformerConfig",
    "the stand-alone file writers": """
        deepspeed.io.FastFileWriter(file_path='x',config=None) deepspeed.io.FastFileWriterConfig(dnvme_handle=None)
        deepspeed.io.PyFileWriter deepspeed.io.MockFileWriter""",
    "pipeline parallelism": """
        deepspeed.pipe.PipelineModule(layers=[],loss_fn=None,num_stages=1) deepspeed.PipelineModule
        engine.train_batch() engine.reset_activation_shape() engine.eval_batch(iter([]))""",
    "mixture of experts": """
        deepspeed.moe.layer.MoE(hidden_size=4,expert=None,num_experts=2,ep_size=1,use_residual=False,k=1)
        deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer([])""",
    "random layerwise token dropping": """
        deepspeed.runtime.data_pipeline.data_routing.helper.convert_to_random_ltd(engine.module,None)
        deepspeed.runtime.data_pipeline.data_routing.helper.save_without_random_ltd(engine.module)
        engine.random_ltd_scheduler.get_current_seq()""",
    "curriculum sampling and data analysis": """
        deepspeed.runtime.data_pipeline.data_sampling.data_analyzer.DataAnalyzer
        deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset.MMapIndexedDataset('x',skip_warmup=True)
        deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr""",
    "Domino": "deepspeed.runtime.domino.transformer.DominoTransformer",
    "sequence parallelism": "deepspeed.sequence.layer.DistributedAttention(None,None,scatter_idx=2,gather_idx=0)",
    "DeepCompile": """
        deepspeed.compile.passes.zero3_compile.add_z3_gather_release deepspeed.compile.passes.prefetch.schedule_prefetch
        deepspeed.compile.passes.selective_gather.selective_gather deepspeed.compile.passes.offload_adam_states
        deepspeed.compile.passes.sp_compile.prepare_autosp_inputs engine.get_compile_time()""",
    "kernel injection": "deepspeed.module_inject.replace_policy.HFGPT2LayerPolicy",
    "compression": """
        deepspeed.compression.compress.init_compression(engine.module,None)
        deepspeed.compression.helper.recursive_getattr(engine,'module')""",
    "the hybrid engine": "deepspeed.runtime.hybrid_engine.DeepSpeedHybridEngine",
}
refused("examples", {text: feature for feature, texts in _EXAMPLES.items() for text in texts.split()})


@calls("examples", 'config "hybrid_engine": {"enabled": true}')
def hybrid_engine(folder: Path) -> None:
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="the hybrid engine"):
        start(3, hybrid_engine={"enabled": True, "max_out_tokens": 512})
