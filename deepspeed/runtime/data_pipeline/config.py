"""Sections `data_efficiency` and the older `curriculum_learning`.

Owns the fields. Does not own samplers and schedulers. Metric schedules keep their schedule-specific keys as a plain
mapping: which keys those are depends on `schedule_type`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from deepspeed.runtime.config_types import Flag, Integer
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

ScheduleType = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]
SCHEDULE_KEYS: dict[str, tuple[str, ...]] = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


def _missing(key: str, why: str) -> PydanticCustomError:
    return PydanticCustomError("ds_cross", "missing; expected it {why}", {"key": key, "why": why})


def _check_schedule(kind: str | None, config: Mapping[str, Any]) -> None:
    for key in SCHEDULE_KEYS.get(kind or "custom", ()):
        if key not in config:
            raise _missing(f"schedule_config.{key}", f"with schedule_type {kind}")


class CurriculumMetricConfig(DeepSpeedConfigModel):
    """One entry of `data_efficiency.data_sampling.curriculum_learning.curriculum_metrics`."""

    keeps_unknown_keys = True

    index_to_sample_path: str | None = None
    """File from metric value to samples. Example: "seqlen/index_to_sample"."""

    index_to_metric_path: str | None = None
    """File from sample to metric value. Example: "seqlen/index_to_metric"."""

    difficulty_type: Literal["value", "percentile"] | None = None
    """Whether difficulties are values or percentiles. Example: "value"."""

    clustering_type: Literal["schedule_based", "single_cluster"] | None = None
    """Whether samples are grouped by difficulty. Example: "schedule_based"."""

    min_difficulty: Integer
    """Difficulty at the start. Example: 8."""

    max_difficulty: Integer
    """Difficulty at the end. Example: 1024."""

    schedule_type: ScheduleType
    """How difficulty grows. Example: "fixed_linear"."""

    schedule_config: dict[str, Any] = Field(default_factory=dict)
    """Keys of the schedule. Example: {"total_curriculum_step": 1000, "difficulty_step": 8}."""

    @model_validator(mode="after")
    def _schedule_complete(self) -> Self:
        _check_schedule(self.schedule_type, self.schedule_config)
        return self


class CurriculumConfig(DeepSpeedConfigModel):
    """`data_efficiency.data_sampling.curriculum_learning`: easy samples first."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Order samples by difficulty. Example: true."""

    data_cluster_path: str | None = None
    """Folder for the sample clusters. Example: "clusters"."""

    curriculum_metrics: dict[str, CurriculumMetricConfig] = Field(default_factory=dict)
    """Metric name -> its schedule; required when enabled. Example: {}."""

    @model_validator(mode="after")
    def _has_metrics(self) -> Self:
        if self.enabled and not self.curriculum_metrics:
            raise _missing("curriculum_metrics", "with curriculum_learning.enabled true")
        return self


class DynamicBatchingConfig(DeepSpeedConfigModel):
    """`data_efficiency.data_sampling.dynamic_batching`: batches of about equal numbers of tokens."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Form batches by tokens. Example: true."""

    lr_scaling_method: Literal["linear", "sqrt", "none"] = "linear"
    """How the learning rate follows the batch size. Example: "sqrt"."""

    min_batch_size: Annotated[Integer, Field(ge=1)] = 1
    """Fewest samples of a batch. Example: 1."""

    max_batch_size: Annotated[Integer, Field(ge=1)] | None = None
    """Most samples of a batch. Example: 64."""

    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = "dataloader"
    """Order in which samples are packed. Example: "seqlen"."""

    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    """Tokens of a batch; required when enabled. Example: 4096."""

    metrics_path: str | None = None
    """File with sample lengths. Example: "seqlen"."""

    verbose: Flag = False
    """Print the batches formed. Example: true."""

    @model_validator(mode="after")
    def _has_limit(self) -> Self:
        if self.enabled and self.max_tokens is None:
            raise _missing("max_tokens", "with dynamic_batching.enabled true")
        return self


class DataSamplingConfig(DeepSpeedConfigModel):
    """`data_efficiency.data_sampling`: which samples come when."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Use the data-efficient sampler. Example: true."""

    num_epochs: Annotated[Integer, Field(ge=1)] = 1000
    """Passes over the data at most. Example: 1."""

    num_workers: Annotated[Integer, Field(ge=0)] = 0
    """Loader processes. Example: 2."""

    pin_memory: Flag = False
    """Page-lock batches. Example: true."""

    curriculum_learning: CurriculumConfig = Field(default_factory=CurriculumConfig)
    """Easy samples first. Example: {"enabled": false}."""

    dynamic_batching: DynamicBatchingConfig = Field(default_factory=DynamicBatchingConfig)
    """Batches by tokens. Example: {"enabled": true, "max_tokens": 4096}."""


class LayerTokenLrConfig(DeepSpeedConfigModel):
    """`random_ltd.layer_token_lr_schedule`."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Only false is implemented. Example: false."""

    total_layer_tokens: Annotated[Integer, Field(ge=0)] | None = None
    """Layer tokens of the whole schedule. Example: 1000000."""

    warmup_type: str | None = None
    """Shape of the warm-up. Example: "linear"."""

    warmup_layer_tokens: Annotated[Integer, Field(ge=0)] | None = None
    """Layer tokens of the warm-up. Example: 10000."""


class RandomLtdConfig(DeepSpeedConfigModel):
    """`data_efficiency.data_routing.random_ltd`: middle layers see a random part of the tokens."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Drop tokens at random. Example: true."""

    total_layer_num: Annotated[Integer, Field(ge=1)] | None = None
    """Layers of the model. Example: 24."""

    random_ltd_layer_num: Annotated[Integer, Field(ge=0)] | None = None
    """Layers that drop tokens. Example: 22."""

    random_ltd_layer_id: list[Integer] | None = None
    """Numbers of those layers. Example: [1, 2, 3]."""

    model_mask_name: str | None = None
    """Keyword of the attention mask in the layer's forward. Example: "attention_mask"."""

    model_type: Literal["decoder", "encoder"] | None = None
    """Kind of model. Example: "decoder"."""

    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = None
    """Order of the dimensions of hidden states. Example: "batch_seq_dim"."""

    random_ltd_schedule: dict[str, Any] = Field(default_factory=dict)
    """min_value, max_value, schedule_type fixed_linear, schedule_config. Example: {"min_value": 128}."""

    layer_token_lr_schedule: LayerTokenLrConfig = Field(default_factory=LayerTokenLrConfig)
    """Learning rate by layer tokens. Example: {"enabled": false}."""

    micro_batch_size: Integer | None = None
    """Filled in by the engine. Example: 4."""

    global_batch_size: Integer | None = None
    """Filled in by the engine. Example: 32."""


class DataRoutingConfig(DeepSpeedConfigModel):
    """`data_efficiency.data_routing`: which tokens go through which layer."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Route tokens. Example: true."""

    random_ltd: RandomLtdConfig = Field(default_factory=RandomLtdConfig)
    """Random layerwise token dropping. Example: {"enabled": true}."""


class DataEfficiencyConfig(DeepSpeedConfigModel):
    """`data_efficiency`: fewer samples and tokens for the same quality."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Turn the blocks below on. Example: true."""

    seed: Integer = 1234
    """Seed of sampling. Example: 1234."""

    data_sampling: DataSamplingConfig = Field(default_factory=DataSamplingConfig)
    """Which samples come when. Example: {"enabled": true}."""

    data_routing: DataRoutingConfig = Field(default_factory=DataRoutingConfig)
    """Which tokens go through which layer. Example: {"enabled": true}."""


class CurriculumLegacyConfig(DeepSpeedConfigModel):
    """`curriculum_learning`: growing sequence length, as earlier releases had it."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Grow the sequence length. Example: true."""

    curriculum_type: str = "seqlen"
    """What grows. Example: "seqlen"."""

    min_difficulty: Integer | None = None
    """Length at the start (tokens). Example: 64."""

    max_difficulty: Integer | None = None
    """Length at the end (tokens). Example: 1024."""

    schedule_type: ScheduleType | None = None
    """How the length grows. Example: "fixed_linear"."""

    schedule_config: dict[str, Any] = Field(default_factory=dict)
    """Keys of the schedule. Example: {"total_curriculum_step": 1000, "difficulty_step": 8}."""

    @model_validator(mode="after")
    def _schedule_complete(self) -> Self:
        if self.enabled:
            for key in ("min_difficulty", "max_difficulty", "schedule_type"):
                if getattr(self, key) is None:
                    raise _missing(key, "with curriculum_learning.enabled true")
            _check_schedule(self.schedule_type, self.schedule_config)
        return self
