"""Settings of `OptimizedLinear`: low-rank adapters on a sharded, optionally quantized base weight. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _uint8() -> torch.dtype:
    import torch

    return torch.uint8


@dataclass
class LoRAConfig:
    """Low-rank adapters."""

    lora_r: int = 64
    """Rank of the adapter."""
    lora_alpha: float = 16.0
    """Numerator of its scale (alpha / r)."""
    base_weight_sharding: int = 1
    """Ranks over which the frozen base weight is split."""
    offload: bool = False
    """Keep the base weight on the host."""
    offload_ratio: float = 0.0
    """Share of base weights kept on the host."""
    delay_lora_init: bool = False
    """Create adapters later, through `init_lora`."""
    target_mods: list[str] = field(default_factory=lambda: list(DEFAULT_TARGETS))
    """Names of the linears to convert."""


@dataclass
class QuantizationConfig:
    """Quantized base weight."""

    q_bits: int = 8
    """Bits of a value."""
    mantissa_bits: int = 3
    """Bits of its mantissa."""
    group_size: int = 512
    """Elements that share a scale."""
    q_dtype: torch.dtype = field(default_factory=_uint8)
    """Dtype in which values are stored."""
