"""Section `tensor_parallel`: splitting linear layers over ranks while training.

Owns the fields and the form of user rules. Does not own how rules are applied to a model (`module_inject/`).
"""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from deepspeed.runtime.config_types import Flag, Integer, Rule, TextList, TorchDtype, lower_word, refuse, torch_dtype
from deepspeed.runtime.config_utils import DeepSpeedConfigModel


def _patterns(value: Any) -> list[str]:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(item, str) for item in patterns):
        raise refuse("list of regular expressions")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise refuse(f"list of regular expressions; {pattern!r} is none: {error}") from None
    return list(patterns)


def _shape(value: Any) -> tuple[Any, ...] | None:
    if value is None:
        return None
    expected = "list of integers, one of which may be a list of integers (the sizes of the fused parts)"
    if not isinstance(value, (list, tuple)) or not value:
        raise refuse(expected)
    nested = [item for item in value if isinstance(item, (list, tuple))]
    numbers = [item for item in value if not isinstance(item, (list, tuple))] + [n for part in nested for n in part]
    if len(nested) > 1 or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise refuse(expected)
    return tuple(tuple(item) if isinstance(item, (list, tuple)) else item for item in value)


class TPLayerRuleConfig(DeepSpeedConfigModel):
    """One entry of `tensor_parallel.partition_config.layer_specs`."""

    patterns: Annotated[list[str], Rule(_patterns, "list of regular expressions")]
    """Regular expressions matched against the start of parameter names. Example: [".*q_proj.weight$"]."""

    partition_type: Annotated[str, lower_word("column", "row", "skip")] = "column"
    """column splits outputs, row splits inputs, skip replicates. Example: "row"."""

    shape: Annotated[Any, Rule(_shape, "list of integers, one of which may be a list")] = None
    """Sub-parameter shape of a fused weight. Example: [[4096, 1024, 1024], -1]."""

    partition_dim: Integer | None = None
    """Dimension to split; absent = 0 for column, 1 for row. Example: 0."""

    model_types: TextList | None = None
    """Apply only to these `config.model_type` values. Example: ["llama"]."""

    gather_output: Flag = False
    """All-gather the output of a column layer. Example: true."""

    grad_allreduce: Flag = False
    """Sum the gradient of a replicated layer over the group. Example: true."""


class TPPartitionConfig(DeepSpeedConfigModel):
    """`tensor_parallel.partition_config`: user rules; the first that matches wins."""

    tp_size: Annotated[Integer, Field(ge=1)] = 1
    """Filled from autotp_size. Example: 2."""

    layer_specs: list[TPLayerRuleConfig] = Field(default_factory=list)
    """Ordered rules. Example: [{"patterns": [".*q_proj.weight$"], "partition_type": "column"}]."""

    embedding_partition_dim: Integer = 1
    """Dimension on which embeddings are split. Example: 0."""

    lm_head_patterns: TextList = Field(default_factory=lambda: ["lm_head", "embed_out"])
    """Module names treated as output heads. Example: ["lm_head"]."""

    use_default_specs: Flag = True
    """Add the rules of the preset after the user's. Example: false."""

    strict_mode: Flag = False
    """Fail when a Linear matches no rule. Example: true."""


class TPConfig(DeepSpeedConfigModel):
    """`tensor_parallel.tensor_parallel` (alias `tp`): the group."""

    tp_size: Annotated[Integer, Field(ge=1)] = 1
    """Filled from autotp_size; another value than 1 or autotp_size is refused. Example: 2."""

    tp_grain_size: Annotated[Integer, Field(ge=1)] = 1
    """Shard sizes are multiples of this. Example: 64."""

    mpu: Any = None
    """Model-parallel unit that owns the groups (an object, not JSON). Example: null."""

    tp_group: Any = None
    """Existing process group (an object, not JSON). Example: null."""


class TPTrainingConfig(DeepSpeedConfigModel):
    """`tensor_parallel`: AutoTP training."""

    dtype: TorchDtype = Field(default_factory=lambda: torch_dtype("fp16"))
    """Dtype of the model. Example: "bf16"."""

    autotp_size: Annotated[Integer, Field(ge=0)] = 0
    """Ranks over which layers are split; 0 or 1 = off. Example: 2."""

    tp_overlap_comm: Flag = False
    """Overlap the all-reduce of backward with compute. Example: true."""

    vocab_parallel_lm_head: Flag | None = None
    """Shard the output head without gathering logits; absent = decided from the model. Example: true."""

    vocab_parallel_ce_backend: Literal["torch", "liger"] = "torch"
    """Loss of the sharded head. Example: "liger"."""

    tensor_parallel: TPConfig = Field(default_factory=TPConfig, alias="tp")
    """The group. Example: {"tp_grain_size": 64}."""

    injection_policy_tuple: tuple[Any, ...] | None = None
    """Names of the linears followed by an all-reduce. Example: ["o_proj", "down_proj"]."""

    partition_config: TPPartitionConfig | None = None
    """User rules. Example: {"use_default_specs": true}."""

    preset_model: str | None = None
    """Rules of a known family: llama, bloom, chatglm, mixtral, deepseek_v2, qwen2, phi3. Example: "llama"."""

    keep_module_on_host: Flag = False
    """Shard on the host and leave replaced modules there. Example: true."""

    replace_with_kernel_inject: Flag = Field(default=False, alias="kernel_inject")
    """Present for symmetry with inference. Example: false."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        size = self.tensor_parallel.tp_size
        if size not in (1, self.autotp_size):
            raise PydanticCustomError(
                "ds_cross",
                "found {found} with tensor_parallel.autotp_size {autotp}; expected 1 or the same number",
                {"key": "tensor_parallel.tp_size", "found": size, "autotp": self.autotp_size},
            )
        return self
