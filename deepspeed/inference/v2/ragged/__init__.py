"""Ragged batches: configs of the sequence manager (imported on first use)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.inference.v2.ragged.manager_configs import (
        AllocationMode,
        DSStateManagerConfig,
        KVCacheConfig,
        KVCacheType,
        MemoryConfig,
    )

__all__ = ["AllocationMode", "DSStateManagerConfig", "KVCacheConfig", "KVCacheType", "MemoryConfig"]


def __getattr__(name: str) -> Any:
    """The exported names."""
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.manager_configs"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
