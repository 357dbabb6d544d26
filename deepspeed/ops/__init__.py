"""Optimizers and kernels; a subpackage is loaded when it is first named."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from deepspeed.unbuilt import refusal

if TYPE_CHECKING:
    from deepspeed.ops import adagrad as adagrad
    from deepspeed.ops import adam as adam
    from deepspeed.ops import lamb as lamb
    from deepspeed.ops import lion as lion
    from deepspeed.ops import op_builder as op_builder
    from deepspeed.ops import registry as registry

_SUBPACKAGES = ("adagrad", "adam", "aio", "lamb", "lion", "op_builder", "registry")


def __getattr__(name: str) -> ModuleType:
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(refusal(f"{__name__}.{name}") or f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES})
