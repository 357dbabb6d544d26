"""Section `zero_optimization.leaf_module`: modules that stage 3 fetches as one unit.

Owns the names only; finding the modules is the job of `deepspeed.utils.z3_leaf_module`.
"""

from pydantic import Field

from deepspeed.runtime.config_types import TextList
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

DEFAULT_LEAF_MODULE_CLASSES: list[str] = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """`leaf_module`: which modules are units; a bare string counts as a list of one."""

    classes: TextList = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_CLASSES))
    """[stage 3] Fully qualified class names. Example: ["my_model.MoEBlock"]."""

    names: TextList = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_NAMES))
    """[stage 3] Exact module names. Example: ["layers.0.mlp"]."""

    name_suffixes: TextList = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_NAME_SUFFIXES))
    """[stage 3] Endings of module names. Example: ["mlp"]."""
