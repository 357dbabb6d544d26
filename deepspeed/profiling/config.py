"""Section `flops_profiler`: counting the operations of one training step."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from deepspeed.runtime.config_types import Flag, Integer, Real
from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class DeepSpeedFlopsProfilerConfig(DeepSpeedConfigModel):
    """`flops_profiler`: operations, parameters and time per module."""

    keeps_unknown_keys = True

    def __init__(self, param_dict: Mapping[str, Any] | None = None, strict: bool = False, **data: Any) -> None:
        """Build from keywords, or from the section `flops_profiler` of a whole config, as older callers do."""
        super().__init__(strict, **{**((param_dict or {}).get("flops_profiler") or {}), **data})

    enabled: Flag = False
    """Profile one step; also turns wall_clock_breakdown on. Example: true."""

    recompute_fwd_factor: Annotated[Real, Field(ge=0)] = 0.0
    """Share of forward that activation checkpointing repeats. Example: 1.0."""

    profile_step: Annotated[Integer, Field(ge=0)] = 1
    """Step that is profiled. Example: 5."""

    module_depth: Integer = -1
    """Depth of modules printed; -1 = all. Example: 2."""

    top_modules: Annotated[Integer, Field(ge=1)] = 1
    """Largest modules listed per depth. Example: 3."""

    detailed: Flag = True
    """Print every module. Example: false."""

    output_file: str | None = None
    """File for the report; absent = standard output. Example: "profile.txt"."""
