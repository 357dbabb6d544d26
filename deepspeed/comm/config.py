"""Section `comms_logger`: which collectives are recorded."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from deepspeed.runtime.config_types import Flag, TextList
from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class CommsLoggerConfig(DeepSpeedConfigModel):
    """`comms_logger`: size and time of collectives issued through deepspeed.comm."""

    enabled: Flag = False
    """Record collectives. Example: true."""

    prof_all: Flag = True
    """Record every operation. Example: false."""

    prof_ops: TextList = Field(default_factory=list)
    """Record only these operations (with prof_all false). Example: ["all_reduce", "all_gather"]."""

    verbose: Flag = False
    """Print each operation as it happens. Example: true."""

    debug: Flag = False
    """Add the calling function to the recorded name. Example: true."""


class DeepSpeedCommsConfig:
    """The section as the collectives read it: `comms_logger` (fields) and `comms_logger_enabled`."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        """Read the section of a config dictionary."""
        self.comms_logger_enabled: bool = "comms_logger" in ds_config
        self.comms_logger: CommsLoggerConfig = CommsLoggerConfig(**(ds_config.get("comms_logger") or {}))
