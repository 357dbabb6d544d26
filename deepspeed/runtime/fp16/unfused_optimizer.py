"""The historical name for per-parameter masters: the ZeRO core always keeps one leaf per parameter fragment."""

from __future__ import annotations

from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

__all__ = ["FP16_UnfusedOptimizer"]


class FP16_UnfusedOptimizer(FP16_Optimizer):
    """Same values as :class:`FP16_Optimizer`."""
