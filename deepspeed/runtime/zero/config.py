"""Section `zero_optimization`: what is sharded, and how it moves.

Owns the fields of ZeRO stages 0 to 3 and their combination rules inside the section. Sizes are elements. Rules that
need other sections live in `runtime/config_checks.py`.
"""

import sys
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from deepspeed.runtime.config_types import Flag, Integer, Rule, Size, refuse, to_integer
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)

ZERO_OPTIMIZATION = "zero_optimization"
DEPRECATED_ALLGATHER_SIZE = 500_000_000
"""allgather_bucket_size of the boolean form of the section when `allgather_size` is absent (elements)."""


class ZeroStageEnum(int, Enum):
    """What is sharded: nothing, optimizer states, gradients too, weights too."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def _stage(value: Any) -> int:
    # Templates quote the stage, and wrappers hand the member over.
    text = value.strip() if isinstance(value, str) else ""
    try:
        number = int(text) if text.isdigit() else to_integer(value)
    except PydanticCustomError:
        raise refuse("0, 1, 2 or 3") from None
    if number not in (0, 1, 2, 3):
        raise refuse("0, 1, 2 or 3")
    return number


def _offload_block(wanted: Any) -> dict[str, Any] | None:
    return {"device": OffloadDeviceEnum.cpu.value} if wanted else None


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """`zero_optimization`: ZeRO stage and its settings."""

    stage: Annotated[ZeroStageEnum, Rule(_stage, "0, 1, 2 or 3")] = ZeroStageEnum.disabled
    """0 replicates everything, 1 shards optimizer states, 2 gradients too, 3 weights too (or as text). Example: 2."""

    contiguous_gradients: Flag = True
    """[stages 1-3] Copy gradients into one flat bucket as they appear: less fragmentation. Example: false."""

    reduce_scatter: Flag = True
    """[stages 1-3] Reduce each gradient to its owner alone instead of to all ranks. Example: false."""

    reduce_bucket_size: Annotated[Size, Field(gt=0)] = 500_000_000
    """Elements of one gradient bucket: memory against number of collectives. Example: 5e7."""

    use_multi_rank_bucket_allreduce: Flag = True
    """[stages 1-2] Reduce the slices of several owners in one collective. Example: false."""

    allgather_partitions: Flag = True
    """[stages 1-2] Rebuild updated weights by all-gather (true) or by broadcasts (false). Example: false."""

    allgather_bucket_size: Annotated[Size, Field(ge=0)] = 500_000_000
    """[stages 1-2] Elements per all-gather after the step. Example: 5e7."""

    overlap_comm: Flag | None = None
    """[stages 1-3] Reduce gradients while backward goes on; absent = true at stage 3, else false. Example: true."""

    compute_grad_norm: Flag = True
    """[stages 1-2] false skips the global gradient norm; needs gradient_clipping 0. Example: false."""

    load_from_fp32_weights: Flag = True
    """[stages 1-3] On load, take master weights from the saved fp32 copy rather than from 16-bit weights.
    Example: false."""

    elastic_checkpoint: Flag = False
    """[stages 1-2] Save optimizer states per group without padding. Example: true."""

    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    """[stage 3] Where parameter shards live outside the device. Example: {"device": "cpu"}."""

    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    """[stages 1-3] Where optimizer states live outside the device. Example: {"device": "cpu"}."""

    zenflow: ZenFlowConfig | None = None
    """[stages 1-3] Asynchronous updates of the less important gradients. Example: {"topk_ratio": 0.1}."""

    sub_group_size: Annotated[Size, Field(ge=0)] = 1_000_000_000
    """[stage 3] Elements of an optimizer sub-group, the unit of step and swap. Example: 1e9."""

    cpu_offload_param: Flag | None = Field(
        default=None,
        json_schema_extra={"deprecated": True, "new_param": "offload_param", "new_param_fn": _offload_block},  # type: ignore[dict-item]
    )
    """[stage 3] Deprecated: use offload_param. Example: true."""

    cpu_offload_use_pin_memory: Flag | None = Field(
        default=None,
        json_schema_extra={
            "deprecated": True,
            "new_param": "offload_optimizer.pin_memory",
            "set_new_param": False,
        },
    )
    """[stages 1-3] Deprecated and without effect: use offload_param.pin_memory, offload_optimizer.pin_memory.
    Example: true."""

    cpu_offload: Flag | None = Field(
        default=None,
        json_schema_extra={"deprecated": True, "new_param": "offload_optimizer", "new_param_fn": _offload_block},  # type: ignore[dict-item]
    )
    """[stages 1-3] Deprecated: use offload_optimizer. Example: true."""

    prefetch_bucket_size: Annotated[Size, Field(ge=0)] = Field(default=50_000_000, alias="stage3_prefetch_bucket_size")
    """[stage 3] Elements fetched ahead of use at a time. Example: 5e7."""

    param_persistence_threshold: Annotated[Size, Field(ge=0)] = Field(
        default=100_000, alias="stage3_param_persistence_threshold"
    )
    """[stage 3] Parameters with fewer elements stay on every rank. Example: 1e5."""

    model_persistence_threshold: Annotated[Size, Field(ge=0)] = Field(
        default=sys.maxsize, alias="stage3_model_persistence_threshold"
    )
    """[stage 3] Most elements that may stay on every rank. Example: 1e8."""

    max_live_parameters: Annotated[Size, Field(ge=0)] = Field(default=1_000_000_000, alias="stage3_max_live_parameters")
    """[stage 3] Gathered elements on one rank above which parameters are released. Example: 1e9."""

    max_reuse_distance: Annotated[Size, Field(ge=0)] = Field(default=1_000_000_000, alias="stage3_max_reuse_distance")
    """[stage 3] Keep a gathered parameter that is used again within this many elements. Example: 1e9."""

    gather_16bit_weights_on_model_save: Flag = Field(default=False, alias="stage3_gather_16bit_weights_on_model_save")
    """[stage 3] Let save_16bit_model gather the whole model. Example: true."""

    module_granularity_threshold: Size = Field(default=0, alias="stage3_module_granularity_threshold")
    """[stage 3] Fetch modules with fewer parameters per descendant as one unit; 0 = off. Example: 50000."""

    use_all_reduce_for_fetch_params: Flag = Field(default=False, alias="stage3_use_all_reduce_for_fetch_params")
    """[stage 3] Fetch by all-reduce of padded buffers instead of all-gather. Example: true."""

    allgather_sequential: Flag = Field(default=False, alias="stage3_allgather_sequential")
    """[stage 3] Fetch parameters one at a time. Example: true."""

    stage3_gather_fp16_weights_on_model_save: Flag = Field(
        default=False,
        json_schema_extra={"deprecated": True, "new_param": "gather_16bit_weights_on_model_save"},
    )
    """[stage 3] Deprecated: use stage3_gather_16bit_weights_on_model_save. Example: true."""

    ignore_unused_parameters: Flag = True
    """[stages 1-3] Accept trainable parameters that got no gradient. Example: false."""

    legacy_stage1: Flag = False
    """[stage 1] The old stage 1 was removed: only false is accepted. Example: false."""

    round_robin_gradients: Flag = False
    """[stages 1-2] Deal parameters out to ranks in turns, so that host copies of gradients run in parallel.
    Example: true."""

    parameter_alignment: Flag = False
    """[stages 1-2] Pad each parameter in the flat buffer to the alignment. Example: true."""

    zero_hpz_partition_size: Annotated[Integer, Field(ge=0)] = Field(default=1)
    """[stage 3] Ranks over which a second copy of the weights is sharded (ZeRO++ hpZ); 1 = off. Example: 8."""

    zero_quantized_weights: Flag = False
    """[stage 3] Quantize weights for the all-gather (ZeRO++ qwZ). Example: true."""

    zero_quantized_nontrainable_weights: Flag = False
    """[stage 3] Quantize frozen weights only for the all-gather. Example: true."""

    zero_quantized_gradients: Flag = False
    """[stage 3] Quantize gradients for the reduction (ZeRO++ qgZ); needs reduce_scatter. Example: true."""

    zeropp_loco_param: dict[str, Any] | None = None
    """[stage 3] Error feedback of qgZ (LoCo), keys err_beta and reset_T.
    Example: {"err_beta": 0.8, "reset_T": 1024}."""

    mics_shard_size: Integer = -1
    """[stage 3] Ranks of a MiCS shard group; -1 = off. Example: 8."""

    mics_hierarchical_params_gather: Flag = False
    """[stage 3] Gather parameters in two hops within MiCS. Example: true."""

    memory_efficient_linear: Flag = True
    """[stage 3] Linear layers that do not keep gathered weights for backward. Example: false."""

    pipeline_loading_checkpoint: Flag = False
    """[stage 3] Load checkpoints rank after rank within a node to bound host memory. Example: true."""

    override_module_apply: Flag = True
    """[stage 3] Let functions given to Module.apply see whole parameters under zero.Init. Example: false."""

    log_trace_cache_warnings: Flag = False
    """[stage 3] Warn when the recorded order of modules becomes invalid. Example: true."""

    enable_sanity_checks: Flag = False
    """[stage 3] Compare ranks at every fetch (debugging, slow). Example: true."""

    save_muon_momentum_buffer_in_memory: Flag = False
    """[stage 3] Keep the Muon momentum in memory rather than on nvme. Example: true."""

    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)
    """[stage 3] Modules fetched as one unit. Example: {"names": ["layers.0.mlp"]}."""

    @model_validator(mode="after")
    def _overlap_follows_stage(self) -> Self:
        if self.overlap_comm is None:  # not validated as an assignment: the user has not set it
            self.__dict__["overlap_comm"] = self.stage == ZeroStageEnum.weights
            self.__pydantic_fields_set__.discard("overlap_comm")
        return self

    @model_validator(mode="after")
    def _section_rules(self) -> Self:
        ratio = self.offload_optimizer.ratio if self.offload_optimizer else 1.0
        if ratio < 1.0 and self.stage != ZeroStageEnum.weights:
            self._clash("offload_optimizer.ratio", ratio, "stage 3, or ratio 1.0")
        if not self.compute_grad_norm and self.stage not in (1, 2):
            self._clash("compute_grad_norm", False, "stage 1 or 2, or compute_grad_norm true")
        if self.legacy_stage1:
            self._clash("legacy_stage1", True, "false: the old stage 1 was removed")
        return self

    def _clash(self, key: str, found: Any, expected: str) -> None:
        raise PydanticCustomError(
            "ds_cross",
            "found {found} with zero_optimization.stage {stage}; expected {expected}",
            {"key": key, "found": str(found).lower(), "stage": int(self.stage), "expected": expected},
        )


def read_zero_config_deprecated(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section that the boolean form `"zero_optimization": true|false` stands for: stage 1 or 0."""
    return {
        "stage": 1 if param_dict[ZERO_OPTIMIZATION] else 0,
        "allgather_bucket_size": param_dict.get("allgather_size", DEPRECATED_ALLGATHER_SIZE),
    }


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """The `zero_optimization` section of a config dictionary."""
    section = param_dict.get(ZERO_OPTIMIZATION, {})
    if isinstance(section, bool):
        section = read_zero_config_deprecated(param_dict)
    return DeepSpeedZeroConfig(**section)
