"""Every key that client packages ship in their configs is read by the run, named in a line, or refused by its path.

The table is the union of the keys of shipped files and dicts, each with a value that is not its default, under the
settings it needs. A key that is parsed and then forgotten fails `test_no_key_is_ignored`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import checkpointing
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils.logging import logger
from tests.harness.config_reads import noted_reads
from tests.harness.offload import apart

Settings = dict[str, Any]
NONE: Settings = {}
FILES = "FILES"  # a temporary folder, put in when it is known


def zero(stage: int, **keys: Any) -> Settings:
    return {"zero_optimization": {"stage": stage, **keys}}


ON_CPU, ON_NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": FILES}
UNDER: dict[str, Settings] = {
    "plain": NONE,
    "stage 2": zero(2),
    "stage 3": zero(3),
    "frozen weights packed": zero(3),
    "optimizer in memory": zero(3, offload_optimizer=ON_CPU),
    "optimizer in files": zero(3, offload_optimizer=ON_NVME),
    "columns at once": zero(2, offload_optimizer=ON_CPU, overlap_comm=True, zenflow={}),
    "columns at once, by steps": zero(
        3, offload_optimizer=ON_CPU, overlap_comm=True, zenflow={"select_strategy": "step", "select_interval": 5}
    ),
    "weights in memory": zero(3, offload_param=ON_CPU),
    "weights in files": zero(3, offload_param=ON_NVME),
    "everything in files": zero(3, offload_optimizer=ON_NVME, offload_param=ON_NVME),
    "fp16": {"fp16": {"enabled": True}, **zero(1)},
    "fp16 with one scale": {"fp16": {"enabled": True}, **zero(1)},
    "bf16": {"bf16": {"enabled": True}, **zero(1)},
    "autocast": {"torch_autocast": {"enabled": True}},
    "writer": {"checkpoint": {"writer": {"type": "FAST"}}},
    "collectives log": {"comms_logger": {"enabled": True}},
    "shared sequences": {"seq_parallel_communication_data_type": "fp32"},
}

# Settings -> section ("" for the root) -> key -> value.
UNION: dict[str, dict[str, Settings]] = {
    "plain": {
        "": {
            "train_batch_size": 4.0, "gradient_accumulation_steps": 1, "steps_per_print": float("inf"),
            "gradient_clipping": True, "prescale_gradients": True, "gradient_predivide_factor": 2.0,
            "wall_clock_breakdown": True, "memory_breakdown": True, "communication_data_type": "fp32",
            "dump_state": True, "dataloader_drop_last": True, "sparse_gradients": True, "disable_allgather": True,
            "weight_quantization": {"quantized_initialization": {"num_bits": 8}}, "sequence_parallel_size": 2,
            "_comment": "a remark", "comment": "another", "comms_config": {"a": 1}, "monitor_config": {"a": 1},
            "cuda_visible_devices": "0", "msamp": {"enabled": True}, "zero_optimization.reduce_bucket_size": 1e5,
            "zero_optimization.stage3_param_persistence_threshold": 10.5, "train_batchsize": 2,
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu": True, "seed_everything": 1,
            "data_efficiency": {"seed": 1}, "autotuning": {"fast": False}, "curriculum_learning": {"enabled": True},
            "progressive_layer_drop": {"enabled": True, "theta": 0.5}, "sparse_attention": {"mode": "fixed"},
            "elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [1]},
            "amp": {"enabled": True}, "train_micro_batch_size_per_gpu": "auto",
            "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
        },
        "data_types": {"grad_accum_dtype": "fp32", "param_dtype": "fp32", "buffer_dtype": "bf16"},
        "optimizer": {"legacy_fusion": True, "type": "OneBitAdam"},
        "aio": {
            "block_size": 262144, "queue_depth": 16, "thread_count": 2, "intra_op_parallelism": 2,
            "single_submit": True, "overlap_events": False, "use_gds": True,
        },
        "activation_checkpointing": {
            "partition_activations": True, "cpu_checkpointing": True, "contiguous_memory_optimization": True,
            "number_checkpoints": 2, "synchronize_checkpoint_boundary": True, "profile": True,
        },
        "checkpoint": {
            "tag_validation": "Fail", "load_universal": True, "use_node_local_storage": True,
            "parallel_write": {"pipeline_stage": True}, "checkpoint_serialization": False, "writer": {"type": "PYTHON"},
        },
        "compile": {
            "deepcompile": True, "passes": ["autosp"], "offload_parameters": True, "disable": True, "backend": "x",
        },
        "tensor_parallel": {
            "autotp_size": 2, "tp_size": 2, "tp": {"tp_size": 2}, "preset_model": "llama",
            "partition_config": {"use_default_specs": False},
        },
        "hybrid_engine": {
            "enabled": True, "max_out_tokens": 10, "inference_tp_size": 2, "release_inference_cache": True,
            "pin_parameters": False, "tp_gather_partition_size": 4,
        },
        "flops_profiler": {
            "enabled": True, "profile_step": 2, "module_depth": 1, "top_modules": 2, "detailed": False,
            "output_file": "x",
        },
        "tensorboard": {"enabled": True, "output_path": "x", "job_name": "y"},
        "wandb": {"enabled": True, "team": "a", "group": "b", "project": "c"},
        "csv_monitor": {"enabled": True, "output_path": "x", "job_name": "y"},
        "comet": {"enabled": True, "project": "p"},
        "data_efficiency": {
            "enabled": True, "seed": 1, "data_sampling": {"enabled": True, "num_epochs": 1},
            "data_routing": {"enabled": True},
        },
        "data_efficiency.data_sampling": {
            "num_workers": 2, "pin_memory": True, "dynamic_batching": {"enabled": True, "max_tokens": 10},
            "curriculum_learning": {"enabled": True, "data_cluster_path": "x"},
        },
        "data_efficiency.data_routing": {"random_ltd": {"enabled": True, "total_layer_num": 2}},
        "autotuning": {
            "enabled": True, "overwrite": False, "max_train_batch_size": 4, "mp_size": 2,
            "arg_mappings": {"gradient_accumulation_steps ": "--steps"},
        },
        "pipeline": {
            "seed_layers": True, "activation_checkpoint_interval": 1, "pipe_partitioned": False,
            "grad_partitioned": False, "use_reentrant": True,
        },
    },
    "stage 2": {
        "": {"zero_force_ds_cpu_optimizer": False},
        "zero_optimization": {
            "stage": "2", "allgather_partitions": False, "allgather_bucket_size": 1e5, "reduce_scatter": False,
            "reduce_bucket_size": 1000.5, "overlap_comm": False, "contiguous_gradients": False,
            "round_robin_gradients": True, "ignore_unused_parameters": True, "elastic_checkpoint": True,
            "load_from_fp32_weights": False, "legacy_stage1": True, "cpu_offload": True,
            "cpu_offload_use_pin_memory": True, "sub_group_size": 0,
            "offload_param": {"device": "cpu", "nvme_path": None},
            "zenflow": {"topk_ratio": 0.1, "update_interval": 2, "full_warm_up_rounds": 0, "overlap_step": True},
            "zero_hpz_partition_size": 2, "stage3_max_live_parameters": 10,
        },
    },
    "stage 3": {
        "zero_optimization": {
            "sub_group_size": 0, "stage3_max_live_parameters": 1000, "stage3_max_reuse_distance": 10,
            "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0,
            "stage3_model_persistence_threshold": 1, "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_gather_fp16_weights_on_model_save": True, "stage3_module_granularity_threshold": 100,
            "memory_efficient_linear": False, "zero_quantized_weights": True, "zero_quantized_gradients": True,
            "mics_shard_size": 2, "zero_hpz_partition_size": 1, "cpu_offload_param": True,
            "override_module_apply": False, "log_trace_cache_warnings": True, "stage3_prefetch_buckets_size": 3,
        },
        "zero_optimization.leaf_module": {"classes": ["Tanh"], "names": ["0"], "name_suffixes": ["2"]},
    },
    "frozen weights packed": {"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
    "optimizer in memory": {
        "": {"zero_force_ds_cpu_optimizer": True},
        "zero_optimization.offload_optimizer": {
            "buffer_count": 8, "pin_memory": True, "pipeline_read": True, "pipeline_write": True, "fast_init": True,
            "ratio": 0.5, "super_offload": True, "cpuadam_cores_perc": 0.5, "nvme_path": FILES,
        },
    },
    "optimizer in files": {
        "aio": {
            "block_size": 262144, "queue_depth": 16, "thread_count": 2, "intra_op_parallelism": 2,
            "single_submit": True, "overlap_events": False, "use_gds": True,
        },
        "zero_optimization.offload_optimizer": {
            "buffer_count": 8, "pin_memory": True, "pipeline_read": True, "fast_init": True, "ratio": 0.5,
            "super_offload": True, "cpuadam_cores_perc": 0.5, "nvme_path": FILES, "device": "nvme",
        },
    },
    "everything in files": {"zero_optimization.offload_optimizer": {"pipeline_write": True}},
    "columns at once": {
        "zero_optimization.zenflow": {
            "topk_ratio": 0.1, "update_interval": 2, "full_warm_up_rounds": 1, "overlap_step": True, "offload": True,
            "pt_reserved_cores_perc": 0.7, "steps_per_epoch": 7, "select_strategy": "auto", "select_interval": "auto",
        },
    },
    "columns at once, by steps": {
        "zero_optimization.zenflow": {
            "select_strategy": "step", "select_interval": 4, "update_interval": "auto", "auto_ratio": 0.9,
        },
    },
    "weights in memory": {
        "zero_optimization.offload_param": {
            "device": "cpu", "buffer_count": 8, "buffer_size": 1e6, "max_in_cpu": 1e3, "pin_memory": False,
        },
    },
    "weights in files": {
        "zero_optimization.offload_param": {
            "device": "nvme", "buffer_count": 8, "buffer_size": 1e6, "max_in_cpu": 1e3, "pin_memory": False,
            "nvme_path": FILES,
        },
    },
    "fp16": {
        "fp16": {
            "enabled": True, "auto_cast": True, "initial_scale_power": 11, "loss_scale_window": 100,
            "hysteresis": 3, "min_loss_scale": 2, "consecutive_hysteresis": True, "fp16": True,
        },
    },
    "fp16 with one scale": {"fp16": {"loss_scale": 4.0, "fp16_master_weights_and_grads": True}},
    "bf16": {
        "bf16": {
            "enabled": True, "immediate_grad_update": True, "bf16_master_weights_and_grads": True,
            "bf16_optimizer_states": True, "check_grad_overflow": False,
        },
    },
    "autocast": {
        "torch_autocast": {
            "enabled": True, "dtype": "torch.bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"],
        },
    },
    "writer": {
        "checkpoint.writer": {
            "type": "FAST", "io_buffer_size": 8388608, "io_buffer_double": False, "show_statistics": True,
            "data_parallel": "replica", "decoupled": True, "io_multiplier": 2,
        },
    },
    "collectives log": {
        "comms_logger": {"verbose": True, "prof_all": False, "debug": True, "prof_ops": ["all_reduce"]},
    },
    "shared sequences": {"": {"seq_parallel_communication_data_type": "bf16"}},
}  # fmt: skip

READ_ELSEWHERE = {
    "checkpoint.load_universal": "a load without such a folder is an error: checkpoint/test_universal.py",
    "checkpoint.tag_validation": "read when ranks save under different tags: checkpoint/test_rules.py",
    "data_types.param_dtype": "refused where it differs from what fp16 and bf16 say: unit/config/test_combinations.py",
    "zero_force_ds_cpu_optimizer": "refused with another optimizer: the last test below",
    "sequence_parallel_size": "read from the mapping before it is parsed, and refused there: runtime/build.py",
}


def rows() -> Iterator[tuple[str, str, str, Any]]:
    for under, sections in UNION.items():
        for section, keys in sections.items():
            for key, value in keys.items():
                yield under, section, key, value


def base(under: str, folder: str) -> Settings:
    batch = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    return _with_folder({**batch, **copy.deepcopy(UNDER[under])}, folder)


def _with_folder(value: Any, folder: str) -> Any:
    if isinstance(value, dict):
        return {key: _with_folder(item, folder) for key, item in value.items()}
    return folder if isinstance(value, str) and value == FILES else value


def put(settings: Settings, section: str, key: str, value: Any) -> None:
    for part in section.split(".") if section else ():
        settings = settings.setdefault(part, {})
    settings[key] = value


def names(line: str, path: str) -> bool:
    """Whether a line is about `path` or a section above it."""
    parts = path.split(".")
    above = [".".join(parts[:count]) for count in range(1, len(parts))]
    return path in line or any(line.startswith(f"{part} has no effect") for part in above)


def refused_or_said(under: str, section: str, key: str, value: Any) -> str:
    """"refused", "said" (with its path in the text), or "" for a key taken without a word; else what is wrong."""
    settings = base(under, "/tmp")
    put(settings, section, key, _with_folder(value, "/tmp"))
    path = f"{section}.{key}" if section else key
    try:
        config = DeepSpeedConfig.parse(settings, dp_world_size=2)
    except DeepSpeedConfigError as error:
        return "refused" if path in str(error) else f"refused without {path}: {error}"
    return "said" if any(names(line, path) for line in [*config.notes(), *config.adjustments]) else ""


def train(settings: Settings, folder: str, *, saves: bool) -> tuple[set[str], list[str]]:
    """Two steps (with `saves` a save and a load) under `settings`: the keys read, the lines said."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with noted_reads() as read, apart():
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
            engine: Any = deepspeed.initialize(model=model, config=settings)[0]
            for _ in range(2):
                loss = engine(torch.ones(2, 6, dtype=next(engine.module.parameters()).dtype)).float().mean()
                engine.backward(loss)
                engine.step()
            engine.deepspeed_io(torch.utils.data.TensorDataset(torch.ones(4)))
            engine.zero_gather_16bit_weights_on_model_save()
            if saves:
                engine.save_checkpoint(folder)
                engine.load_checkpoint(folder, load_optimizer_states=False)
            engine.destroy()
    finally:
        logger.removeHandler(handler)
    return read, lines


def ignored(folder: str) -> dict[str, Any]:
    """Keys of the union that are neither refused, nor named, nor read; with the number of each kind."""
    kinds = {"refused": 0, "said": 0, "read": 0}
    wrong: list[str] = []
    left: dict[str, list[tuple[str, str, Any]]] = {}
    for under, section, key, value in rows():
        kind = refused_or_said(under, section, key, value)
        if kind in kinds:
            kinds[kind] += 1
        elif kind:
            wrong.append(f"{under}: {kind}")
        else:
            left.setdefault(under, []).append((section, key, value))
    for under, taken in left.items():
        settings = base(under, folder)
        for section, key, value in taken:
            if (f"{section}.{key}" if section else key) not in READ_ELSEWHERE:
                put(settings, section, key, _with_folder(value, folder))
        read, lines = train(settings, f"{folder}/{under}", saves=under in ("plain", "writer", "stage 2", "stage 3"))
        for section, key, _ in taken:
            path = f"{section}.{key}" if section else key
            fields = {path, path.replace("stage3_", "")}
            if fields & read or path in READ_ELSEWHERE or any(names(line, path) for line in lines):
                kinds["read"] += 1
            else:
                wrong.append(f"{under}: {path} is accepted, and nothing reads it")
    return {**kinds, "wrong": wrong}


def test_no_key_is_ignored(ranks: Callable[..., list[Any]], tmp_path: Any) -> None:
    found = ranks(ignored, str(tmp_path))[0]
    assert found["wrong"] == []
    assert min(found["refused"], found["said"], found["read"]) > 30  # a harness that sees nothing fails here
    assert found["refused"] + found["said"] + found["read"] == len(list(rows()))


def a_forgotten_key(folder: str) -> None:
    """The test above can fail: a key that only the parser knows is not among those that were read."""
    read, lines = train(base("stage 2", folder), folder, saves=False)
    assert {"gradient_clipping", "zero_optimization.overlap_comm", "fp16.enabled", "train_batch_size"} <= read
    assert {"aio.block_size", "hybrid_engine.max_out_tokens", "flops_profiler.profile_step"} & read == set()
    assert not any("block_size" in line for line in lines)


def test_reads_are_told_from_parsing(ranks: Callable[..., list[Any]], tmp_path: Any) -> None:
    ranks(a_forgotten_key, str(tmp_path))


def another_optimizer_is_refused() -> None:
    model = nn.Linear(6, 1)
    settings = {**base("optimizer in memory", ""), "zero_force_ds_cpu_optimizer": True}
    del settings["optimizer"]
    with apart(), pytest.raises(ZeRORuntimeException, match=r"zero_force_ds_cpu_optimizer: true.*RMSprop"):
        deepspeed.initialize(model=model, config=settings, optimizer=torch.optim.RMSprop(model.parameters()))


def test_a_forced_host_optimizer(ranks: Callable[..., list[Any]]) -> None:
    ranks(another_optimizer_is_refused)


def a_second_block_is_not_dropped_in_silence(folder: str) -> None:
    """Recomputation is set up once per process: what a later config asks for differently is named."""
    checkpointing.configure(None, num_checkpoints=3)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        block = {"number_checkpoints": 2, "profile": False}
        settings = {**base("plain", folder), "activation_checkpointing": block}
        deepspeed.initialize(model=nn.Linear(6, 1), config=settings)[0].destroy()
    finally:
        logger.removeHandler(handler)
        checkpointing.configure(None)
    told = [line for line in lines if "configured otherwise already" in line]
    assert len(told) == (torch.distributed.get_rank() == 0)
    assert all("activation_checkpointing.number_checkpoints has no effect" in line for line in told)


def test_recomputation_that_is_set_up_already(ranks: Callable[..., list[Any]], tmp_path: Any) -> None:
    ranks(a_second_block_is_not_dropped_in_silence, str(tmp_path))
