"""Sections `zero_optimization.offload_param` and `zero_optimization.offload_optimizer`.

Owns where sharded state lives outside the device and how much of it is moved at a time. Counts are buffers, sizes are
elements. Does not own the stores (`runtime/swap_tensor/`).
"""

from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator
from typing_extensions import Self

from deepspeed.runtime.config_problems import Problem, show
from deepspeed.runtime.config_types import Flag, Integer, Real, Size
from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class OffloadDeviceEnum(str, Enum):
    """Where offloaded state lives."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Kinds of state that `engine.offload_states` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class _OffloadSection(DeepSpeedConfigModel):
    """What both sections have in common."""

    @model_validator(mode="before")
    @classmethod
    def _empty_folder_is_none(cls, data: Any) -> Any:
        """A generated config writes "" where it has no folder; as a path that would be the current one."""
        return {**data, "nvme_path": None} if isinstance(data, dict) and data.get("nvme_path") == "" else data


def _key_of_the_other(here: str, other: str, known: Collection[str], key: str, value: Any) -> Problem | None:
    if key not in known:
        return None
    detail = f"unknown key (found {show(value)}); it is a key of zero_optimization.{other}"
    return Problem(f"zero_optimization.{here}.{key}", detail, "move it there, or remove it")


class DeepSpeedZeroOffloadParamConfig(_OffloadSection):
    """`offload_param`: where parameter shards live between uses."""

    @classmethod
    def explain_unknown_key(cls, key: str, value: Any) -> Problem | None:
        """A key of the section for optimizer states."""
        known = DeepSpeedZeroOffloadOptimizerConfig.model_fields
        return _key_of_the_other("offload_param", "offload_optimizer", known, key, value)

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    """[stage 3] Where parameter shards live. Example: "cpu"."""

    nvme_path: Path | None = None
    """[stage 3] Folder for the files when device is nvme. Example: "/local_nvme"."""

    buffer_count: Annotated[Integer, Field(ge=0)] = 5
    """[stage 3] Changes nothing: parameters at device nvme are mapped files and pass through no pool. Example: 5."""

    buffer_size: Annotated[Size, Field(ge=0)] = 100_000_000
    """[stage 3] Changes nothing, as `buffer_count`. Example: 1e8."""

    max_in_cpu: Annotated[Size, Field(ge=0)] = 1_000_000_000
    """[stage 3] Changes nothing: the system keeps of mapped files in memory what is free. Example: 1e9."""

    pin_memory: Flag = True
    """[stage 3] Page-lock host buffers: faster copies, memory that cannot be swapped out. Example: false."""


class DeepSpeedZeroOffloadOptimizerConfig(_OffloadSection):
    """`offload_optimizer`: where optimizer states live and where the step runs."""

    @classmethod
    def explain_unknown_key(cls, key: str, value: Any) -> Problem | None:
        """A key of the section for parameters."""
        known = DeepSpeedZeroOffloadParamConfig.model_fields
        return _key_of_the_other("offload_optimizer", "offload_param", known, key, value)

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    """[stages 1-3] Where optimizer states live; nvme needs stage 3. Example: "cpu"."""

    nvme_path: Path | None = None
    """[stage 3] Folder for the files when device is nvme. Example: "/local_nvme"."""

    buffer_count: Annotated[Integer, Field(ge=0)] = 4
    """[stage 3] Host buffers in the swap pool: at least one for the weights and one for each state. Example: 4."""

    pin_memory: Flag = True
    """[stages 1-3] Page-lock host buffers. Example: false."""

    pipeline_read: Flag = False
    """[stage 3] Read the next sub-group from nvme while the current one is stepped. Example: true."""

    pipeline_write: Flag = False
    """[stage 3] Write the previous sub-group to nvme while the current one is stepped. Example: true."""

    fast_init: Flag = False
    """[stage 3] Changes nothing: room in files is reserved, and nothing is written to make them. Example: true."""

    ratio: Annotated[Real, Field(ge=0.0, le=1.0)] = 1.0
    """[stage 3] Share of sub-groups stepped on the host; below 1.0 needs stage 3. Example: 0.3."""

    super_offload: Flag = False
    """[stages 1-3] Update during backward, undo what is clipped or skipped. Example: true."""

    cpuadam_cores_perc: Annotated[Real, Field(ge=0.0, le=1.0)] = 0.8
    """[stages 1-3] Share of host cores for the SuperOffload worker; without effect. Example: 0.8."""

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes of neighbouring sub-groups overlap the step."""
        return self.pipeline_read or self.pipeline_write

    def set_pipeline(self) -> Self:
        """Kept for callers of the reference; `pipeline` is always up to date."""
        return self
