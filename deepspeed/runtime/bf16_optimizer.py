"""bf16 weights with fp32 masters, fp32 gradient accumulation and sharded state, under the historical name."""

from __future__ import annotations

from deepspeed.runtime.zero.views import HistoricalViews

__all__ = ["BF16_Optimizer"]


class BF16_Optimizer(HistoricalViews):
    """Stage 1, bf16, ``data_types.grad_accum_dtype: fp32``: a row of values of the ZeRO core."""
