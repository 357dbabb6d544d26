# ruff: noqa: F401  (the imports for type checkers are the exports)
"""Helpers for clients, imported on first use.

The names below live in the modules of this package, and a few in higher layers; nothing is imported until a name is
asked for, so low layers may import ``deepspeed.utils.logging`` without dragging in the engine.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from deepspeed.unbuilt import refusal

if TYPE_CHECKING:
    from deepspeed.accelerator.real_accelerator import get_accelerator
    from deepspeed.comm import is_initialized
    from deepspeed.runtime.dataloader import RepeatingLoader
    from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size, bwc_tensor_model_parallel_world_size
    from deepspeed.utils.exceptions import DeprecatedException
    from deepspeed.utils.groups import (
        get_data_parallel_group,
        get_data_parallel_rank,
        get_data_parallel_world_size,
        get_model_parallel_group,
        get_model_parallel_rank,
        get_model_parallel_world_size,
        get_tensor_model_parallel_group,
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_src_rank,
        get_tensor_model_parallel_world_size,
        initialize,
        set_tensor_model_parallel_rank,
        set_tensor_model_parallel_world_size,
    )
    from deepspeed.utils.init_on_device import OnDevice
    from deepspeed.utils.logging import log_dist, log_dist_once, logger, set_log_level_from_string
    from deepspeed.utils.module_utils import recursive_getattr, recursive_setattr
    from deepspeed.utils.numa import get_numactl_cmd
    from deepspeed.utils.nvtx import instrument_w_nvtx
    from deepspeed.utils.tensor_fragment import (
        fragment_address,
        get_full_hp_grad,
        get_full_hp_param,
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_grad,
        safe_set_local_optimizer_state,
        safe_update_full_grad_vectorized,
        set_full_hp_grad,
        set_full_hp_param,
    )
    from deepspeed.utils.z3_leaf_module import (
        get_z3_leaf_modules,
        set_z3_leaf_module,
        set_z3_leaf_modules,
        set_z3_leaf_modules_by_name,
        set_z3_leaf_modules_by_suffix,
        unset_z3_leaf_modules,
        z3_leaf_module,
        z3_leaf_parameter,
    )

_EXPORTS: dict[str, str] = {
    name: module
    for module, names in {
        "deepspeed.accelerator.real_accelerator": "get_accelerator",
        "deepspeed.comm": "is_initialized",
        "deepspeed.runtime.dataloader": "RepeatingLoader",
        "deepspeed.utils.bwc": "bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_world_size",
        "deepspeed.utils.exceptions": "DeprecatedException",
        "deepspeed.utils.groups": """
            get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size
            get_model_parallel_group get_model_parallel_rank get_model_parallel_world_size
            get_tensor_model_parallel_group get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank
            get_tensor_model_parallel_world_size set_tensor_model_parallel_rank set_tensor_model_parallel_world_size
            initialize""",
        "deepspeed.utils.init_on_device": "OnDevice",
        "deepspeed.utils.logging": "log_dist log_dist_once logger set_log_level_from_string",
        "deepspeed.utils.module_utils": "recursive_getattr recursive_setattr",
        "deepspeed.utils.numa": "get_numactl_cmd",
        "deepspeed.utils.nvtx": "instrument_w_nvtx",
        "deepspeed.utils.tensor_fragment": """
            fragment_address get_full_hp_grad get_full_hp_param
            safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state
            safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state
            safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
            safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state
            safe_update_full_grad_vectorized set_full_hp_grad set_full_hp_param""",
        "deepspeed.utils.z3_leaf_module": """
            get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name
            set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter""",
    }.items()
    for name in names.split()
}

# Settings of `groups` that clients read as `deepspeed.utils.mpu`: looked up each time, never kept here.
_LIVE = frozenset(("expert_tensor_parallel_world_size", "mesh_device", "mpu"))

_SUBMODULES = frozenset(
    (
        "bwc",
        "exceptions",
        "groups",
        "host_memory",
        "init_on_device",
        "logging",
        "module_utils",
        "numa",
        "nvtx",
        "pin_memory",
        "pin_memory_tracker",
        "tensor_fragment",
        "timer",
        "torch",
        "types",
    )
)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    if name in _LIVE:
        return getattr(importlib.import_module("deepspeed.utils.groups"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(refusal(f"{__name__}.{name}") or f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_LIVE, *_SUBMODULES})


class _Package(ModuleType):
    """Keeps an exported name that is also the name of a submodule (`z3_leaf_module`).

    The import system binds each loaded submodule as an attribute of its package; for such a name clients expect the
    export, before and after the submodule has been loaded.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in _EXPORTS:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
