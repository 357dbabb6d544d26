"""Section `autotuning`: which settings are tried, and how long."""

from typing import Annotated, Any, Literal

from pydantic import Field

from deepspeed.runtime.config_types import Flag, Integer
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

Folder = Annotated[str, Field(min_length=1)]
Count = Annotated[Integer, Field(ge=1)]


class ModelInfoConfig(DeepSpeedConfigModel):
    """`autotuning.model_info`: facts about the model, or the wish to measure them."""

    keeps_unknown_keys = True

    profile: Flag = False
    """Measure the facts in a first run. Example: true."""

    num_params: Integer | None = None
    """Parameters of the model (elements). Example: 125000000."""

    hidden_size: Integer | None = None
    """Width of the model. Example: 768."""

    num_layers: Integer | None = None
    """Layers of the model. Example: 12."""


class AutotuningConfig(DeepSpeedConfigModel):
    """`autotuning`: search for a fast config."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Search. Example: true."""

    fast: Flag = True
    """Tune the micro batch of each stage only. Example: false."""

    results_dir: Folder = "autotuning_results"
    """Folder for results. Example: "autotuning_results"."""

    exps_dir: Folder = "autotuning_exps"
    """Folder for the configs tried. Example: "autotuning_exps"."""

    overwrite: Flag = True
    """Empty both folders first. Example: false."""

    start_profile_step: Annotated[Integer, Field(ge=0)] = 3
    """First step measured. Example: 3."""

    end_profile_step: Annotated[Integer, Field(ge=0)] = 5
    """Last step measured. Example: 5."""

    start_step: Integer | None = None
    """Kept for old configs. Example: null."""

    end_step: Integer | None = None
    """Kept for old configs. Example: null."""

    metric: Literal["latency", "throughput", "flops", "forward", "step"] = "throughput"
    """What is made best. Example: "latency"."""

    metric_path: str | None = None
    """File for the measured value; set for each experiment. Example: null."""

    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    """How the next config is chosen. Example: "model_based"."""

    tuner_early_stopping: Annotated[Integer, Field(ge=0)] = 5
    """Experiments without progress after which the search ends. Example: 5."""

    tuner_num_trials: Count = 50
    """Experiments at most. Example: 50."""

    arg_mappings: dict[str, Any] | None = None
    """Config key -> argument of the script. Example: {"train_micro_batch_size_per_gpu": "--batch"}."""

    max_train_batch_size: Count | None = None
    """Largest batch tried (samples). Example: 512."""

    min_train_batch_size: Count = 1
    """Smallest batch tried (samples). Example: 1."""

    max_train_micro_batch_size_per_gpu: Count = 1024
    """Largest micro batch tried (samples). Example: 64."""

    min_train_micro_batch_size_per_gpu: Count = 1
    """Smallest micro batch tried (samples). Example: 1."""

    num_tuning_micro_batch_sizes: Count = 3
    """Micro batches tried per stage. Example: 3."""

    mp_size: Count = 1
    """Model-parallel ranks. Example: 1."""

    model_info: ModelInfoConfig | None = None
    """Facts about the model. Example: {"profile": true}."""

    model_info_path: str | None = None
    """File with the facts. Example: null."""
