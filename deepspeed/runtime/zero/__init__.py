# ruff: noqa: F401  (the imports for type checkers are the exports)
"""The ZeRO core. Names are exported lazily; read ``optimizer.py`` first, it wires the parts together."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deepspeed.unbuilt import attribute_or_submodule

if TYPE_CHECKING:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
    from deepspeed.runtime.zero.memory_estimators import (
        estimate_zero2_model_states_mem_needs,
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live,
    )
    from deepspeed.runtime.zero.mics import MiCS_Init
    from deepspeed.runtime.zero.partition_parameters import (
        GatheredParameters,
        Init,
        ZeroParamStatus,
        ZeroParamType,
        register_external_parameter,
        unregister_external_parameter,
    )
    from deepspeed.runtime.zero.stage3_estimators import (
        estimate_zero3_model_states_mem_needs,
        estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live,
    )
    from deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias

_NAMES = {
    "DeepSpeedZeroConfig": "deepspeed.runtime.zero.config",
    "ZeroStageEnum": "deepspeed.runtime.zero.config",
    "GatheredParameters": "deepspeed.runtime.zero.partition_parameters",
    "Init": "deepspeed.runtime.zero.partition_parameters",
    "MiCS_Init": "deepspeed.runtime.zero.mics",
    "ZeroParamStatus": "deepspeed.runtime.zero.partition_parameters",
    "ZeroParamType": "deepspeed.runtime.zero.partition_parameters",
    "register_external_parameter": "deepspeed.runtime.zero.partition_parameters",
    "unregister_external_parameter": "deepspeed.runtime.zero.partition_parameters",
    "TiledLinear": "deepspeed.runtime.zero.tiling",
    "TiledLinearReturnBias": "deepspeed.runtime.zero.tiling",
    "estimate_zero2_model_states_mem_needs": "deepspeed.runtime.zero.memory_estimators",
    "estimate_zero2_model_states_mem_needs_all_cold": "deepspeed.runtime.zero.memory_estimators",
    "estimate_zero2_model_states_mem_needs_all_live": "deepspeed.runtime.zero.memory_estimators",
    "estimate_zero3_model_states_mem_needs": "deepspeed.runtime.zero.stage3_estimators",
    "estimate_zero3_model_states_mem_needs_all_cold": "deepspeed.runtime.zero.stage3_estimators",
    "estimate_zero3_model_states_mem_needs_all_live": "deepspeed.runtime.zero.stage3_estimators",
}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    return attribute_or_submodule(__name__, name)
