# ruff: noqa: F401  (the imports for type checkers are the exports)
"""Saving, loading and exporting. Names are exported lazily.

Start reading at ``manager.py`` (the order of steps), then ``names.py`` (what is on disk),
``runtime/zero/state_dict.py`` (the form of optimizer state), ``index.py`` (how it is found again). The other rooms:
section "Checkpoints" of ``docs/architecture.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deepspeed.unbuilt import refusal

if TYPE_CHECKING:
    from deepspeed.checkpoint.errors import CheckpointError
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape, enable_universal_checkpoint
    from deepspeed.checkpoint.utils import (
        get_layer_ckpt_name_for_rank,
        get_model_ckpt_name_for_rank,
        get_zero_ckpt_name_for_rank,
    )

_NAMES = {
    "CheckpointError": "deepspeed.checkpoint.errors",
    "SubparamShape": "deepspeed.checkpoint.universal_checkpoint",
    "enable_universal_checkpoint": "deepspeed.checkpoint.universal_checkpoint",
    "get_layer_ckpt_name_for_rank": "deepspeed.checkpoint.utils",
    "get_model_ckpt_name_for_rank": "deepspeed.checkpoint.utils",
    "get_zero_ckpt_name_for_rank": "deepspeed.checkpoint.utils",
}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.isupper():
        return getattr(importlib.import_module("deepspeed.checkpoint.constants"), name)
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(refusal(f"{__name__}.{name}") or f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    constants = importlib.import_module("deepspeed.checkpoint.constants")
    return sorted([*_NAMES, *(name for name in vars(constants) if name.isupper()), *globals()])
