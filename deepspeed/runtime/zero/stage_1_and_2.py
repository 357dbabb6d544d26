"""Stages 1 and 2 under their historical name: values of placement and layout, and the old attribute names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepspeed.runtime.zero.fragment_link import link_fragments
from deepspeed.runtime.zero.memory_estimators import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from deepspeed.runtime.zero.views import HistoricalViews

if TYPE_CHECKING:
    from deepspeed.runtime.zero.shard_group import ShardGroup

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]


class DeepSpeedZeroOptimizer(HistoricalViews):
    """The ZeRO core with sharded optimizer state (stage 1) or sharded gradients too (stage 2)."""

    def _adopt(self, groups: Sequence[ShardGroup]) -> None:
        super()._adopt(groups)
        link_fragments(self)
