"""Sections `tensorboard`, `wandb`, `csv_monitor`, `comet`: where training events are written."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import Self

from deepspeed.runtime.config_types import Flag, Integer
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

MONITOR_SECTIONS = ("tensorboard", "comet", "wandb", "csv_monitor")


class TensorBoardConfig(DeepSpeedConfigModel):
    """`tensorboard`: event files."""

    enabled: Flag = False
    """Write events. Example: true."""

    output_path: str = ""
    """Folder; empty = where training was started. Example: "runs"."""

    job_name: str = "DeepSpeedJobName"
    """Sub-folder. Example: "run-1"."""


class WandbConfig(DeepSpeedConfigModel):
    """`wandb`: Weights & Biases."""

    enabled: Flag = False
    """Send events. Example: true."""

    group: str | None = None
    """Group of runs. Example: "sweep"."""

    team: str | None = None
    """Entity that owns the project. Example: "lab"."""

    project: str = "deepspeed"
    """Project. Example: "deepspeed"."""


class CSVConfig(DeepSpeedConfigModel):
    """`csv_monitor`: one CSV file per value."""

    enabled: Flag = False
    """Write files. Example: true."""

    output_path: str = ""
    """Folder; empty = where training was started. Example: "runs"."""

    job_name: str = "DeepSpeedJobName"
    """Sub-folder. Example: "run-1"."""


class CometConfig(DeepSpeedConfigModel):
    """`comet`: Comet."""

    enabled: Flag = False
    """Send events. Example: true."""

    samples_log_interval: Annotated[Integer, Field(gt=0)] = 100
    """Samples between two sendings. Example: 1000."""

    project: str | None = None
    """Project. Example: "deepspeed"."""

    workspace: str | None = None
    """Workspace. Example: "lab"."""

    api_key: str | None = Field(default=None, repr=False)
    """Key; the environment variable of Comet is used when absent. Example: null."""

    experiment_name: str | None = None
    """Name shown. Example: "run-1"."""

    experiment_key: str | None = None
    """Key of the experiment to create or to continue. Example: null."""

    online: Flag | None = None
    """Send at once (true) or keep for later (false). Example: true."""

    mode: Literal["get", "create", "get_or_create"] | None = None
    """Whether the experiment must exist. Example: "get_or_create"."""


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """All monitor sections of one config."""

    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    """Event files. Example: {"enabled": true}."""

    comet: CometConfig = Field(default_factory=CometConfig)
    """Comet. Example: {"enabled": true}."""

    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Weights & Biases. Example: {"enabled": true}."""

    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)
    """CSV files. Example: {"enabled": true}."""

    @property
    def enabled(self) -> bool:
        """Whether any monitor is on."""
        return any(getattr(self, name).enabled for name in MONITOR_SECTIONS)

    def check_enabled(self) -> Self:
        """Kept for callers of the reference; `enabled` is always up to date."""
        return self


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The monitor sections of a config dictionary."""
    return DeepSpeedMonitorConfig(**{key: param_dict[key] for key in MONITOR_SECTIONS if key in param_dict})
