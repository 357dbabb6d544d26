"""Top-level keys that were meant to stand elsewhere, or under another name.

Owns the table of names that say where they belong. A name that could mean several things (`seed`, `project`) is not
judged: clients put keys of their own into a config. Invariant: a key is explained only if it cannot be harmless.
"""

from __future__ import annotations

from functools import lru_cache

from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.optimizer_config import SCHEDULER_PARAMS
from deepspeed.runtime.precision_config import DataTypesConfig, DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

_SECTIONS: tuple[tuple[str, type[DeepSpeedConfigModel]], ...] = (
    ("zero_optimization", DeepSpeedZeroConfig),
    ("zero_optimization.offload_param", DeepSpeedZeroOffloadParamConfig),
    ("zero_optimization.offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
    ("fp16", DeepSpeedFP16Config),
    ("bf16", DeepSpeedBF16Config),
    ("data_types", DataTypesConfig),
    ("activation_checkpointing", DeepSpeedActivationCheckpointingConfig),
)
_TOO_GENERAL = frozenset({"enabled", "device", "ratio", "profile", "pin_memory", "buffer_count", "fast_init"})

_OTHER_NAMES: dict[str, str] = {
    "zero": "zero_optimization",
    "zero_stage": "zero_optimization.stage",
    "micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation": "gradient_accumulation_steps",
    "grad_clip": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "lr": "optimizer.params.lr",
    "learning_rate": "optimizer.params.lr",
    "betas": "optimizer.params.betas",
    "weight_decay": "optimizer.params.weight_decay",
    "tag_validation": "checkpoint.tag_validation",
    "load_universal": "checkpoint.load_universal",
    "tp_size": "tensor_parallel.autotp_size",
    "autotp_size": "tensor_parallel.autotp_size",
    "autoep_size": "expert_parallel.autoep_size",
    "deepcompile": "compile.deepcompile",
}


@lru_cache(maxsize=1)
def places() -> dict[str, str]:
    """Name of a key -> the one path where it belongs."""
    found: dict[str, set[str]] = {}
    for path, model in _SECTIONS:
        for name, field in model.model_fields.items():
            for key in {name, field.alias or name}:
                found.setdefault(key, set()).add(f"{path}.{key}")
    for kind_params in SCHEDULER_PARAMS.values():
        for key in kind_params:
            found.setdefault(key, set()).add(f"scheduler.params.{key}")
    table = {key: min(paths) for key, paths in found.items() if len(paths) == 1 and key not in _TOO_GENERAL}
    return {**table, **_OTHER_NAMES}
