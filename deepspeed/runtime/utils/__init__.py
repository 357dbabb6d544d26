# ruff: noqa: F401  (the imports for type checkers are the exports)
"""Helpers shared by the engine, the ZeRO core and clients, each imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.runtime.utils.backward_hooks import (
        OutputBackwardHookManager,
        check_internal_apis_for_count_used_parameters,
        count_used_parameters_in_backward,
        maybe_loss_for_backward,
        register_output_backward_hooks,
    )
    from deepspeed.runtime.utils.balance import partition_balanced, partition_uniform, prefix_sum_inc
    from deepspeed.runtime.utils.memory import (
        empty_cache,
        get_ma_status,
        get_tensor_bytes,
        memory_status,
        see_memory_usage,
        torch_max_memory_reserved,
        torch_memory_reserved,
    )
    from deepspeed.runtime.utils.nested import compare_tensors_in_structures, copy_to_device, move_to_device
    from deepspeed.runtime.utils.norms import (
        clip_grad_norm_,
        clip_tensors_by_global_norm,
        combine_grad_norm_groups,
        get_flattened_grad_norm,
        get_global_norm,
        get_global_norm_of_tensors,
        get_grad_zeros,
        get_norm_with_moe_layers,
        get_norm_with_moe_layers_fast,
        get_weight_norm,
        has_inf_or_nan,
        is_invalid_grad_norm,
        is_model_parallel_parameter,
        mask_nan_or_inf_with_val_inplace,
    )
    from deepspeed.runtime.utils.optimizer_states import DummyOptim, offload_adam_states, reload_adam_states
    from deepspeed.runtime.utils.overflow import CheckOverflow
    from deepspeed.runtime.utils.partitioned_tensor import PartitionedTensor
    from deepspeed.runtime.utils.small import (
        align_dense_tensors,
        call_to_str,
        ensure_directory_exists,
        filter_empty_parameters,
        get_checkpoint_folder_size,
        get_inactive_params,
        get_only_unique_item,
        is_transformers_cache,
        noop_context,
        noop_decorator,
        set_random_seed,
    )

_EXPORTS: dict[str, str] = {
    name: module
    for module, names in {
        "backward_hooks": """
            OutputBackwardHookManager check_internal_apis_for_count_used_parameters count_used_parameters_in_backward
            maybe_loss_for_backward register_output_backward_hooks""",
        "balance": "partition_balanced partition_uniform prefix_sum_inc",
        "memory": """
            empty_cache get_ma_status get_tensor_bytes memory_status see_memory_usage torch_max_memory_reserved
            torch_memory_reserved""",
        "nested": "compare_tensors_in_structures copy_to_device move_to_device",
        "norms": """
            clip_grad_norm_ clip_tensors_by_global_norm combine_grad_norm_groups get_flattened_grad_norm get_global_norm
            get_global_norm_of_tensors get_grad_zeros get_norm_with_moe_layers get_norm_with_moe_layers_fast
            get_weight_norm has_inf_or_nan is_invalid_grad_norm is_model_parallel_parameter
            mask_nan_or_inf_with_val_inplace""",
        "optimizer_states": "DummyOptim offload_adam_states reload_adam_states",
        "overflow": "CheckOverflow",
        "partitioned_tensor": "PartitionedTensor",
        "small": """
            align_dense_tensors call_to_str ensure_directory_exists filter_empty_parameters get_checkpoint_folder_size
            get_inactive_params get_only_unique_item is_transformers_cache noop_context noop_decorator
            set_random_seed""",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
