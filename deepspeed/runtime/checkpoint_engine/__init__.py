# ruff: noqa: F401  (the imports for type checkers are the exports)
"""Storage back ends of checkpoints. Names are exported lazily."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.checkpoint_engine.utils import create_checkpoint_engine

_NAMES = {
    "CheckpointCommitInfo": "checkpoint_engine",
    "CheckpointEngine": "checkpoint_engine",
    "TorchCheckpointEngine": "torch_checkpoint_engine",
    "create_checkpoint_engine": "utils",
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*_NAMES, *globals()])
