"""Section `timers`: the throughput timer."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from deepspeed.runtime.config_types import Flag
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

TIMERS = "timers"
TIMERS_THROUGHPUT = "throughput"


class DeepSpeedThroughputTimerConfig(DeepSpeedConfigModel):
    """`timers.throughput`: samples per second."""

    enabled: Flag = True
    """Measure samples per second. Example: false."""

    synchronized: Flag = True
    """Wait for the device around measurements: exact, a little slower. Example: false."""


class TimersConfig(DeepSpeedConfigModel):
    """`timers`: timers of the training loop."""

    keeps_unknown_keys = True

    throughput: DeepSpeedThroughputTimerConfig = Field(default_factory=DeepSpeedThroughputTimerConfig)
    """The throughput timer. Example: {"enabled": false}."""


def get_timers_config(param_dict: Mapping[str, Any]) -> DeepSpeedThroughputTimerConfig:
    """The `timers.throughput` section of a config dictionary."""
    section = param_dict.get(TIMERS)
    return TimersConfig(**(section if isinstance(section, Mapping) else {})).throughput
