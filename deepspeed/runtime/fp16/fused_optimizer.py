"""fp16 or bf16 weights with fp32 masters and no sharding, under the historical name."""

from __future__ import annotations

from deepspeed.runtime.zero.views import HistoricalViews

__all__ = ["FP16_Optimizer"]


class FP16_Optimizer(HistoricalViews):
    """Stage 0 in 16-bit precision: a row of values of the ZeRO core."""
