"""Section `nebula`: checkpoints written by the Nebula service."""

from typing import Annotated

from pydantic import Field

from deepspeed.runtime.config_types import Flag, Integer
from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class NebulaConfig(DeepSpeedConfigModel):
    """`nebula`: asynchronous checkpoints."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Write through Nebula. Example: true."""

    enable_nebula_load: Flag = True
    """Read through Nebula. Example: false."""

    nebula_load_path: str | None = None
    """Where to read from. Example: "/ckpt"."""

    persistent_storage_path: str | None = None
    """Where copies are kept. Example: "/ckpt"."""

    persistent_time_interval: Annotated[Integer, Field(gt=0)] = 100
    """Seconds between kept copies. Example: 100."""

    num_of_version_in_retention: Annotated[Integer, Field(ge=1)] = 2
    """Copies kept. Example: 2."""
