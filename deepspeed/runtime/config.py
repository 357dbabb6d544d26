"""The config of a training run: parsed, checked, resolved for a number of ranks, then read-only.

Owns `DeepSpeedConfig`: `parse` (pure: no process group, no environment, the input stays as it is) and `resolve` (the
batch equation for a number of data-parallel ranks), and the attributes the engine and clients read. Does not own the
sections, which stand beside their features (`config_schema.py` composes them). Invariant: an instance holds no
contradiction; everything wrong with a config is reported in one `DeepSpeedConfigError`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from deepspeed.comm.config import DeepSpeedCommsConfig
from deepspeed.datastates.config import DeepSpeedDataStatesConfig
from deepspeed.monitor.config import MONITOR_SECTIONS, DeepSpeedMonitorConfig
from deepspeed.runtime.config_batch import BatchTriple
from deepspeed.runtime.config_effects import without_effect
from deepspeed.runtime.config_parse import STRICT_VARIABLE, fill_batch, read_config
from deepspeed.runtime.config_problems import (
    SECRET,
    DeepSpeedConfigError,
    DeepSpeedConfigTypeError,
    config_error,
)
from deepspeed.runtime.config_report import Report
from deepspeed.runtime.config_schema import ConfigSections
from deepspeed.runtime.config_source import ConfigSource, LoadedConfig, load_source
from deepspeed.runtime.config_types import torch_dtype
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.hybrid_engine_config import HybridEngineConfig
from deepspeed.runtime.optimizer_config import (
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAM_W_MODE,
    ADAM_W_MODE_DEFAULT,
    ADAMW_OPTIMIZER,
    DEEPSPEED_OPTIMIZERS,
    LAMB_OPTIMIZER,
    LION_OPTIMIZER,
    MUADAM_OPTIMIZER,
    MUADAMW_OPTIMIZER,
    MUON_OPTIMIZER,
    MUSGD_OPTIMIZER,
    TORCH_ADAM_PARAM,
    OptimizerConfig,
    SchedulerConfig,
)
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.unbuilt import attribute_or_submodule

if TYPE_CHECKING:
    import torch

    from deepspeed.autotuning.config import AutotuningConfig
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedConfigTypeError",
    "DeepSpeedConfigWriter",
    "DeepSpeedZeroConfig",
    "HybridEngineConfig",
    "BatchTriple",
    "STRICT_VARIABLE",
    "ADAGRAD_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_W_MODE",
    "ADAM_W_MODE_DEFAULT",
    "DEEPSPEED_OPTIMIZERS",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "MUADAM_OPTIMIZER",
    "MUADAMW_OPTIMIZER",
    "MUON_OPTIMIZER",
    "MUSGD_OPTIMIZER",
    "TORCH_ADAM_PARAM",
]

__path__: list[str] = []  # an unbuilt name is then a question to `deepspeed.unbuilt`, as in a package

_WRITABLE = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "zero_enabled",  # toggled by Megatron-style training loops around evaluation
        "batch_triple",
    }
)


class DeepSpeedConfig:
    """All settings of a run.

    `DeepSpeedConfig(source)` parses and resolves for the data-parallel ranks of the running process group (1 without
    one), of `mpu` or of `mesh_device`. `DeepSpeedConfig.parse(source).resolve(n)` does the same without looking at
    anything but its arguments.

    Sections are attributes (`zero_config`, `float16_config`, `optimizer`, ...), all of them also below `sections`.
    What reading the config had to say stands in `auto_keys`, `deprecations`, `unknown_keys`, `comments`, `adjustments`,
    `warnings` (lists of lines, also joined by `notes()`).

    Raises:
        DeepSpeedConfigError: lists every problem of the config; see its docstring for the classes it also is.
    """

    def __init__(self, config: ConfigSource, mpu: Any = None, mesh_device: Any = None) -> None:
        loaded = load_source(config)
        strict = os.environ.get(STRICT_VARIABLE, "0").strip().lower() in ("1", "true", "yes", "on")
        sections, report = read_config(loaded, strict=strict, partial=False)
        self.mesh_device = mesh_device
        ranks = data_parallel_size(loaded.data, sections, mpu, mesh_device)
        triple = fill_batch(sections, report, ranks)
        if report.problems or sections is None or triple is None:
            raise config_error(report.problems, loaded.origin)
        self._bind(loaded, sections, report)
        self._take_triple(triple)

    @classmethod
    def parse(
        cls, source: ConfigSource, *, strict: bool = False, partial: bool = False, dp_world_size: int | None = None
    ) -> DeepSpeedConfig:
        """Read and check a config; batch sizes stay as given until `resolve`.

        Args:
            source: mapping, path to JSON/HJSON, or base64 text of one.
            strict: every unknown key is an error.
            partial: keys that a wrapper fills in later may still be "auto" (a config seen while the model is built).
            dp_world_size: also resolve for this many data-parallel ranks, so that one error has the batch problem too.

        Raises:
            DeepSpeedConfigError: lists every problem.
        """
        loaded = load_source(source)
        sections, report = read_config(loaded, strict=strict, partial=partial)
        triple = fill_batch(sections, report, dp_world_size) if dp_world_size is not None else None
        if report.problems or sections is None:
            raise config_error(report.problems, loaded.origin)
        config = cls.__new__(cls)
        config.mesh_device = None
        config._bind(loaded, sections, report)
        if triple is not None:
            config._take_triple(triple)
        return config

    def resolve(self, dp_world_size: int) -> DeepSpeedConfig:
        """This config for a number of data-parallel ranks: the batch triple filled in and checked.

        Raises:
            DeepSpeedConfigError: the batch sizes do not multiply; the text has the equation.
        """
        if dp_world_size < 1:
            raise ValueError(f"dp_world_size is {dp_world_size}; expected at least 1")
        report = replace(self._report, problems=[])
        triple = fill_batch(self.sections, report, dp_world_size)
        if triple is None:
            raise config_error(report.problems, self.origin)
        config = type(self).__new__(type(self))
        config.mesh_device = self.mesh_device
        config._bind(LoadedConfig(self._param_dict, self.origin), self.sections, self._report)
        config._take_triple(triple)
        return config

    # ---- attributes ----

    def _bind(self, loaded: LoadedConfig, sections: ConfigSections, report: Report) -> None:
        """Set every attribute; the names are those of the reference, plus `sections` and the notes."""
        s = sections
        sections.freeze()
        self.sections: ConfigSections = s
        self.origin: str = loaded.origin
        self._param_dict: Mapping[str, Any] = loaded.data
        self._report: Report = report
        self.auto_keys: list[str] = report.auto_keys
        self.deprecations: list[str] = report.deprecations
        self.unknown_keys: list[str] = report.unknown_keys
        self.comments: list[str] = report.comments
        self.adjustments: list[str] = report.adjustments
        self.warnings: list[str] = list(without_effect(s, report))

        self.batch_triple: BatchTriple | None = None
        self.train_batch_size: int | None = s.train_batch_size
        self.train_micro_batch_size_per_gpu: int | None = s.train_micro_batch_size_per_gpu
        self.gradient_accumulation_steps: int | None = s.gradient_accumulation_steps
        self.managed_gradient_accumulation: bool = s.managed_gradient_accumulation
        self.sequence_parallel_size: int | None = s.sequence_parallel_size
        self.data_parallel_size: int | None = s.data_parallel_size
        self.dataloader_drop_last: bool = s.dataloader_drop_last

        self._bind_numbers(s)
        self._bind_training(s)
        self._bind_features(s)
        self.global_rank: int = _process_group("get_rank", 0)
        self.world_size: int = 1
        self._frozen: bool = True

    def _bind_numbers(self, s: ConfigSections) -> None:
        self.float16_config = s.fp16
        self.fp16_enabled: bool = s.fp16.enabled
        self.bfloat16_config = s.bf16
        self.torch_autocast = s.torch_autocast
        self.torch_autocast_enabled: bool = s.torch_autocast.enabled
        self.torch_autocast_lower_precision_safe_modules = s.torch_autocast.lower_precision_safe_modules
        self.data_types = s.data_types
        self.grad_accum_dtype: str | None = s.data_types.grad_accum_dtype
        self.param_dtype: str | None = s.data_types.param_dtype
        self.buffer_dtype: str | None = s.data_types.buffer_dtype
        self.keep_in_fp32_modules: str | list[str] = s.data_types.keep_in_fp32_modules
        self.amp_enabled: bool = bool(s.amp and s.amp.enabled)
        self.amp_params: dict[str, Any] | bool = s.amp.model_dump(exclude={"enabled"}) if s.amp else False

        self.gradient_clipping: float = s.gradient_clipping
        self.gradient_allreduce_op: str = s.gradient_allreduce_op
        self.prescale_gradients: bool = s.prescale_gradients
        self.gradient_predivide_factor: float = s.gradient_predivide_factor
        self.sparse_gradients_enabled: bool = s.sparse_gradients
        self.disable_allgather: bool = s.disable_allgather
        self.use_data_before_expert_parallel_: bool = s.use_data_before_expert_parallelism

    def _bind_training(self, s: ConfigSections) -> None:
        self.zero_config: DeepSpeedZeroConfig = s.zero_optimization
        self.zero_optimization_stage: int = int(s.zero_optimization.stage)
        self.zero_enabled: bool = self.zero_optimization_stage > 0
        self.mics_shard_size: int = s.zero_optimization.mics_shard_size
        self.mics_hierarchial_params_gather: bool = s.zero_optimization.mics_hierarchical_params_gather
        self.zero_allow_untested_optimizer: bool = s.zero_allow_untested_optimizer
        self.zero_force_ds_cpu_optimizer: bool = s.zero_force_ds_cpu_optimizer

        self.optimizer: OptimizerConfig | None = s.optimizer
        self.optimizer_name: str | None = s.optimizer.name if s.optimizer else None
        self.optimizer_params: dict[str, Any] | None = s.optimizer.params if s.optimizer else None
        self.optimizer_legacy_fusion: bool = s.optimizer.legacy_fusion if s.optimizer else False
        self.scheduler: SchedulerConfig | None = s.scheduler
        self.scheduler_name: str | None = s.scheduler.type if s.scheduler else None
        self.scheduler_params: dict[str, Any] | None = s.scheduler.params if s.scheduler else None

        self.steps_per_print: int | None = s.steps_per_print
        self.wall_clock_breakdown: bool = s.wall_clock_breakdown or s.flops_profiler.enabled
        self.memory_breakdown: bool = s.memory_breakdown
        self.dump_state: bool = s.dump_state
        self.log_level: str | None = s.log_level
        self.disable_python_gc: bool = s.disable_python_gc

    def _bind_features(self, s: ConfigSections) -> None:
        self.activation_checkpointing_config = s.activation_checkpointing
        self.aio_config: dict[str, Any] = s.aio.model_dump()
        self.compile_config = s.compile
        self.comms_config: DeepSpeedCommsConfig = _comms(s, self._param_dict)
        self.monitor_config = DeepSpeedMonitorConfig(**{name: getattr(s, name) for name in MONITOR_SECTIONS})
        self.flops_profiler_config = s.flops_profiler
        self.timers_config = s.timers.throughput
        self.hybrid_engine: HybridEngineConfig = s.hybrid_engine
        self.expert_parallel_config = s.expert_parallel
        self.weight_quantization_config = s.weight_quantization
        self.nebula_config = s.nebula
        self.datastates_config = DeepSpeedDataStatesConfig({"datastates_ckpt": s.datastates_ckpt})
        self.pipeline: dict[str, Any] = _with_extras(s.pipeline, self._param_dict.get("pipeline"))
        self.data_efficiency_enabled: bool = bool(s.data_efficiency and s.data_efficiency.enabled)
        self.curriculum_enabled_legacy: bool = bool(s.curriculum_learning and s.curriculum_learning.enabled)
        self.curriculum_params_legacy = s.curriculum_learning.model_dump() if s.curriculum_learning else False
        self.compression_config = s.compression_training
        self.elasticity_enabled: bool = bool(s.elasticity and s.elasticity.enabled)
        self.pld_enabled: bool = bool(s.progressive_layer_drop and s.progressive_layer_drop.enabled)
        self.pld_params = s.progressive_layer_drop.model_dump() if s.progressive_layer_drop else False
        self.eigenvalue_enabled: bool = bool(s.quantize_training and s.quantize_training.eigenvalue.enabled)
        self.sparse_attention = s.sparse_attention.model_dump() if s.sparse_attention else None
        self.graph_harvesting: bool = s.graph_harvesting

        self.checkpoint = s.checkpoint
        self.checkpoint_config: dict[str, Any] = {
            "tag_validation": s.checkpoint.tag_validation,
            "checkpoint_serialization": s.checkpoint.checkpoint_serialization,
            "writer": s.checkpoint.writer.model_dump() if s.checkpoint.writer else None,
        }
        self.checkpoint_tag_validation_enabled: bool = s.checkpoint.tag_validation != "IGNORE"
        self.checkpoint_tag_validation_fail: bool = s.checkpoint.tag_validation == "FAIL"
        self.checkpoint_parallel_write_pipeline: bool = s.checkpoint.parallel_write.pipeline_stage
        self.load_universal_checkpoint: bool = s.checkpoint.load_universal
        self.use_node_local_storage: bool = s.checkpoint.use_node_local_storage

    def _take_triple(self, triple: BatchTriple) -> None:
        self.batch_triple = triple
        self.train_batch_size = triple.train_batch_size
        self.train_micro_batch_size_per_gpu = triple.micro_batch_size
        self.gradient_accumulation_steps = triple.accumulation_steps
        object.__setattr__(self, "world_size", triple.dp_world_size)

    @cached_property
    def tensor_parallel_config(self) -> TPTrainingConfig:
        """`tensor_parallel`; its defaults when absent (they hold a torch dtype, so torch is imported here)."""
        from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

        return self.sections.tensor_parallel or TPTrainingConfig()

    @cached_property
    def autotuning_config(self) -> AutotuningConfig:
        """`autotuning`; its defaults when absent."""
        from deepspeed.autotuning.config import AutotuningConfig

        return self.sections.autotuning or AutotuningConfig()

    @property
    def data_efficiency_config(self) -> dict[str, Any]:
        """`data_efficiency` as a dictionary, defaults filled in."""
        from deepspeed.runtime.data_pipeline.config import DataEfficiencyConfig

        return (self.sections.data_efficiency or DataEfficiencyConfig()).model_dump()

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """Dtype of gradient reductions; None = dtype of the weights."""
        return torch_dtype(self.sections.communication_data_type)

    @property
    def seq_parallel_communication_data_type(self) -> torch.dtype | None:
        """Dtype of gradient reductions when ranks share sequences."""
        return torch_dtype(self.sections.seq_parallel_communication_data_type)

    @property
    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Dtype of torch.autocast; None = torch's own choice."""
        return torch_dtype(self.sections.torch_autocast.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        """Read-only once built, but for batch sizes and `zero_enabled`."""
        if getattr(self, "_frozen", False) and name not in _WRITABLE:
            raise AttributeError(
                f"DeepSpeedConfig.{name} is read-only: the engine was built from it. Change the config passed to"
                f" initialize(); writable are {', '.join(sorted(_WRITABLE - {'batch_triple'}))}."
            )
        object.__setattr__(self, name, value)

    # ---- text ----

    def notes(self) -> list[str]:
        """What the user should be told once, on rank 0, a line each."""
        lines = [*self.deprecations, *self.warnings]
        if self.unknown_keys:
            lines.append(f"config keys that nothing reads: {', '.join(self.unknown_keys)}")
        if self.comments:
            lines.append(f"config keys taken as comments: {', '.join(self.comments)}")
        if self.auto_keys:
            lines.append(f'config keys left "auto" take their defaults: {", ".join(self.auto_keys)}')
        return lines

    def print_user_config(self) -> None:
        """Log the config as the user wrote it."""
        _log("  json = " + json.dumps(_without_secrets(self._param_dict), sort_keys=True, indent=4, default=repr))

    def print(self, name: str) -> None:
        """Log all attributes under a title."""
        lines = [f"{name}:"]
        for key in sorted(vars(self)):
            if not key.startswith("_"):
                lines.append(f"  {key} {'.' * (29 - len(key))} {getattr(self, key)}")
        _log("\n".join(lines))
        self.print_user_config()


class DeepSpeedConfigWriter:
    """Collects settings and writes them as JSON."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data if data is not None else {}

    def add_config(self, key: str, value: Any) -> None:
        """Set a top-level key."""
        self.data[key] = value

    def load_config(self, filename: str | os.PathLike[str]) -> None:
        """Replace everything by the content of a file."""
        self.data = dict(load_source(filename).data)

    def write_config(self, filename: str | os.PathLike[str]) -> None:
        """Write to a file."""
        with open(filename, "w", encoding="utf-8") as out:
            json.dump(self.data, out)


# ---- where the numbers come from ----


def data_parallel_size(data: Mapping[str, Any], sections: ConfigSections | None, mpu: Any, mesh_device: Any) -> int:
    """Data-parallel ranks for the batch equation, from what the caller has."""
    world = _process_group("get_world_size", 1)
    if mpu is not None:
        if hasattr(mpu, "get_data_parallel_world_size"):
            return int(mpu.get_data_parallel_world_size())
        return world // int(mpu.get_sequence_parallel_world_size())
    if mesh_device is not None:
        return int(mesh_device["data_parallel"].size())
    sequence = sections.sequence_parallel_size if sections is not None else None
    return max(1, world // (sequence or 1))


def _process_group(ask: str, otherwise: int) -> int:
    """A number of the default process group; `otherwise` where there is none. Imports nothing."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return otherwise
    return int(getattr(distributed, ask)())


def _comms(sections: ConfigSections, data: Mapping[str, Any]) -> DeepSpeedCommsConfig:
    comms = DeepSpeedCommsConfig({})
    comms.comms_logger_enabled = "comms_logger" in data
    comms.comms_logger = sections.comms_logger
    return comms


def _with_extras(section: DeepSpeedConfigModel, raw: Any) -> dict[str, Any]:
    """A section as a dictionary, with the unknown keys the user put into it."""
    extras = {key: value for key, value in raw.items() if key not in type(section).model_fields} if raw else {}
    return {**section.model_dump(exclude_none=True), **extras}


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): "***" if key == SECRET else _without_secrets(item) for key, item in value.items()}
    return value


def _log(text: str) -> None:
    from deepspeed.utils.logging import logger

    logger.info(text)


def __getattr__(name: str) -> Any:
    """`DtypeEnum` (its members are torch dtypes, and a config is read without torch) and the one-key readers."""
    if name == "DtypeEnum":
        from deepspeed.runtime.config_dtype_enum import config_dtype_enum

        return config_dtype_enum()
    if name.startswith("get_"):
        from deepspeed.runtime import config_readers

        if hasattr(config_readers, name):
            return getattr(config_readers, name)
    return attribute_or_submodule(__name__, name)
