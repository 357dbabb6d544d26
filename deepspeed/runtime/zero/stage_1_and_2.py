"""Stages 1 and 2 under their historical name: values of placement and layout, and the old attribute names."""

from __future__ import annotations

from deepspeed.runtime.zero.memory_estimators import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from deepspeed.runtime.zero.views import HistoricalViews

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]


class DeepSpeedZeroOptimizer(HistoricalViews):
    """The ZeRO core with sharded optimizer state (stage 1) or sharded gradients too (stage 2)."""
