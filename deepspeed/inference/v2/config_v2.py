"""Config of the ragged-batch inference engine."""

from typing import Annotated

from pydantic import Field

from deepspeed.inference.v2.ragged.manager_configs import DSStateManagerConfig
from deepspeed.runtime.config_types import Integer
from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class DeepSpeedTPConfig(DeepSpeedConfigModel):
    """`tensor_parallel` (alias `tp`)."""

    tp_size: Annotated[Integer, Field(ge=1)] = 1
    """Ranks that split the model. Example: 2."""


class QuantizationConfig(DeepSpeedConfigModel):
    """`quantization`."""

    quantization_mode: str | None = None
    """Stored form of weights: null, or wf6af16 (six-bit floats). Example: "wf6af16"."""


class RaggedInferenceEngineConfig(DeepSpeedConfigModel):
    """Settings of the ragged-batch engine."""

    tensor_parallel: DeepSpeedTPConfig = Field(default_factory=DeepSpeedTPConfig, alias="tp")
    """Splitting over ranks. Example: {"tp_size": 2}."""

    state_manager: DSStateManagerConfig = Field(default_factory=DSStateManagerConfig, alias="manager")
    """Sequences in flight. Example: {"max_context": 4096}."""

    quantization: QuantizationConfig = Field(default_factory=QuantizationConfig)
    """Stored form of weights. Example: {"quantization_mode": "wf6af16"}."""
