"""Section `compression_training`: quantization, pruning and layer reduction while training.

Owns the shared settings of each technique and the form of its groups. Groups keep their technique's parameters in a
mapping whose required keys are checked here.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from deepspeed.runtime.config_types import Flag, Integer, Real
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

Offset = Annotated[Integer, Field(ge=0)]


class CompressionGroupConfig(DeepSpeedConfigModel):
    """One entry of `different_groups`."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Numbers of this group. Example: {"dense_ratio": 0.5}."""

    modules: list[str] = Field(default_factory=lambda: ["*"])
    """Module name patterns. Example: ["attention.self"]."""

    related_modules: list[list[str]] | None = None
    """Modules that shrink with them. Example: [["attention.output.dense"]]."""


class Technique(DeepSpeedConfigModel):
    """Common form of a technique: shared settings and groups."""

    required_params: ClassVar[tuple[str, ...]] = ()

    different_groups: dict[str, CompressionGroupConfig] = Field(default_factory=dict)
    """Group name -> its modules and numbers; required when the technique is on. Example: {}."""

    def needs_groups(self) -> bool:
        """Whether the technique is on and works by groups."""
        shared = getattr(self, "shared_parameters", None)
        return bool(shared and shared.enabled)

    @model_validator(mode="after")
    def _groups_complete(self) -> Self:
        if self.needs_groups() and not self.different_groups:
            raise PydanticCustomError(
                "ds_cross",
                "missing; expected at least one group with shared_parameters.enabled true",
                {"key": "different_groups"},
            )
        for name, group in self.different_groups.items():
            for key in self.required_params:
                if key not in group.params:
                    raise PydanticCustomError(
                        "ds_cross", "missing; expected a number", {"key": f"different_groups.{name}.params.{key}"}
                    )
        return self


class MixedQuantizeConfig(DeepSpeedConfigModel):
    """`fp16_mixed_quantize`."""

    enabled: Flag = False
    """Blend fp16 and quantized weights. Example: true."""

    quantize_change_ratio: Real = 0.001
    """Change of the blend per step. Example: 0.001."""


class WeightQuantizationShared(DeepSpeedConfigModel):
    """Shared settings of weight quantization."""

    enabled: Flag = False
    """Quantize weights. Example: true."""

    quantizer_kernel: Flag = False
    """Use the kernel. Example: true."""

    schedule_offset: Offset = 0
    """Steps before it starts. Example: 1000."""

    quantize_groups: Annotated[Integer, Field(ge=1)] = 1
    """Groups of a weight, each with its own scale. Example: 1."""

    quantize_verbose: Flag = False
    """Print what is done. Example: true."""

    quantization_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """Range of values. Example: "asymmetric"."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How values are rounded. Example: "stochastic"."""

    quantize_weight_in_forward: Flag = False
    """Quantize in forward (for fp32 training). Example: true."""

    fp16_mixed_quantize: MixedQuantizeConfig = Field(default_factory=MixedQuantizeConfig)
    """Blend of fp16 and quantized weights. Example: {"enabled": true}."""


class WeightQuantization(Technique):
    """`weight_quantization`; groups need start_bits and target_bits."""

    required_params = ("start_bits", "target_bits")

    shared_parameters: WeightQuantizationShared = Field(default_factory=WeightQuantizationShared)
    """Shared settings. Example: {"enabled": true}."""


class ActivationQuantizationShared(DeepSpeedConfigModel):
    """Shared settings of activation quantization."""

    enabled: Flag = False
    """Quantize activations. Example: true."""

    quantization_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """Range of values. Example: "asymmetric"."""

    range_calibration: Literal["dynamic", "static"] = "dynamic"
    """When the range is measured. Example: "static"."""

    schedule_offset: Offset = 1000
    """Steps before it starts. Example: 1000."""


class ActivationQuantization(Technique):
    """`activation_quantization`; groups need bits."""

    required_params = ("bits",)

    shared_parameters: ActivationQuantizationShared = Field(default_factory=ActivationQuantizationShared)
    """Shared settings. Example: {"enabled": true}."""


class PruningShared(DeepSpeedConfigModel):
    """Shared settings of row and channel pruning."""

    enabled: Flag = False
    """Prune. Example: true."""

    method: Literal["l1", "topk"] = "l1"
    """How importance is measured. Example: "topk"."""

    schedule_offset: Offset = 1000
    """Steps before it starts. Example: 1000."""


class SparsePruningShared(PruningShared):
    """Shared settings of sparse pruning."""

    method: Literal["l1", "topk", "snip_momentum"] = "l1"  # type: ignore[assignment]
    """How importance is measured. Example: "snip_momentum"."""

    block_pattern: str = "4x1"
    """Blocks pruned together (snip_momentum). Example: "4x1"."""

    dense_ratio: Annotated[Real, Field(gt=0, lt=1)] = 0.1
    """Share kept (snip_momentum). Example: 0.1."""

    schedule_offset_stride: Annotated[Integer, Field(ge=1)] = 1
    """Steps between prunings (snip_momentum). Example: 1."""

    schedule_offset_end: Offset | None = None
    """Step after which nothing is pruned any more (snip_momentum); absent = schedule_offset. Example: 2000."""

    excluded_modules: list[str] = Field(default_factory=list)
    """Modules left alone (snip_momentum). Example: ["classifier"]."""

    @model_validator(mode="after")
    def _ends_after_start(self) -> Self:
        end = self.schedule_offset_end
        if end is not None and end < self.schedule_offset:
            raise PydanticCustomError(
                "ds_cross",
                "found {end} with schedule_offset {start}; expected at least schedule_offset",
                {"key": "schedule_offset_end", "end": end, "start": self.schedule_offset},
            )
        return self


class SparsePruning(Technique):
    """`sparse_pruning`; groups need dense_ratio; snip_momentum works without groups."""

    required_params = ("dense_ratio",)

    shared_parameters: SparsePruningShared = Field(default_factory=SparsePruningShared)
    """Shared settings. Example: {"enabled": true}."""

    def needs_groups(self) -> bool:
        """Whether the technique is on and works by groups."""
        return self.shared_parameters.enabled and self.shared_parameters.method != "snip_momentum"


class RowPruning(Technique):
    """`row_pruning` and `channel_pruning`; groups need dense_ratio."""

    required_params = ("dense_ratio",)

    shared_parameters: PruningShared = Field(default_factory=PruningShared)
    """Shared settings. Example: {"enabled": true}."""


class HeadPruningShared(PruningShared):
    """Shared settings of head pruning."""

    method: Literal["l1", "topk"] = "topk"
    """How importance is measured. Example: "topk"."""

    num_heads: Annotated[Integer, Field(ge=1)] | None = None
    """Heads of a layer; required when enabled. Example: 12."""

    @model_validator(mode="after")
    def _knows_heads(self) -> Self:
        if self.enabled and self.num_heads is None:
            raise PydanticCustomError(
                "ds_cross", "missing; expected an integer >= 1 with enabled true", {"key": "num_heads"}
            )
        return self


class HeadPruning(Technique):
    """`head_pruning`; groups need dense_ratio."""

    required_params = ("dense_ratio",)

    shared_parameters: HeadPruningShared = Field(default_factory=HeadPruningShared)
    """Shared settings. Example: {"enabled": true}."""


class LayerReduction(DeepSpeedConfigModel):
    """`layer_reduction`: start a shallow student from layers of a teacher."""

    enabled: Flag = False
    """Reduce layers. Example: true."""

    keep_number_layer: Annotated[Integer, Field(ge=1)] | None = None
    """Layers of the student. Example: 6."""

    module_name_prefix: str | None = None
    """Module that holds the layers. Example: "bert.encoder.layer"."""

    teacher_layer: list[Integer] | None = None
    """Teacher layer of each student layer. Example: [1, 3, 5, 7, 9, 11]."""

    other_module_name: list[str] | None = None
    """Further modules copied from the teacher. Example: ["bert.embeddings"]."""


class CompressionConfig(DeepSpeedConfigModel):
    """`compression_training`: all techniques."""

    keeps_unknown_keys = True

    weight_quantization: WeightQuantization = Field(default_factory=WeightQuantization)
    """Quantized weights. Example: {"shared_parameters": {"enabled": true}}."""

    activation_quantization: ActivationQuantization = Field(default_factory=ActivationQuantization)
    """Quantized activations. Example: {"shared_parameters": {"enabled": true}}."""

    sparse_pruning: SparsePruning = Field(default_factory=SparsePruning)
    """Single weights. Example: {"shared_parameters": {"enabled": true}}."""

    row_pruning: RowPruning = Field(default_factory=RowPruning)
    """Rows. Example: {"shared_parameters": {"enabled": true}}."""

    head_pruning: HeadPruning = Field(default_factory=HeadPruning)
    """Attention heads. Example: {"shared_parameters": {"enabled": true}}."""

    channel_pruning: RowPruning = Field(default_factory=RowPruning)
    """Channels. Example: {"shared_parameters": {"enabled": true}}."""

    layer_reduction: LayerReduction = Field(default_factory=LayerReduction)
    """Fewer layers. Example: {"enabled": true}."""

    @property
    def any_enabled(self) -> bool:
        """Whether any technique is on."""
        techniques = [getattr(self, name) for name in type(self).model_fields if name != "layer_reduction"]
        return self.layer_reduction.enabled or any(technique.shared_parameters.enabled for technique in techniques)
