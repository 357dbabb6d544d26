"""Settings the user gave that change nothing where they stand.

Owns the table of ZeRO stages at which each field is read, and the few conditions outside ZeRO. Yields one line each;
none of them is an error, because generated configs carry settings for several stages. Invariant: a setting at its
default is never named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deepspeed.runtime.config_utils import DeepSpeedConfigModel

if TYPE_CHECKING:
    from deepspeed.runtime.config_report import Report
    from deepspeed.runtime.config_schema import ConfigSections

_STAGE_3_ONLY = (
    "offload_param",
    "sub_group_size",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zeropp_loco_param",
    "mics_shard_size",
    "mics_hierarchical_params_gather",
    "memory_efficient_linear",
    "pipeline_loading_checkpoint",
    "override_module_apply",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "save_muon_momentum_buffer_in_memory",
    "leaf_module",
)
_ZERO_STAGES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(_STAGE_3_ONLY, (3, 3)),
    "round_robin_gradients": (1, 2),
    "parameter_alignment": (1, 2),
    "ignore_unused_parameters": (1, 3),
    "allgather_bucket_size": (1, 2),
    "elastic_checkpoint": (1, 2),
    "offload_optimizer": (1, 3),
    "zenflow": (1, 3),
}
"""zero_optimization field -> first and last stage at which something reads it."""


_ONE_WAY = {
    "contiguous_gradients": "gradients always travel in contiguous buckets",
    "reduce_scatter": "sharded gradients always go to their owner alone",
    "use_multi_rank_bucket_allreduce": "a bucket always serves all owners at once",
    "allgather_partitions": "updated weights are always all-gathered",
}
"""zero_optimization flag that chooses among ways of the reference -> why false changes nothing here."""

_ONE_WAY_AT_STAGE_3 = {
    "sub_group_size": "the step goes through the pieces of blocks, whatever their number",
    "use_all_reduce_for_fetch_params": "parameters are always all-gathered",
    "allgather_sequential": "the parameters of a block are always gathered together",
    "memory_efficient_linear": "no layer keeps gathered weights for backward",
    "pipeline_loading_checkpoint": "each rank reads its own elements only",
    "log_trace_cache_warnings": "another order of modules costs a prefetch and no more",
    "override_module_apply": "functions given to Module.apply always see whole parameters",
    "enable_sanity_checks": "collectives are always compared between ranks",
}
"""The same of stage 3 -> why another value than the default changes nothing here."""


def without_effect(s: ConfigSections, report: Report) -> Iterator[str]:
    """One line per setting the user gave that changes nothing, with what it would need."""
    yield from _without_switch(s, "", report)
    yield from _without_degree(s)
    zero = s.zero_optimization
    offloads = not _is_off(zero, "offload_optimizer", zero.offload_optimizer)
    for name, (first, last) in _ZERO_STAGES.items():
        value = getattr(zero, name)
        if name not in zero.model_fields_set or first <= zero.stage <= last or _is_off(zero, name, value):
            continue
        if name == "sub_group_size" and zero.stage and offloads:
            continue  # what is updated at a time
        needs = f"stage {first}" if first == last else f"stage {first} to {last}"
        yield (
            f"{report.written('zero_optimization.' + name)} has no effect: it needs zero_optimization.{needs}, "
            f"the stage in force is {int(zero.stage)}"
        )
    for name, why in _ONE_WAY.items():
        if zero.stage and not getattr(zero, name):
            yield f"zero_optimization.{name} has no effect: {why}"
    for name, why in _ONE_WAY_AT_STAGE_3.items():
        if name == "sub_group_size" and offloads:
            continue  # what is updated at a time
        if zero.stage == 3 and not _is_off(zero, name, getattr(zero, name)):
            yield f"{report.written('zero_optimization.' + name)} has no effect: {why}"
    if offloads or not _is_off(zero, "offload_param", zero.offload_param):
        yield from _offload_without_effect(zero)
    if zero.stage == 3 and zero.zeropp_loco_param and not zero.zero_quantized_gradients:
        yield (
            "zero_optimization.zeropp_loco_param has no effect: it needs "
            "zero_optimization.zero_quantized_gradients true"
        )
    if zero.stage == 3 and zero.mics_hierarchical_params_gather and zero.mics_shard_size <= 0:
        yield (
            "zero_optimization.mics_hierarchical_params_gather has no effect: it needs "
            "zero_optimization.mics_shard_size"
        )
    if s.gradient_predivide_factor != 1.0 and not s.prescale_gradients:
        yield "gradient_predivide_factor has no effect: it needs prescale_gradients true"
    if s.disable_allgather:
        yield "disable_allgather has no effect: it is kept for old configs"
    for section, flag in (
        ("fp16", "fp16_master_weights_and_grads"),
        ("bf16", "bf16_master_weights_and_grads"),
        ("bf16", "bf16_optimizer_states"),
    ):
        block = getattr(s, section)
        if getattr(block, flag) and not block.enabled and "enabled" in block.model_fields_set:
            yield f"{section}.{flag} has no effect: it needs {section}.enabled true"
    if s.bf16.enabled and s.bf16.immediate_grad_update:
        yield "bf16.immediate_grad_update has no effect: gradients are always taken up as backward produces them"
    if s.optimizer is not None and s.optimizer.legacy_fusion:
        yield "optimizer.legacy_fusion has no effect: there is one optimizer path for fp16"
    if s.use_data_before_expert_parallelism:
        yield "use_data_before_expert_parallelism has no effect: it needs expert parallelism"
    if s.checkpoint.parallel_write.pipeline_stage:
        yield "checkpoint.parallel_write.pipeline_stage has no effect: it needs a PipelineModule"
    if "pipeline" in s.model_fields_set:
        yield "pipeline has no effect: it needs a PipelineModule"
    acts = s.activation_checkpointing
    if acts.contiguous_memory_optimization and not (acts.partition_activations and acts.number_checkpoints):
        yield (
            "activation_checkpointing.contiguous_memory_optimization has no effect: it needs "
            "activation_checkpointing.partition_activations true and activation_checkpointing.number_checkpoints"
        )
    blocks = (zero.offload_optimizer, zero.offload_param)
    if "aio" in s.model_fields_set and not any(block and block.device == "nvme" for block in blocks):
        yield "aio has no effect: no offload section of zero_optimization uses device nvme"
    if s.vocabulary_size is not None and s.vocabulary_size % 8:
        yield f"vocabulary_size: {s.vocabulary_size} is no multiple of 8, which tensor cores prefer"
    if zero.elastic_checkpoint and zero.stage in (1, 2):
        yield "zero_optimization.elastic_checkpoint has no effect: checkpoints record their layout instead"


def _without_switch(section: DeepSpeedConfigModel, path: str, report: Report) -> Iterator[str]:
    """Sections with settings whose switch ``enabled`` was not mentioned. Who writes it false wants them off."""
    for name in sorted(section.model_fields_set):
        block = getattr(section, name)
        here = f"{path}.{name}" if path else name
        if not isinstance(block, DeepSpeedConfigModel):
            continue
        if getattr(block, "enabled", True) or "enabled" in block.model_fields_set:
            yield from _without_switch(block, here, report)
        elif any(_differs(block, key) for key in block.model_fields_set):
            written = report.written(here)
            yield f"{written} has no effect: it needs {written}.enabled true"


def _differs(section: DeepSpeedConfigModel, key: str) -> bool:
    field = type(section).model_fields.get(key)
    value = getattr(section, key)
    if isinstance(value, DeepSpeedConfigModel):
        return any(_differs(value, inner) for inner in value.model_fields_set)
    return field is None or bool(value != field.get_default(call_default_factory=True))


def _without_degree(s: ConfigSections) -> Iterator[str]:
    """Settings of features that are switched on by another key than ``enabled``."""
    for name, switch in (("compile", "deepcompile"), ("tensor_parallel", "autotp_size")):
        block = getattr(s, name)
        if block is None or getattr(block, switch):
            continue
        for key in sorted(block.model_fields_set - {switch}):
            if _differs(block, key):
                yield f"{name}.{key} has no effect: it needs {name}.{switch}"


_FILES = "it needs device nvme"
_THREADS = "the worker uses as many threads as torch does"
_MAPPED = "shards at device nvme are mapped files, of which the system keeps in memory what is free"
_OFFLOAD_KEYS: dict[tuple[str, str], dict[str, str]] = {
    ("offload_optimizer", "cpu"): dict.fromkeys(
        ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"), _FILES
    )
    | {"cpuadam_cores_perc": _THREADS},
    ("offload_optimizer", "nvme"): {
        "fast_init": "room in files is reserved, and nothing is written to make them",
        "super_offload": "it needs device cpu",
        "cpuadam_cores_perc": "it needs device cpu",
    },
    ("offload_param", "cpu"): dict.fromkeys(("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"), _FILES),
    ("offload_param", "nvme"): dict.fromkeys(("buffer_count", "buffer_size", "max_in_cpu", "pin_memory"), _MAPPED),
}
"""(section, device) -> key that changes nothing there -> why."""


def _offload_without_effect(zero: Any) -> Iterator[str]:
    for (name, device), keys in _OFFLOAD_KEYS.items():
        section = getattr(zero, name)
        if section is None or section.device != device:
            continue
        for key, why in keys.items():
            if key in section.model_fields_set and getattr(section, key) != type(section).model_fields[key].default:
                yield f"zero_optimization.{name}.{key} has no effect: {why}"


def _is_off(zero: Any, name: str, value: Any) -> bool:
    """Whether the value given is the one that asks for nothing."""
    if name in ("offload_optimizer", "offload_param"):
        return value is None or value.device == "none"
    if value is None:
        return True
    return bool(value == type(zero).model_fields[name].get_default(call_default_factory=True))
