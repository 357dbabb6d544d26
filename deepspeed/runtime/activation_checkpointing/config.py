"""Section `activation_checkpointing`: what `deepspeed.checkpointing` does with saved activations."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from deepspeed.runtime.config_types import Flag, Integer
from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class DeepSpeedActivationCheckpointingConfig(DeepSpeedConfigModel):
    """`activation_checkpointing`: takes effect where the model calls `deepspeed.checkpointing.checkpoint`."""

    keeps_unknown_keys = True

    def __init__(self, param_dict: Mapping[str, Any] | None = None, strict: bool = False, **data: Any) -> None:
        """Build from keywords, or from `activation_checkpointing` of a whole config, as older callers do."""
        super().__init__(strict, **{**((param_dict or {}).get("activation_checkpointing") or {}), **data})

    partition_activations: Flag = False
    """Shard saved activations over the model-parallel ranks. Example: true."""

    cpu_checkpointing: Flag = False
    """Keep saved activations in host memory. Example: true."""

    contiguous_memory_optimization: Flag = False
    """Copy saved activations into one buffer; needs partition_activations and number_checkpoints. Example: true."""

    number_checkpoints: Annotated[Integer, Field(gt=0)] | None = None
    """Checkpoints of one forward, which size that buffer. Example: 24."""

    synchronize_checkpoint_boundary: Flag = False
    """Wait for the device around each checkpoint (debugging). Example: true."""

    profile: Flag = False
    """Time each checkpoint. Example: true."""
