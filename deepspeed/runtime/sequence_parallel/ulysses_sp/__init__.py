"""The historical place of the tiled functions; what belongs to sequence parallelism here is to come."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.sequence_parallel.ulysses_sp.tiled_compute import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
)
from deepspeed.unbuilt import attribute_or_submodule

__all__ = ["SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP"]


def __getattr__(name: str) -> Any:
    return attribute_or_submodule(__name__, name)
