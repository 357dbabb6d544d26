"""Numeric ids of activation functions and norms, shared by kernels and configs."""

from enum import IntEnum

__all__ = ["ActivationFuncType", "GATED_ACTIVATION_TYPES", "NormType"]


class ActivationFuncType(IntEnum):
    """Activation function of a feed-forward block."""

    UNKNOWN = 0
    GELU = 1
    ReLU = 2
    GATED_GELU = 3
    GATED_SILU = 4


GATED_ACTIVATION_TYPES: list[ActivationFuncType] = [ActivationFuncType.GATED_GELU, ActivationFuncType.GATED_SILU]


class NormType(IntEnum):
    """Kind of normalization layer."""

    UNKNOWN = 0
    LayerNorm = 1
    GroupNorm = 2
    RMSNorm = 3
