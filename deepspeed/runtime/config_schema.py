"""The root of the config: every top-level key, as one pydantic model of sections.

Owns the top-level keys and their defaults. Sections live beside their feature. Does not own parsing
(`config_walk.py`), the rules between sections (`config_checks.py`) or the attributes the engine reads (`config.py`).
"""

import math
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from deepspeed.runtime.config_misplaced import places
from deepspeed.runtime.config_problems import Problem, show
from deepspeed.runtime.config_types import (
    Flag,
    FloatDtype,
    Integer,
    Real,
    Rule,
    lower_word,
    refuse,
    to_integer,
    to_real,
)
from deepspeed.runtime.config_utils import DeepSpeedConfigModel, lazy_section
from deepspeed.runtime.hybrid_engine_config import HybridEngineConfig
from deepspeed.runtime.model_checkpointing.config import CheckpointConfig
from deepspeed.runtime.optimizer_config import OptimizerConfig, SchedulerConfig
from deepspeed.runtime.pipe.config import PipelineConfig
from deepspeed.runtime.precision_config import (
    DataTypesConfig,
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    TorchAutocastConfig,
)
from deepspeed.runtime.swap_tensor.aio_config import AioConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import TimersConfig

if TYPE_CHECKING:
    from deepspeed.autotuning.config import AutotuningConfig
    from deepspeed.compression.config import CompressionConfig
    from deepspeed.elasticity.config import ElasticityConfigModel
    from deepspeed.inference.quantization_config import WeightQuantConfig
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.nebula.config import NebulaConfig
    from deepspeed.runtime.data_pipeline.config import CurriculumLegacyConfig, DataEfficiencyConfig
    from deepspeed.runtime.early_config import (
        AmpConfig,
        ProgressiveLayerDropConfig,
        QuantizeTrainingConfig,
        SparseAttentionConfig,
    )
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
else:  # sections few configs have: their classes are built when one is met
    AutotuningConfig = lazy_section("deepspeed.autotuning.config", "AutotuningConfig")
    CompressionConfig = lazy_section("deepspeed.compression.config", "CompressionConfig")
    ElasticityConfigModel = lazy_section("deepspeed.elasticity.config", "ElasticityConfigModel")
    WeightQuantConfig = lazy_section("deepspeed.inference.quantization_config", "WeightQuantConfig")
    AutoEPConfig = lazy_section("deepspeed.module_inject.auto_ep_config", "AutoEPConfig")
    NebulaConfig = lazy_section("deepspeed.nebula.config", "NebulaConfig")
    CurriculumLegacyConfig = lazy_section("deepspeed.runtime.data_pipeline.config", "CurriculumLegacyConfig")
    DataEfficiencyConfig = lazy_section("deepspeed.runtime.data_pipeline.config", "DataEfficiencyConfig")
    AmpConfig = lazy_section("deepspeed.runtime.early_config", "AmpConfig")
    ProgressiveLayerDropConfig = lazy_section("deepspeed.runtime.early_config", "ProgressiveLayerDropConfig")
    QuantizeTrainingConfig = lazy_section("deepspeed.runtime.early_config", "QuantizeTrainingConfig")
    SparseAttentionConfig = lazy_section("deepspeed.runtime.early_config", "SparseAttentionConfig")
    TPTrainingConfig = lazy_section("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig")

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _clipping(value: Any) -> float:
    # Wrappers write true for 1.0, and null for "no clipping".
    if value is None:
        return 0.0
    return float(value) if isinstance(value, bool) else to_real(value)


def _print_interval(value: Any) -> int | None:
    # Wrappers write inf to silence the line.
    if value is None or value is False or (isinstance(value, float) and math.isinf(value) and value > 0):
        return None
    steps = to_integer(value)
    if steps < 0:
        raise refuse("integer >= 0 or inf")
    return steps or None


class ConfigSections(DeepSpeedConfigModel):
    """Top-level keys."""

    keeps_unknown_keys = True

    @classmethod
    def explain_unknown_key(cls, key: str, value: Any) -> Problem | None:
        """A key that belongs into a section, or that other libraries use for one of ours."""
        place = places().get(key)
        if place is None:
            return None
        return Problem(key, f"unknown at top level (found {show(value)}); nearest known key: {place}", "move it there")

    # ---- batch sizes ----

    train_batch_size: Annotated[Integer, Field(gt=0)] | None = None
    """Samples per optimizer step over all data-parallel ranks; must equal micro batch x accumulation x ranks.
    Absent = the product of the other two. Example: 32."""

    train_micro_batch_size_per_gpu: Annotated[Integer, Field(gt=0)] | None = None
    """Samples per forward on each rank. Absent = from the other two. Example: 4."""

    gradient_accumulation_steps: Annotated[Integer, Field(gt=0)] | None = None
    """Forwards and backwards per optimizer step. Absent = from the other two (1 with only one of them).
    Example: 8."""

    managed_gradient_accumulation: Flag = True
    """false: the training loop decides where a step ends by calling step(). Example: false."""

    sequence_parallel_size: Annotated[Integer, Field(ge=1)] | None = None
    """Ranks that share one sequence; with data_parallel_size a device mesh is built. Example: 2."""

    data_parallel_size: Annotated[Integer, Field(ge=1)] | None = None
    """Data-parallel ranks beside sequence_parallel_size. Example: 4."""

    dataloader_drop_last: Flag = False
    """Drop the last incomplete batch of the built-in data loader. Example: true."""

    # ---- optimizer and schedule ----

    optimizer: OptimizerConfig | None = None
    """The optimizer to build. Example: {"type": "AdamW", "params": {"lr": 1e-3}}."""

    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule to build. Example: {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}."""

    zero_allow_untested_optimizer: Flag = False
    """[stages 1-3] Accept optimizer classes outside the tested list; a written false refuses them. Example: true."""

    zero_force_ds_cpu_optimizer: Flag = True
    """[stages 1-3 with offload_optimizer] Insist on the built-in host optimizers, where written. Example: false."""

    # ---- communication and gradient scaling ----

    communication_data_type: FloatDtype | None = None
    """Dtype in which gradients are reduced; absent = dtype of the weights. Example: "fp32"."""

    seq_parallel_communication_data_type: FloatDtype = "fp32"
    """Dtype in which gradients are reduced when ranks share sequences. Example: "bf16"."""

    gradient_allreduce_op: Annotated[str, lower_word("mean", "sum")] = "mean"
    """Average (mean) or add (sum) gradients over data-parallel ranks; sum is not for stage 3. Example: "sum"."""

    prescale_gradients: Flag = False
    """Divide gradients before the reduction instead of after it. Example: true."""

    gradient_predivide_factor: Annotated[Real, Field(gt=0)] = 1.0
    """With prescale_gradients: divide by this before the reduction, by the rest after it. Example: 2.0."""

    gradient_clipping: Annotated[float, Rule(_clipping, "number >= 0"), Field(ge=0)] = 1.0
    """Largest global L2 norm of the gradients; larger ones are scaled down to it. 0 turns clipping off. On by
    default. Example: 0.5."""

    sparse_gradients: Flag = False
    """Reduce gradients of sparse embeddings as indices and rows. Example: true."""

    disable_allgather: Flag = False
    """Accepted for old configs; changes nothing. Example: false."""

    use_data_before_expert_parallelism: Flag = False
    """Number ranks data-parallel first, expert-parallel second. Example: true."""

    # ---- number formats ----

    fp16: DeepSpeedFP16Config = Field(default_factory=DeepSpeedFP16Config)
    """fp16 training. Example: {"enabled": true}."""

    bf16: DeepSpeedBF16Config = Field(default_factory=DeepSpeedBF16Config, alias="bfloat16")
    """bf16 training. Example: {"enabled": true}."""

    torch_autocast: TorchAutocastConfig = Field(default_factory=TorchAutocastConfig)
    """Forward under torch.autocast. Example: {"enabled": true, "dtype": "bfloat16"}."""

    data_types: DataTypesConfig = Field(default_factory=DataTypesConfig)
    """Dtypes beside the one of the weights. Example: {"grad_accum_dtype": "fp32"}."""

    amp: AmpConfig | None = None
    """Apex AMP. Example: {"enabled": true, "opt_level": "O1"}."""

    # ---- sharding and parallelism ----

    zero_optimization: DeepSpeedZeroConfig = Field(default_factory=DeepSpeedZeroConfig)
    """ZeRO. Example: {"stage": 2}."""

    tensor_parallel: TPTrainingConfig | None = None
    """AutoTP training. Example: {"autotp_size": 2}."""

    expert_parallel: AutoEPConfig | None = None
    """AutoEP training. Example: {"enabled": true, "autoep_size": 2}."""

    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    """Pipeline parallelism. Example: {"activation_checkpoint_interval": 1}."""

    # ---- memory, files, checkpoints ----

    activation_checkpointing: DeepSpeedActivationCheckpointingConfig = Field(
        default_factory=DeepSpeedActivationCheckpointingConfig
    )
    """Activation checkpointing. Example: {"partition_activations": true}."""

    aio: AioConfig = Field(default_factory=AioConfig)
    """Files on nvme. Example: {"queue_depth": 16}."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Saving and loading. Example: {"tag_validation": "Fail"}."""

    datastates_ckpt: Any = False
    """Settings of the DataStates checkpoint engine; any value but false turns it on.
    Example: {"host_cache_size": 16}."""

    nebula: NebulaConfig | None = None
    """Nebula checkpoints. Example: {"enabled": true}."""

    # ---- compilation ----

    compile: CompileConfig = Field(default_factory=CompileConfig)
    """Graph passes. Example: {"deepcompile": true}."""

    graph_harvesting: Flag = False
    """Capture the step in a CUDA graph. Example: true."""

    # ---- what is printed and measured ----

    steps_per_print: Annotated[int | None, Rule(_print_interval, "integer >= 0, inf or null")] = None
    """Print a progress line every this many steps; absent, 0 or inf = never. Example: 10."""

    wall_clock_breakdown: Flag = False
    """Time forward, backward and step. Example: true."""

    memory_breakdown: Flag = False
    """Report memory at fixed points of a step. Example: true."""

    dump_state: Flag = False
    """Print the attributes of the engine once it is built. Example: true."""

    log_level: Annotated[str, lower_word("debug", "info", "warning", "error", "critical")] | None = None
    """Level of the logger: debug, info, warning, error, critical. Example: "info"."""

    vocabulary_size: Annotated[Integer, Field(gt=0)] | None = None
    """Only used to warn when it is no multiple of 8. Example: 50304."""

    disable_python_gc: Flag = False
    """Switch Python's cyclic garbage collector off while engines live. Example: true."""

    comms_logger: CommsLoggerConfig = Field(default_factory=CommsLoggerConfig)
    """Log of collectives. Example: {"enabled": true}."""

    timers: TimersConfig = Field(default_factory=TimersConfig)
    """Timers. Example: {"throughput": {"enabled": false}}."""

    flops_profiler: DeepSpeedFlopsProfilerConfig = Field(default_factory=DeepSpeedFlopsProfilerConfig)
    """Operation counts. Example: {"enabled": true}."""

    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    """TensorBoard events. Example: {"enabled": true}."""

    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Weights & Biases. Example: {"enabled": true}."""

    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)
    """CSV files. Example: {"enabled": true}."""

    comet: CometConfig = Field(default_factory=CometConfig)
    """Comet. Example: {"enabled": true}."""

    # ---- data, tuning, generation, compression ----

    data_efficiency: DataEfficiencyConfig | None = None
    """Curriculum, dynamic batches, random-LTD. Example: {"enabled": true}."""

    curriculum_learning: CurriculumLegacyConfig | None = None
    """Sequence-length curriculum of earlier releases. Example: {"enabled": true}."""

    autotuning: AutotuningConfig | None = None
    """Autotuning. Example: {"enabled": true}."""

    elasticity: ElasticityConfigModel | None = None
    """Elastic batch sizes. Example: {"enabled": true}."""

    hybrid_engine: HybridEngineConfig = Field(default_factory=HybridEngineConfig)
    """Training and generation in one engine. Example: {"enabled": true}."""

    weight_quantization: WeightQuantConfig | None = None
    """ZeRO-Inference weight quantization. Example: {"num_bits": 8}."""

    compression_training: CompressionConfig | None = None
    """Compression. Example: {"layer_reduction": {"enabled": true}}."""

    quantize_training: QuantizeTrainingConfig | None = None
    """Eigenvalues for quantization-aware training. Example: {"eigenvalue": {"enabled": true}}."""

    eigenvalue: dict[str, Any] | None = None
    """Old place of quantize_training.eigenvalue. Example: {"enabled": true}."""

    sparse_attention: SparseAttentionConfig | None = None
    """Block-sparse attention. Example: {"mode": "fixed"}."""

    progressive_layer_drop: ProgressiveLayerDropConfig | None = None
    """Progressive layer dropping. Example: {"enabled": true}."""
