"""Section `zero_optimization.zenflow`: asynchronous updates of the less important gradients.

Owns the fields; the executor is elsewhere.
"""

from typing import Annotated, Any

from pydantic import Field

from deepspeed.runtime.config_types import Flag, Integer, Real, Rule, lower_word, refuse, to_integer
from deepspeed.runtime.config_utils import AUTO, DeepSpeedConfigModel


def _interval(value: Any) -> int | str:
    if value == AUTO:
        return AUTO
    if isinstance(value, str):
        raise refuse('an integer >= 1 or "auto"')
    number = to_integer(value)
    if number < 1:
        raise refuse('an integer >= 1 or "auto"')
    return number


Interval = Annotated[str | int, Rule(_interval, 'an integer >= 1 or "auto"')]


class ZenFlowConfig(DeepSpeedConfigModel):
    """`zenflow`: update the most important channels now, the rest later on the host."""

    run_time_fields = frozenset({"steps_per_epoch"})

    topk_ratio: Annotated[Real, Field(gt=0.0, lt=1.0)] = 0.1
    """[stages 1-3 with offload_optimizer] Share of the most important channels updated at once. Example: 0.05."""

    select_strategy: Annotated[str, lower_word("auto", "step", "epoch")] = AUTO
    """[stages 1-3 with offload_optimizer] When the important set is chosen anew; "auto" = epoch. Example: "step"."""

    select_interval: Interval = AUTO
    """[stages 1-3 with offload_optimizer] Steps or epochs between choices; "auto" = 1. Example: 100."""

    update_interval: Interval = AUTO
    """[stages 1-3 with offload_optimizer] Steps over which the rest is accumulated; at most select_interval, "auto"
    adapts. Example: 4."""

    overlap_step: Flag = False
    """[stages 1-3 with offload_optimizer] Run the host step in its own process beside training. Example: true."""

    offload: Flag = False
    """[stages 1-3 with offload_optimizer] Keep the states of the important channels on the host too. Example: true."""

    auto_ratio: Annotated[Real, Field(ge=0.0, le=1.0)] = 0.99
    """[stages 1-3 with offload_optimizer] Share of parameters with enough pending change that triggers an automatic
    update. Example: 0.95."""

    full_warm_up_rounds: Integer = 0
    """[stages 1-3 with offload_optimizer] First steps that update everything. Example: 10."""

    pt_reserved_cores_perc: Annotated[Real, Field(ge=0.0, le=1.0)] = 0.5
    """[stages 1-3 with offload_optimizer] Share of host cores kept for torch when overlap_step is on. Example: 0.5."""

    steps_per_epoch: Integer | None = Field(default=None, exclude=True)
    """[stages 1-3 with offload_optimizer] Filled in by the engine from the data loader. Example: 1000."""
