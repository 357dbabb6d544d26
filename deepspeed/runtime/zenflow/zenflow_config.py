"""Section `zero_optimization.zenflow`: asynchronous updates of the less important gradients.

Owns the fields; the executor is `runtime/zero/zenflow/`.
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
    """`zenflow`: update the important columns of each weight now, the rest later and beside training; see
    [offload](offload.md#zenflow)."""

    run_time_fields = frozenset({"steps_per_epoch"})

    topk_ratio: Annotated[Real, Field(gt=0.0, lt=1.0)] = 0.1
    """[stages 1-3 with offload_optimizer] Share of the columns of each weight that is important, at least one column.
    Example: 0.05."""

    select_strategy: Annotated[str, lower_word("auto", "step", "epoch")] = AUTO
    """[stages 1-3 with offload_optimizer] When columns are chosen anew; "auto" = epoch, or 100 steps where no epoch is
    known. Example: "step"."""

    select_interval: Interval = AUTO
    """[stages 1-3 with offload_optimizer] Steps or epochs between choices; "auto" = 1. Example: 100."""

    update_interval: Interval = AUTO
    """[stages 1-3 with offload_optimizer] Steps whose gradients of the rest are averaged into one update; at most
    select_interval. "auto": until what waits outgrows auto_ratio of the important gradients. Example: 4."""

    overlap_step: Flag = False
    """[stages 1-3 with offload_optimizer] Update the rest in threads beside training; it reaches the model one window
    later. Example: true."""

    offload: Flag = False
    """[stages 1-3 with offload_optimizer] Keep the moments of the important columns in host memory between steps, too.
    Example: true."""

    auto_ratio: Annotated[Real, Field(ge=0.0, le=1.0)] = 0.99
    """[stages 1-3 with offload_optimizer] With update_interval "auto": an update is due when the norm of what waits is
    above this share of the norm of the important gradients. Example: 0.95."""

    full_warm_up_rounds: Integer = 0
    """[stages 1-3 with offload_optimizer] First steps that update everything, as without the section. Example: 10."""

    pt_reserved_cores_perc: Annotated[Real, Field(ge=0.0, le=1.0)] = 0.5
    """[stages 1-3 with offload_optimizer] Share of torch's threads that the update beside training leaves alone.
    Example: 0.5."""

    steps_per_epoch: Integer | None = Field(default=None, exclude=True)
    """[stages 1-3 with offload_optimizer] Steps of an epoch, where no training_data was passed that has a length.
    Example: 1000."""
