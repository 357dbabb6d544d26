"""Sections that decide number formats: `fp16`, `bf16`, `torch_autocast`, `data_types`.

Owns their fields and the arithmetic that follows from them (first loss scale, scaler arguments). Does not own the
combination rules between sections (`config_checks.py`) nor what is done with the numbers (`precision.py`).
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from deepspeed.runtime.config_types import (
    AnyDtype,
    Flag,
    FloatDtype,
    Integer,
    Real,
    Rule,
    TextList,
    refuse,
    to_text_list,
)
from deepspeed.runtime.config_utils import AUTO, DeepSpeedConfigModel

FP16 = "fp16"
BFLOAT16 = "bf16"
BFLOAT16_OLD = "bfloat16"

DEFAULT_AUTOCAST_MODULES = (
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.conv.Conv1d",
    "torch.nn.modules.conv.Conv2d",
    "torch.nn.modules.conv.Conv3d",
)
"""Modules whose gradients travel in the autocast dtype when `lower_precision_safe_modules` is not given."""


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """`fp16`: half precision weights with a scaled loss."""

    enabled: Flag = False
    """Train with fp16 weights, fp32 master weights and loss scaling. Excludes bf16. Example: true."""

    auto_cast: Flag = False
    """Cast floating point inputs of forward to fp16. Example: true."""

    loss_scale: Annotated[Real, Field(ge=0)] = 0.0
    """Factor on the loss: 0 chooses it dynamically, any other value is used as it is. Example: 128."""

    initial_scale_power: Integer = 16
    """First dynamic loss scale is 2 to this power. Example: 12."""

    loss_scale_window: Integer = 1000
    """Steps without overflow after which the dynamic scale doubles; above 0 when the scale is dynamic. Example: 500."""

    hysteresis: Integer = 2
    """Overflows in a row that are tolerated before the dynamic scale halves. Example: 1."""

    consecutive_hysteresis: Flag = False
    """Restore the tolerated overflows after every step without one. Example: true."""

    min_loss_scale: Integer = 1
    """Smallest dynamic scale; above 0 when the scale is dynamic. Example: 1."""

    fp16_master_weights_and_grads: Flag = False
    """[stages 0-3] Keep master weights and gradients in fp16 instead of fp32. Example: true."""

    @model_validator(mode="after")
    def _dynamic_scale_can_move(self) -> Self:
        if self.enabled and self.loss_scale == 0:
            for name in ("loss_scale_window", "min_loss_scale"):
                value = getattr(self, name)
                if value <= 0:
                    raise PydanticCustomError(
                        "ds_cross",
                        "found {found} with a dynamic loss scale (fp16.loss_scale 0); expected an integer > 0",
                        {"key": name, "found": value},
                    )
        return self

    def initial_dynamic_scale(self) -> float:
        """First scale when the scale is dynamic."""
        return 2.0**self.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Keyword arguments of the dynamic scaler."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "min_scale": self.min_loss_scale,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
        }


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """`bf16` (old name `bfloat16`): bfloat16 weights, no loss scaling."""

    enabled: Flag = False
    """Train with bf16 weights and fp32 master weights. Excludes fp16. Example: true."""

    immediate_grad_update: Flag = False
    """Add each gradient to the fp32 buffer as soon as backward produces it. Example: true."""

    check_grad_overflow: Flag = True
    """Look for inf and nan in the gradients and skip the step when there are any. Example: false."""

    bf16_master_weights_and_grads: Flag = False
    """[stages 0-3] Keep master weights and gradients in bf16 instead of fp32. Example: true."""

    bf16_optimizer_states: Flag = False
    """[stages 0-3] Keep optimizer states in bf16 too; needs bf16_master_weights_and_grads. Example: true."""


class TorchAutocastConfig(DeepSpeedConfigModel):
    """`torch_autocast`: run forward under torch.autocast."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Run forward under torch.autocast; stage 0 with float16 also scales the loss. Example: true."""

    dtype: AnyDtype | None = None
    """Autocast dtype, e.g. bfloat16, torch.float16, fp32; absent = torch's own choice. Example: "bfloat16"."""

    lower_precision_safe_modules: TextList | None = None
    """Fully qualified class names of modules whose gradients travel in the autocast dtype; absent = Linear and
    Conv1d/2d/3d of torch.nn. Example: ["torch.nn.modules.linear.Linear"]."""


def _fp32_module_patterns(value: Any) -> str | list[str]:
    if value == AUTO:
        return AUTO
    if not isinstance(value, (list, tuple)):
        raise refuse('"auto" or a list of module or buffer name patterns')
    return to_text_list(value)


class DataTypesConfig(DeepSpeedConfigModel):
    """`data_types`: dtypes beside the one of the weights."""

    keeps_unknown_keys = True

    grad_accum_dtype: FloatDtype | None = None
    """Dtype in which micro-step gradients are added up; absent = dtype of the weights. Example: "fp32"."""

    param_dtype: FloatDtype | None = None
    """Dtype of the weights; must agree with fp16.enabled / bf16.enabled. Example: "bf16"."""

    buffer_dtype: FloatDtype | None = None
    """Cast floating point buffers to this; absent = leave them as they are. Example: "fp32"."""

    keep_in_fp32_modules: Annotated[
        str | list[str],
        Rule(_fp32_module_patterns, '"auto" or a list of module or buffer name patterns'),
    ] = AUTO
    """Modules and buffers that stay fp32 beside 16-bit weights, by name pattern (parameters and buffers below a
    matching module both stay); "auto" follows the attributes a transformers model declares.
    Example: ["norm", "lm_head"]."""


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The `bf16` section of a config dictionary (or `bfloat16` when `bf16` is absent)."""
    section = param_dict.get(BFLOAT16)
    if section is None:
        section = param_dict.get(BFLOAT16_OLD)
    return DeepSpeedBF16Config(**(section or {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The `fp16` section of a config dictionary."""
    return DeepSpeedFP16Config(**(param_dict.get(FP16) or {}))
