"""Section `expert_parallel`: distributing the experts of a mixture-of-experts model over ranks.

Owns the fields and the rules inside the section. Rules that need the model or the mesh are checked where the experts
are placed.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from deepspeed.runtime.config_types import Flag, Integer, Real, Rule, refuse, to_integer, to_real
from deepspeed.runtime.config_utils import AUTO, DeepSpeedConfigModel

PRESET_NAMES = ("mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3")


def _top_k(value: Any) -> int | str:
    if value == AUTO:
        return AUTO
    number = to_integer(value)
    if number < 1:
        raise refuse('an integer >= 1 or "auto"')
    return number


def _factor(value: Any) -> float | str:
    return AUTO if value == AUTO else to_real(value)


class AutoEPConfig(DeepSpeedConfigModel):
    """`expert_parallel`: AutoEP."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Distribute experts. Example: true."""

    autoep_size: Annotated[Integer, Field(ge=1)] = 1
    """Ranks that share the experts; divides the number of experts of every layer. Example: 4."""

    expert_tensor_parallel_size: Literal[1] = 1
    """Ranks that split one expert; only 1. Example: 1."""

    validate_folding_routing: Flag = False
    """Check routing when expert and tensor parallel ranks overlap (debugging). Example: true."""

    async_split_plan: Flag = False
    """Compute the exchange plan beside other work. Example: true."""

    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"] | None = (
        None
    )
    """Names and routing of a known family. Example: "mixtral"."""

    moe_layer_pattern: str | None = None
    """Regular expression for the layers' module names; describes a model without preset. Example: ".*moe$"."""

    expert_pattern: str | None = None
    """Attribute of a layer that holds its experts. Example: "experts"."""

    router_pattern: str | None = None
    """Attribute of a layer that holds its router. Example: "gate"."""

    use_grouped_mm: Flag = True
    """Multiply all experts in one grouped product. Example: false."""

    disable_triton_grouped_mm: Flag = False
    """Keep the grouped product away from Triton. Example: true."""

    route_norm: Flag | None = None
    """Normalize the chosen scores; absent = from the model. Example: true."""

    route_scale: Real = 1.0
    """Factor on router scores. Example: 1.0."""

    score_apply: Literal["auto", "pre", "post"] = "auto"
    """Whether scores multiply before or after the expert. Example: "post"."""

    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = "auto"
    """How outputs of experts are added up. Example: "weighted_sum"."""

    row_weighting_impl: Literal["auto", "eager", "fused"] = "auto"
    """How rows are weighted; fused needs comm_backend deepep. Example: "eager"."""

    gate_up_impl: Literal["separate", "fused"] = "separate"
    """Whether gate and up projections are one product; fused needs use_grouped_mm. Example: "fused"."""

    comm_backend: Literal["comm", "deepep"] = "comm"
    """Collectives, or the DeepEP package. Example: "deepep"."""

    comm_num_sm: Annotated[Integer, Field(ge=1)] = 12
    """Multiprocessors given to DeepEP. Example: 12."""

    comm_qp_margin: Annotated[Integer, Field(ge=0)] = 4
    """Spare queue pairs of DeepEP. Example: 4."""

    comm_max_tokens_per_rank: Annotated[Integer, Field(ge=0)] = 0
    """Tokens the DeepEP buffers hold; above 0 with deepep. Example: 8192."""

    num_expert_groups: Annotated[Integer, Field(ge=1)] | None = None
    """Groups of experts for group-limited routing. Example: 8."""

    num_limited_groups: Annotated[Integer, Field(ge=1)] | None = None
    """Groups a token may use. Example: 4."""

    score_func: Literal["auto", "softmax", "sigmoid"] = "auto"
    """Score of the router. Example: "sigmoid"."""

    top_k: Annotated[int | str, Rule(_top_k, 'an integer >= 1 or "auto"')] = AUTO
    """Experts per token. Example: 2."""

    load_balance_coeff: None = None
    """Only null is accepted. Example: null."""

    routed_scaling_factor: Annotated[float | str, Rule(_factor, 'a number or "auto"')] = AUTO
    """Factor on the sum of routed experts. Example: 2.5."""

    expert_w1: str | None = None
    """Attribute of the gate (or fused gate and up) weight. Example: "gate_proj"."""

    expert_w2: str | None = None
    """Attribute of the down weight. Example: "down_proj"."""

    expert_w3: str | None = None
    """Attribute of the up weight; null = fused with the gate, absent = from the preset. Example: "up_proj"."""

    num_experts_attr: str | None = None
    """Attribute of model.config with the number of experts. Example: "num_local_experts"."""

    top_k_attr: str | None = None
    """Attribute of model.config with the experts per token. Example: "num_experts_per_tok"."""

    has_shared_experts: Flag | None = None
    """Whether a layer has shared experts; absent = from the preset. Example: true."""

    shared_experts_pattern: str | None = None
    """Attribute of the shared experts. Example: "shared_expert"."""

    shared_experts_gate_pattern: str | None = None
    """Attribute of their gate. Example: "shared_expert_gate"."""

    expert_activation: str | None = None
    """Registered activation; null = from the preset. Example: "swiglu"."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        deepep = self.comm_backend == "deepep"
        for key, bad, expected in (
            ("comm_max_tokens_per_rank", deepep and self.comm_max_tokens_per_rank == 0, "> 0 with comm_backend deepep"),
            (
                "row_weighting_impl",
                self.row_weighting_impl == "fused" and not (deepep and self.autoep_size > 1),
                "fused only with comm_backend deepep and autoep_size > 1",
            ),
            (
                "gate_up_impl",
                self.gate_up_impl == "fused" and not self.use_grouped_mm,
                "fused only with use_grouped_mm true",
            ),
            (
                "num_expert_groups",
                self.num_expert_groups is not None and self.num_limited_groups is None,
                "num_limited_groups beside it",
            ),
            (
                "num_limited_groups",
                (self.num_limited_groups or 0) > (self.num_expert_groups or 0),
                "at most num_expert_groups",
            ),
        ):
            if bad:
                raise PydanticCustomError(
                    "ds_cross",
                    "found {found}; expected {expected}",
                    {"key": key, "found": str(getattr(self, key)), "expected": expected},
                )
        return self
