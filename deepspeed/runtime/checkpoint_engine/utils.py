"""Which back end a configuration asks for."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine


def create_checkpoint_engine(
    config_params: Any,
    groups: Any = None,
    zero_stage: int = 0,
    has_moe_layers: bool = False,
    optimize_dp_state: bool = False,
) -> CheckpointEngine:
    """The back end for ``config_params`` (an engine's configuration). The configuration refuses what is not built."""
    return TorchCheckpointEngine(config_params)
