"""Stage 3 under its historical name: the ZeRO core with sharded parameters, and the old attribute names."""

from __future__ import annotations

from deepspeed.runtime.zero.views import HistoricalViews

__all__ = ["DeepSpeedZeroOptimizer_Stage3"]


class DeepSpeedZeroOptimizer_Stage3(HistoricalViews):
    """The ZeRO core with parameters, gradients and optimizer state sharded."""
