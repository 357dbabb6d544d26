"""Pinned host tensors; `PinMemoryBuilder` is loaded at first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.ops.op_builder import PinMemoryBuilder as PinMemoryBuilder

_EXPORTS = {"PinMemoryBuilder": "deepspeed.ops.op_builder"}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
