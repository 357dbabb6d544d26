"""One reader per classic key: takes a config dictionary, returns the value or the default.

Kept for code that imports them from `deepspeed.runtime.config`; our own code reads the sections. Each reader validates
the one key it reads and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.runtime.config_schema import ConfigSections

Reader = Callable[[Mapping[str, Any]], Any]


def _sections(**present: Any) -> ConfigSections:
    return ConfigSections(**{"strict": True, **present})


def _key(key: str) -> Reader:
    """Reader of a top-level setting."""

    def read(param_dict: Mapping[str, Any]) -> Any:
        present = {key: param_dict[key]} if key in param_dict else {}
        return getattr(_sections(**present), key)

    read.__doc__ = f"`{key}` of a config dictionary, or its default."
    return read


def _inner(section: str, key: str) -> Reader:
    """Reader of a setting inside a section that may be absent."""

    def read(param_dict: Mapping[str, Any]) -> Any:
        present = {section: param_dict[section]} if param_dict.get(section) is not None else {}
        found = getattr(_sections(**present), section)
        return getattr(found, key) if found is not None else None

    read.__doc__ = f"`{section}.{key}` of a config dictionary, or its default."
    return read


get_train_batch_size = _key("train_batch_size")
get_train_micro_batch_size_per_gpu = _key("train_micro_batch_size_per_gpu")
get_gradient_accumulation_steps = _key("gradient_accumulation_steps")
get_managed_gradient_accumulation = _key("managed_gradient_accumulation")
get_dataloader_drop_last = _key("dataloader_drop_last")
get_gradient_allreduce_op = _key("gradient_allreduce_op")
get_gradient_clipping = _key("gradient_clipping")
get_gradient_predivide_factor = _key("gradient_predivide_factor")
get_prescale_gradients = _key("prescale_gradients")
get_sparse_gradients_enabled = _key("sparse_gradients")
get_disable_allgather = _key("disable_allgather")
get_expert_data_topo_config = _key("use_data_before_expert_parallelism")
get_steps_per_print = _key("steps_per_print")
get_wall_clock_breakdown = _key("wall_clock_breakdown")
get_memory_breakdown = _key("memory_breakdown")
get_dump_state = _key("dump_state")
get_log_level = _key("log_level")
get_disable_python_gc = _key("disable_python_gc")
get_zero_allow_untested_optimizer = _key("zero_allow_untested_optimizer")
get_zero_force_ds_cpu_optimizer = _key("zero_force_ds_cpu_optimizer")
get_graph_harvesting = _key("graph_harvesting")
get_hybrid_engine_config = _key("hybrid_engine")
get_expert_parallel_config = _key("expert_parallel")
get_optimizer_name = _inner("optimizer", "name")
get_optimizer_params = _inner("optimizer", "params")
get_optimizer_legacy_fusion = _inner("optimizer", "legacy_fusion")
get_scheduler_name = _inner("scheduler", "type")
get_scheduler_params = _inner("scheduler", "params")
get_torch_autocast_enabled = _inner("torch_autocast", "enabled")
get_lower_precision_safe_modules = _inner("torch_autocast", "lower_precision_safe_modules")


def get_optimizer_gradient_clipping(param_dict: Mapping[str, Any]) -> Any:
    """`optimizer.params.max_grad_norm` of a config dictionary, None when absent."""
    return (get_optimizer_params(param_dict) or {}).get("max_grad_norm")


def get_pipeline_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """`pipeline` of a config dictionary with defaults filled in; unknown keys are kept."""
    section = param_dict.get("pipeline") or {}
    known = {key: value for key, value in section.items() if key in _pipeline_keys()}
    defaults = _sections(pipeline=known).pipeline.model_dump(exclude_none=True)
    return {**section, **defaults}


def _pipeline_keys() -> Mapping[str, Any]:
    return type(ConfigSections().pipeline).model_fields


def get_data_types_params(param_dict: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """`data_types`: grad_accum_dtype, param_dtype, buffer_dtype, keep_in_fp32_modules."""
    section = _sections(data_types=param_dict.get("data_types") or {}).data_types
    return section.grad_accum_dtype, section.param_dtype, section.buffer_dtype, section.keep_in_fp32_modules


def get_checkpoint_params(param_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `checkpoint` section of a config dictionary as written."""
    return param_dict.get("checkpoint") or {}


def get_checkpoint_tag_validation_mode(checkpoint_params: Mapping[str, Any]) -> str:
    """`tag_validation` of a checkpoint section: IGNORE, WARN or FAIL."""
    return _sections(checkpoint=checkpoint_params).checkpoint.tag_validation


def get_checkpoint_parallel_write_pipeline(checkpoint_params: Mapping[str, Any]) -> bool:
    """`parallel_write.pipeline_stage` of a checkpoint section."""
    return _sections(checkpoint=checkpoint_params).checkpoint.parallel_write.pipeline_stage


def get_communication_data_type(
    param_dict: Mapping[str, Any],
    comm_type: str = "communication_data_type",
    comm_data_type_default: str | None = None,
) -> Any:
    """The torch dtype named by `comm_type` in a config dictionary, or by the default."""
    from deepspeed.runtime.config_types import torch_dtype

    value = param_dict.get(comm_type)
    name = _key(comm_type)({comm_type: value}) if value is not None else comm_data_type_default
    return torch_dtype(name)


def get_torch_autocast_dtype(param_dict: Mapping[str, Any]) -> Any:
    """The torch dtype of `torch_autocast.dtype`, None when absent."""
    from deepspeed.runtime.config_types import torch_dtype

    return torch_dtype(_inner("torch_autocast", "dtype")(param_dict))
