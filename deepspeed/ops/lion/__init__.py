"""Lion optimizers; names are loaded at first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion as DeepSpeedCPULion
    from deepspeed.ops.lion.fused_lion import FusedLion as FusedLion

_EXPORTS = {
    "FusedLion": "deepspeed.ops.lion.fused_lion",
    "DeepSpeedCPULion": "deepspeed.ops.lion.cpu_lion",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
