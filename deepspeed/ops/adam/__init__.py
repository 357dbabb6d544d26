"""Adam optimizers; names are loaded at first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepspeed.unbuilt import refusal

if TYPE_CHECKING:
    from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam
    from deepspeed.ops.adam.fused_adam import FusedAdam as FusedAdam
    from deepspeed.ops.adam.zenflow_cpu_adam import ZenFlowCPUAdam as ZenFlowCPUAdam

_EXPORTS = {
    "FusedAdam": "deepspeed.ops.adam.fused_adam",
    "DeepSpeedCPUAdam": "deepspeed.ops.adam.cpu_adam",
    "ZenFlowCPUAdam": "deepspeed.ops.adam.zenflow_cpu_adam",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(refusal(f"{__name__}.{name}") or f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
