"""Config of `deepspeed.init_inference`.

Owns the fields and the merging of a config with keyword arguments. Does not own what the engine makes of them.
"""

import os
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any

from pydantic import Field, field_validator

from deepspeed.inference.quantization_config import (
    ActivationQuantConfig,
    BaseQuantConfig,
    QKVQuantConfig,
    QuantizationConfig,
    QuantTypeEnum,
    WeightQuantConfig,
)
from deepspeed.runtime.config_source import load_source
from deepspeed.runtime.config_types import Flag, Integer, TorchDtype, torch_dtype
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

__all__ = [
    "ActivationQuantConfig",
    "BaseQuantConfig",
    "DeepSpeedInferenceConfig",
    "DeepSpeedMoEConfig",
    "DeepSpeedTPConfig",
    "InferenceCheckpointConfig",
    "MoETypeEnum",
    "QKVQuantConfig",
    "QuantTypeEnum",
    "QuantizationConfig",
    "WeightQuantConfig",
    "merge_inference_config",
]

Count = Annotated[Integer, Field(ge=1)]


class MoETypeEnum(str, Enum):
    """Kind of mixture-of-experts layer."""

    residual = "residual"
    standard = "standard"


class DeepSpeedTPConfig(DeepSpeedConfigModel):
    """`tensor_parallel` (alias `tp`): splitting the model over ranks."""

    enabled: Flag = True
    """Split. Example: false."""

    tp_size: Count = 1
    """Ranks that split the model. Example: 2."""

    tp_grain_size: Count = 64
    """Shard sizes are multiples of this. Example: 64."""

    mpu: Any = None
    """Model-parallel unit that owns the groups (an object, not JSON). Example: null."""

    tp_group: Any = None
    """Existing process group (an object, not JSON). Example: null."""


class DeepSpeedMoEConfig(DeepSpeedConfigModel):
    """`moe`: mixture of experts."""

    enabled: Flag = True
    """Serve experts. Example: false."""

    ep_size: Count = 1
    """Ranks that share the experts. Example: 2."""

    moe_experts: list[Integer] = Field(default_factory=lambda: [1], alias="num_experts")
    """Experts of each layer. Example: [8]."""

    type: MoETypeEnum = MoETypeEnum.standard
    """Kind of layer. Example: "residual"."""

    ep_mp_group: Any = None
    """Process group of ranks that split one expert (an object, not JSON). Example: null."""

    ep_group: Any = Field(default=None, alias="expert_group")
    """Process group of ranks that share experts (an object, not JSON). Example: null."""


class InferenceCheckpointConfig(DeepSpeedConfigModel):
    """`checkpoint_config` (alias `ckpt_config`): where weights come from and go to."""

    checkpoint_dir: str | None = None
    """Folder read. Example: "model"."""

    save_mp_checkpoint_path: str | None = None
    """Folder for weights split by tensor parallelism. Example: "split"."""

    base_dir: str | None = None
    """Root of relative file names. Example: "/models"."""


def _deprecated(new: str | None = None) -> dict[str, Any]:
    return {"deprecated": True, "new_param": new} if new else {"deprecated": True}


class DeepSpeedInferenceConfig(DeepSpeedConfigModel):
    """Settings of `init_inference`."""

    replace_with_kernel_inject: Flag = Field(default=False, alias="kernel_inject")
    """Put fused inference modules in place of known layers. Example: true."""

    dtype: TorchDtype = Field(default_factory=lambda: torch_dtype("fp16"))
    """Dtype of the model: a torch dtype, or fp16, half, bf16, fp32, float, int8, also "torch."-prefixed.
    Example: "bf16"."""

    tensor_parallel: DeepSpeedTPConfig = Field(default_factory=DeepSpeedTPConfig, alias="tp")
    """Splitting over ranks. Example: {"tp_size": 2}."""

    enable_cuda_graph: Flag = False
    """Capture forward in a CUDA graph. Example: true."""

    use_triton: Flag = False
    """Use Triton kernels. Example: true."""

    triton_autotune: Flag = False
    """Tune them at start. Example: true."""

    zero: DeepSpeedZeroConfig = Field(default_factory=DeepSpeedZeroConfig)
    """ZeRO section of ZeRO-Inference. Example: {"stage": 3}."""

    triangular_masking: Flag = Field(default=True, alias="tm")
    """Causal mask of decoder blocks. Example: false."""

    moe: DeepSpeedMoEConfig = Field(default_factory=DeepSpeedMoEConfig)
    """Mixture of experts; true or false stand for its enabled flag. Example: {"ep_size": 2}."""

    keep_module_on_host: Flag = False
    """Leave the module on the host while it is split. Example: true."""

    quant: QuantizationConfig = Field(default_factory=QuantizationConfig)
    """Quantization. Example: {"enabled": false}."""

    checkpoint: str | dict[str, Any] | None = None
    """Checkpoint description: a path to JSON or its content. Example: "checkpoint.json"."""

    base_dir: str = ""
    """Root of the files of the checkpoint. Example: "/models"."""

    set_empty_params: Flag = False
    """The model was built without memory for its weights. Example: true."""

    save_mp_checkpoint_path: str | None = None
    """Folder for weights split by tensor parallelism. Example: "split"."""

    checkpoint_config: InferenceCheckpointConfig = Field(default_factory=InferenceCheckpointConfig, alias="ckpt_config")
    """Where weights come from and go to. Example: {"checkpoint_dir": "model"}."""

    return_tuple: Flag = True
    """Layers return tuples. Example: false."""

    training_mp_size: Count = 1
    """Ranks that split the model when the checkpoint was written. Example: 1."""

    replace_method: str = Field(default="auto", json_schema_extra=_deprecated())
    """Deprecated and without effect. Example: "auto"."""

    injection_policy: dict[Any, Any] | None = Field(default=None, alias="injection_dict")
    """Layer class -> names of the linears followed by an all-reduce (objects, not JSON). Example: null."""

    injection_policy_tuple: tuple[Any, ...] | None = None
    """Resolved policy; filled in by the engine. Example: null."""

    config: dict[str, Any] | None = Field(default=None, alias="args")
    """Accepted for old callers. Example: null."""

    max_out_tokens: Annotated[Integer, Field(gt=0)] = Field(default=1024, alias="max_tokens")
    """Prompt and generation together at most (tokens): sizes the workspace. Example: 2048."""

    min_out_tokens: Count = Field(default=1, alias="min_tokens")
    """Tokens that must fit, else there is an error at start. Example: 1."""

    transposed_mode: Flag = False
    """Weights are stored transposed. Example: true."""

    mp_size: Count = Field(default=1, json_schema_extra=_deprecated("tensor_parallel.tp_size"))
    """Deprecated: use tensor_parallel.tp_size. Example: 2."""

    mpu: Any = Field(default=None, json_schema_extra=_deprecated("tensor_parallel.mpu"))
    """Deprecated: use tensor_parallel.mpu. Example: null."""

    ep_size: Count = Field(default=1, json_schema_extra=_deprecated("moe.ep_size"))
    """Deprecated: use moe.ep_size. Example: 2."""

    ep_group: Any = Field(default=None, alias="expert_group", json_schema_extra=_deprecated("moe.ep_group"))
    """Deprecated: use moe.ep_group. Example: null."""

    ep_mp_group: Any = Field(default=None, alias="expert_mp_group", json_schema_extra=_deprecated("moe.ep_mp_group"))
    """Deprecated: use moe.ep_mp_group. Example: null."""

    moe_experts: list[Integer] = Field(default_factory=lambda: [1], json_schema_extra=_deprecated("moe.moe_experts"))
    """Deprecated: use moe.moe_experts. Example: [8]."""

    moe_type: MoETypeEnum = Field(default=MoETypeEnum.standard, json_schema_extra=_deprecated("moe.type"))
    """Deprecated: use moe.type. Example: "standard"."""

    @field_validator("moe", mode="before")
    @classmethod
    def _moe_flag(cls, value: Any) -> Any:
        return {"enabled": value} if isinstance(value, bool) else value


def merge_inference_config(
    config: Mapping[str, Any] | str | os.PathLike[str] | None, keywords: Mapping[str, Any]
) -> DeepSpeedInferenceConfig:
    """One config from a mapping or a path and from keyword arguments.

    Raises:
        ValueError: a key is given in both with different values, or `config` is neither mapping nor path.
        pydantic.ValidationError: unknown keys or bad values.
    """
    if config is not None and not isinstance(config, (Mapping, str, os.PathLike)):
        raise ValueError(f"config: found {type(config).__name__}; expected a dict or a path to a JSON file")
    data = dict(load_source(config).data) if config is not None else {}
    differing = [key for key in keywords if key in data and data[key] != keywords[key]]
    if differing:
        pairs = "; ".join(f"{key}: config has {data[key]!r}, the argument is {keywords[key]!r}" for key in differing)
        raise ValueError(f"init_inference got different values in config and in arguments ({pairs}); keep one of each")
    return DeepSpeedInferenceConfig(**{**data, **keywords})


def __getattr__(name: str) -> Any:
    """`DtypeEnum` on first use: its members are torch dtypes."""
    if name == "DtypeEnum":
        from deepspeed.runtime.config_dtype_enum import inference_dtype_enum

        return inference_dtype_enum()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
