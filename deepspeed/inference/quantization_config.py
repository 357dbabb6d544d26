"""Quantization blocks of inference, and the top-level section `weight_quantization`."""

from enum import Enum
from typing import Annotated, Any

from pydantic import Field

from deepspeed.runtime.config_types import Flag, Integer
from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class QuantTypeEnum(str, Enum):
    """Range of quantized values."""

    asym = "asymmetric"
    sym = "symmetric"


class BaseQuantConfig(DeepSpeedConfigModel):
    """Fields shared by the quantization blocks."""

    enabled: Flag = True
    """Quantize. Example: false."""

    num_bits: Annotated[Integer, Field(ge=1)] = 8
    """Bits of a value. Example: 4."""

    q_type: QuantTypeEnum = QuantTypeEnum.sym
    """Range of values. Example: "asymmetric"."""

    q_groups: Annotated[Integer, Field(ge=1)] = 1
    """Groups of a tensor, each with its own scale. Example: 1."""


class WeightQuantConfig(BaseQuantConfig):
    """Weights."""

    quantized_initialization: dict[str, Any] = Field(default_factory=dict)
    """Quantize while the model is built: num_bits, group_size, group_dim, symmetric. Example: {"num_bits": 4}."""

    post_init_quant: dict[str, Any] = Field(default_factory=dict)
    """Part of a module name -> num_bits (4 or 8), group_size, group_dim, symmetric false. Example: {}."""


class ActivationQuantConfig(BaseQuantConfig):
    """Activations."""


class QKVQuantConfig(DeepSpeedConfigModel):
    """Attention projections."""

    enabled: Flag = True
    """Quantize. Example: false."""


class QuantizationConfig(DeepSpeedConfigModel):
    """Quantization of inference."""

    enabled: Flag = True
    """Quantize. Example: false."""

    activation: ActivationQuantConfig = Field(default_factory=ActivationQuantConfig)
    """Activations. Example: {"num_bits": 8}."""

    weight: WeightQuantConfig = Field(default_factory=WeightQuantConfig)
    """Weights. Example: {"num_bits": 8}."""

    qkv: QKVQuantConfig = Field(default_factory=QKVQuantConfig)
    """Attention projections. Example: {"enabled": true}."""
