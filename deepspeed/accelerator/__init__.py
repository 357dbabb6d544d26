"""Device access: `get_accelerator` gives the one accelerator of this process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
    from deepspeed.accelerator.real_accelerator import (
        get_accelerator,
        is_current_accelerator_supported,
        set_accelerator,
    )

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

_EXPORTS = {
    "DeepSpeedAccelerator": "abstract_accelerator",
    "get_accelerator": "real_accelerator",
    "is_current_accelerator_supported": "real_accelerator",
    "set_accelerator": "real_accelerator",
}


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
