"""The historical getters of the engine, one explicit line each: clients call them, our own code reads the config.

Everything here answers from the resolved config or from a collaborator of the engine; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum

if TYPE_CHECKING:
    from deepspeed.comm.mesh import ParallelMesh
    from deepspeed.runtime.accumulation import GradAccumulation
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.precision import PrecisionPolicy


# fmt: off
class BatchAccessors:
    """Batch triple: read, and change within the rule train = micro x accumulation x data-parallel ranks."""

    _config: DeepSpeedConfig
    accumulation: GradAccumulation
    mesh: ParallelMesh

    def train_batch_size(self) -> int: return self._config.train_batch_size or 0
    def train_micro_batch_size_per_gpu(self) -> int: return self._config.train_micro_batch_size_per_gpu or 0
    def gradient_accumulation_steps(self) -> int: return self.accumulation.steps
    def get_batch_info(self) -> tuple[Callable[[], int], Callable[[], int], Callable[[], int]]:
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the accumulation steps. ValueError when it does not divide."""
        per_step = self.train_micro_batch_size_per_gpu() * self.mesh.size("dp")
        if train_batch_size <= 0 or train_batch_size % per_step:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): must be a positive multiple of {per_step} = "
                f"{self.train_micro_batch_size_per_gpu()} micro batch x {self.mesh.size('dp')} data-parallel ranks"
            )
        self._config.train_batch_size = train_batch_size
        self._config.gradient_accumulation_steps = train_batch_size // per_step
        self.accumulation.change_steps(train_batch_size // per_step)
        self._follow_accumulation()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro batch; the global batch follows."""
        if micro_batch_size <= 0:
            raise ValueError(f"set_train_micro_batch_size({micro_batch_size}): must be positive")
        self._config.train_micro_batch_size_per_gpu = micro_batch_size
        self._config.train_batch_size = micro_batch_size * self.accumulation.steps * self.mesh.size("dp")

    def _follow_accumulation(self) -> None: ...


class ZeroAccessors:
    """``zero_optimization`` settings."""

    _config: DeepSpeedConfig

    @property
    def _zero(self) -> DeepSpeedZeroConfig: return self._config.zero_config

    def zero_optimization(self) -> bool: return self._config.zero_enabled
    def zero_optimization_stage(self) -> int: return self._config.zero_optimization_stage
    def zero_optimization_partition_gradients(self) -> bool:
        return self.zero_optimization_stage() >= ZeroStageEnum.gradients
    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() >= ZeroStageEnum.weights
    def zero_allow_untested_optimizer(self) -> bool: return self._config.zero_allow_untested_optimizer
    def zero_force_ds_cpu_optimizer(self) -> bool: return self._config.zero_force_ds_cpu_optimizer
    def zero_reduce_scatter(self) -> bool: return self._zero.reduce_scatter
    def zero_overlap_comm(self) -> bool: return bool(self._zero.overlap_comm)
    def zero_offload_optimizer(self) -> Any: return self._zero.offload_optimizer
    def zero_offload_param(self) -> Any: return self._zero.offload_param
    def zero_use_cpu_optimizer(self) -> bool: return _device(self.zero_offload_optimizer()) in ("cpu", "nvme")
    def zero_cpu_offload(self) -> bool: return _device(self.zero_offload_optimizer()) == "cpu"
    def zero_nvme_offload_optimizer(self) -> bool: return _device(self.zero_offload_optimizer()) == "nvme"
    def zero_partial_offload(self) -> float: return getattr(self.zero_offload_optimizer(), "ratio", 1.0)
    def super_offload(self) -> bool: return bool(getattr(self.zero_offload_optimizer(), "super_offload", False))
    def cpuadam_cores_perc(self) -> float: return getattr(self.zero_offload_optimizer(), "cpuadam_cores_perc", 0.9)
    def zenflow_config(self) -> Any: return self._zero.zenflow
    def zero_sub_group_size(self) -> int: return self._zero.sub_group_size
    def zero_reduce_bucket_size(self) -> int: return self._zero.reduce_bucket_size
    def zero_multi_rank_bucket_allreduce(self) -> bool: return self._zero.use_multi_rank_bucket_allreduce
    def zero_allgather_bucket_size(self) -> int: return self._zero.allgather_bucket_size
    def zero_allgather_partitions(self) -> bool: return self._zero.allgather_partitions
    def zero_allgather_sequential(self) -> bool: return self._zero.allgather_sequential
    def zero_contiguous_gradients(self) -> bool: return self._zero.contiguous_gradients
    def zero_compute_grad_norm(self) -> bool: return self._zero.compute_grad_norm
    def zero_load_from_fp32_weights(self) -> bool: return self._zero.load_from_fp32_weights
    def zero_elastic_checkpoint(self) -> bool: return self._zero.elastic_checkpoint
    def zero_max_live_parameters(self) -> int: return self._zero.max_live_parameters
    def zero_max_reuse_distance(self) -> int: return self._zero.max_reuse_distance
    def zero_prefetch_bucket_size(self) -> int: return self._zero.prefetch_bucket_size
    def zero_module_granularity_threshold(self) -> int: return self._zero.module_granularity_threshold
    def zero_param_persistence_threshold(self) -> int: return self._zero.param_persistence_threshold
    def zero_model_persistence_threshold(self) -> int: return self._zero.model_persistence_threshold
    def zero_gather_16bit_weights_on_model_save(self) -> bool: return self._zero.gather_16bit_weights_on_model_save
    def zero_hpz_partition_size(self) -> int: return self._zero.zero_hpz_partition_size
    def zero_quantized_weights(self) -> bool: return self._zero.zero_quantized_weights
    def zero_quantized_nontrainable_weights(self) -> bool: return self._zero.zero_quantized_nontrainable_weights
    def zero_quantized_gradients(self) -> bool: return self._zero.zero_quantized_gradients
    def zero_ignore_unused_parameters(self) -> bool: return self._zero.ignore_unused_parameters
    def zero_legacy_stage1(self) -> bool: return self._zero.legacy_stage1
    def zero_round_robin_gradients(self) -> bool: return self._zero.round_robin_gradients
    def zero_parameter_alignment(self) -> bool: return self._zero.parameter_alignment
    def zero_log_trace_cache_warnings(self) -> bool: return self._zero.log_trace_cache_warnings
    def zero_save_muon_momentum_buffer_in_memory(self) -> bool: return self._zero.save_muon_momentum_buffer_in_memory
    def is_sanity_checks_enabled(self) -> bool: return self._zero.enable_sanity_checks


class TrainingAccessors:
    """Optimizer, schedule, precision and scaling settings."""

    _config: DeepSpeedConfig
    zero_optimizer: Any
    lr_scheduler: Any
    precision: PrecisionPolicy

    def optimizer_name(self) -> str | None: return self._config.optimizer_name or _class_name(self.zero_optimizer)
    def optimizer_params(self) -> dict[str, Any] | None: return self._config.optimizer_params
    def optimizer_legacy_fusion(self) -> bool: return self._config.optimizer_legacy_fusion
    def scheduler_name(self) -> str | None: return self._config.scheduler_name
    def scheduler_params(self) -> dict[str, Any] | None: return self._config.scheduler_params
    def fp16_enabled(self) -> bool: return self._config.float16_config.enabled
    def bfloat16_enabled(self) -> bool: return self._config.bfloat16_config.enabled
    def fp16_auto_cast(self) -> bool: return self._config.float16_config.auto_cast
    def fp16_master_weights_and_gradients(self) -> bool:
        return self._config.float16_config.fp16_master_weights_and_grads
    def bf16_master_weights_and_gradients(self) -> bool:
        return self._config.bfloat16_config.bf16_master_weights_and_grads
    def bf16_optimizer_states(self) -> bool: return self._config.bfloat16_config.bf16_optimizer_states
    def torch_autocast_enabled(self) -> bool: return self._config.torch_autocast_enabled
    def torch_autocast_dtype(self) -> torch.dtype | None: return self.precision.autocast
    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        return list(self.precision.autocast_comm_modules)
    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        return self.precision.model, self.precision.accum or self.precision.model
    def dynamic_loss_scale(self) -> bool: return self.fp16_enabled() and self._config.float16_config.loss_scale == 0
    def initial_dynamic_scale(self) -> float: return 2.0 ** self._config.float16_config.initial_scale_power
    def dynamic_loss_scale_args(self) -> dict[str, Any]: return self._config.float16_config.dynamic_loss_scale_args()
    def loss_scale(self) -> float: return getattr(self.zero_optimizer, "loss_scale", 1.0)
    def gradient_clipping(self) -> float: return self._config.gradient_clipping
    def gradient_predivide_factor(self) -> float: return self._config.gradient_predivide_factor
    def postscale_gradients(self) -> bool: return not self._config.prescale_gradients
    def managed_gradient_accumulation(self) -> bool: return self._config.managed_gradient_accumulation
    @property
    def communication_data_type(self) -> torch.dtype: return self.precision.comm or self.precision.model
    def get_global_grad_norm(self) -> float | None: return getattr(self.zero_optimizer, "norm", None)
    @property
    def _groups(self) -> list[dict[str, Any]]: return getattr(self.zero_optimizer, "param_groups", [])
    def get_lr(self) -> list[float]: return [group["lr"] for group in self._groups]
    def get_type(self) -> list[Any]: return [group.get("type") for group in self._groups]
    def get_mom(self) -> list[Any]: return [group.get("betas", group.get("momentum")) for group in self._groups]


class RunAccessors:
    """Data, reporting, checkpoint and feature settings, ranks and groups."""

    _config: DeepSpeedConfig
    mesh: ParallelMesh

    @property
    def config(self) -> Any: return self._config._param_dict
    @property
    def world_size(self) -> int: return self.mesh.world_size
    @property
    def global_rank(self) -> int: return self.mesh.global_rank
    @property
    def dp_world_size(self) -> int: return self.mesh.size("dp")
    @property
    def mp_world_size(self) -> int: return self.mesh.size("mp")
    @property
    def data_parallel_group(self) -> Any: return self.mesh.group("dp")
    def get_data_parallel_rank(self) -> int: return self.mesh.rank("dp")
    def get_model_parallel_rank(self) -> int: return self.mesh.rank("mp")
    def get_tensor_parallel_rank(self) -> int: return self.mesh.rank("tp")
    def get_sequence_parallel_group(self) -> Any: return self.mesh.group("sp") if self.mesh.size("sp") > 1 else None
    def dataloader_drop_last(self) -> bool: return self._config.dataloader_drop_last
    def steps_per_print(self) -> int | None: return self._config.steps_per_print
    def wall_clock_breakdown(self) -> bool: return self._config.wall_clock_breakdown
    def memory_breakdown(self) -> bool: return self._config.memory_breakdown
    def dump_state(self) -> bool: return self._config.dump_state
    def log_level(self) -> str | None: return self._config.log_level
    def load_universal_checkpoint(self) -> bool: return self._config.load_universal_checkpoint
    def use_node_local_storage(self) -> bool: return self._config.use_node_local_storage
    def checkpoint_serialization_enabled(self) -> bool: return self._config.checkpoint.checkpoint_serialization
    def checkpoint_writer_enabled(self) -> bool: return self._config.checkpoint.writer is not None
    def checkpoint_tag_validation_enabled(self) -> bool: return self._config.checkpoint_tag_validation_enabled
    def checkpoint_tag_validation_fail(self) -> bool: return self._config.checkpoint_tag_validation_fail
    def aio_config(self) -> dict[str, Any]: return self._config.aio_config
    def tensor_parallel_config(self) -> Any: return self._config.tensor_parallel_config
    def autotp_size(self) -> int: return self._config.tensor_parallel_config.autotp_size
    def flops_profiler_enabled(self) -> bool: return self._config.flops_profiler_config.enabled
    def flops_profiler_profile_step(self) -> int: return self._config.flops_profiler_config.profile_step
    def flops_profiler_module_depth(self) -> int: return self._config.flops_profiler_config.module_depth
    def flops_profiler_top_modules(self) -> int: return self._config.flops_profiler_config.top_modules
    def flops_profiler_detailed(self) -> bool: return self._config.flops_profiler_config.detailed
    def flops_profiler_output_file(self) -> str | None: return self._config.flops_profiler_config.output_file
    def flops_profiler_recompute_fwd_factor(self) -> float:
        return self._config.flops_profiler_config.recompute_fwd_factor
    def autotuning_enabled(self) -> bool: return self._config.autotuning_config.enabled
    def data_efficiency_enabled(self) -> bool: return self._config.data_efficiency_enabled
    def data_efficiency_config(self) -> dict[str, Any]: return self._config.data_efficiency_config
    def random_ltd_enabled(self) -> bool: return False
    def curriculum_enabled_legacy(self) -> bool: return self._config.curriculum_enabled_legacy
    def is_deepcompile_enabled(self) -> bool: return self._config.compile_config.deepcompile
    def is_deepcompile_active(self) -> bool: return False
    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool: return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")
    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool: return isinstance(obj, torch.utils.data.IterableDataset)
# fmt: on


class EngineAccessors(BatchAccessors, ZeroAccessors, TrainingAccessors, RunAccessors):
    """All getters. Mixed into ``DeepSpeedEngine``."""


def _device(section: Any) -> str:
    return str(getattr(getattr(section, "device", "none"), "value", getattr(section, "device", "none")))


def _class_name(wrapped: Any) -> str | None:
    basic = getattr(wrapped, "optimizer", None)
    return type(basic).__name__.lower() if basic is not None else None
