"""Sections `optimizer` and `scheduler`, and which parameters the built-in types take.

Owns the tables of parameter names, which are data: no optimizer class is imported to check a config. Types outside the
tables (any other torch.optim or torch.optim.lr_scheduler name) are checked by whoever builds them.
"""

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.config_types import Flag
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
ADAGRAD_OPTIMIZER = "adagrad"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
MUADAM_OPTIMIZER = "muadam"
MUADAMW_OPTIMIZER = "muadamw"
MUSGD_OPTIMIZER = "musgd"
ONEBIT_ADAM_OPTIMIZER = "onebitadam"
ZERO_ONE_ADAM_OPTIMIZER = "zerooneadam"
ONEBIT_LAMB_OPTIMIZER = "onebitlamb"
ONEBIT_OPTIMIZERS = (ONEBIT_ADAM_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER)
DEEPSPEED_OPTIMIZERS = [
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER,
    MUADAM_OPTIMIZER,
    MUADAMW_OPTIMIZER,
    MUSGD_OPTIMIZER,
    LION_OPTIMIZER,
    MUON_OPTIMIZER,
    *ONEBIT_OPTIMIZERS,
]
BUILT_IN_TITLES = (
    "Adam",
    "AdamW",
    "Adagrad",
    "Lamb",
    "Lion",
    "Muon",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
    "OneBitAdam",
    "ZeroOneAdam",
    "OneBitLamb",
)
"""The built-in names as the reference page writes them."""
TORCH_ADAM_PARAM = "torch_adam"
ADAM_W_MODE = "adam_w_mode"
ADAM_W_MODE_DEFAULT = True


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


_ADAM = _names(
    "lr betas eps weight_decay bias_correction amsgrad torch_adam adam_w_mode foreach fused "
    "maximize capturable differentiable fp32_optimizer_states set_grad_none max_grad_norm"
)
_ONEBIT = _names(
    "lr freeze_step bias_correction betas eps eps_inside_sqrt weight_decay max_grad_norm amsgrad "
    "cuda_aware comm_backend_name"
)
OPTIMIZER_PARAMS: dict[str, frozenset[str]] = {
    ADAM_OPTIMIZER: _ADAM,
    ADAMW_OPTIMIZER: _ADAM,
    ADAGRAD_OPTIMIZER: _names(
        "lr lr_decay initial_accumulator_value eps weight_decay amsgrad fp32_optimizer_states foreach "
        "fused maximize differentiable max_grad_norm"
    ),
    LAMB_OPTIMIZER: _names(
        "lr bias_correction betas eps eps_inside_sqrt weight_decay max_grad_norm max_coeff min_coeff amsgrad "
        "fp32_optimizer_states"
    ),
    LION_OPTIMIZER: _names("lr betas weight_decay fp32_optimizer_states set_grad_none max_grad_norm"),
    MUON_OPTIMIZER: _names(
        "lr muon_lr adam_lr momentum weight_decay betas eps ns_method per_head_muon adam_w_mode "
        "torch_adam fp32_optimizer_states max_grad_norm"
    ),
    ONEBIT_ADAM_OPTIMIZER: _ONEBIT,
    ZERO_ONE_ADAM_OPTIMIZER: _ONEBIT | _names("var_freeze_step var_update_scaler local_step_scaler local_step_clipper"),
    ONEBIT_LAMB_OPTIMIZER: _ONEBIT | _names("max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold"),
}
"""Lower-case type -> parameter names it takes. MuAdam, MuAdamW and MuSGD pass everything on to the mup package."""

TORCH_OPTIMIZERS = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "LBFGS",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
]
"""Names of torch.optim, for the nearest-name hint; a name that is not here may still exist in the installed torch."""

SCHEDULER_PARAMS: dict[str, frozenset[str]] = {
    "LRRangeTest": _names(
        "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
        "last_batch_iteration"
    ),
    "OneCycle": _names(
        "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
        "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom "
        "cycle_max_mom decay_mom_rate last_batch_iteration"
    ),
    "WarmupLR": _names("warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"),
    "WarmupDecayLR": _names(
        "total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"
    ),
    "WarmupCosineLR": _names(
        "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type last_batch_iteration"
    ),
}
"""Type -> parameter names it takes."""

SCHEDULER_REQUIRED: dict[str, tuple[str, ...]] = {
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
}
"""Parameters without a default."""

OTHER_NAMES: dict[str, str] = {
    "learning_rate": "lr",
    "learningrate": "lr",
    "base_lr": "lr",
    "max_lr": "lr",
    "wd": "weight_decay",
    "l2": "weight_decay",
    "beta": "betas",
    "epsilon": "eps",
    "warmup_steps": "warmup_num_steps",
    "num_warmup_steps": "warmup_num_steps",
    "total_steps": "total_num_steps",
    "num_training_steps": "total_num_steps",
    "min_lr": "warmup_min_lr",
}
"""What other libraries call a parameter -> our name (used when the type takes it)."""


class OptimizerConfig(DeepSpeedConfigModel):
    """`optimizer`: built by the engine unless initialize() is given an optimizer."""

    keeps_unknown_keys = True

    type: str | None = None
    """Built-in name in any case (Adam, AdamW, Adagrad, Lamb, Lion, Muon, MuAdam, MuAdamW, MuSGD, OneBitAdam,
    ZeroOneAdam, OneBitLamb) or the exact name of a torch.optim class. Example: "AdamW"."""

    params: dict[str, Any] | None = None
    """Keyword arguments of the type. Example: {"lr": 1e-3, "weight_decay": 0.01}."""

    legacy_fusion: Flag = False
    """Use the old fused path of the fp16 wrapper. Example: true."""

    @property
    def name(self) -> str | None:
        """`type`, in lower case when it is a built-in name."""
        lower = self.type.lower() if self.type else None
        return lower if lower in DEEPSPEED_OPTIMIZERS else self.type


class SchedulerConfig(DeepSpeedConfigModel):
    """`scheduler`: built by the engine unless initialize() is given one; stepped once per step that was not skipped."""

    keeps_unknown_keys = True

    type: str | None = None
    """LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or the exact name of a class of
    torch.optim.lr_scheduler. Example: "WarmupLR"."""

    params: dict[str, Any] | None = None
    """Keyword arguments of the type. Example: {"warmup_num_steps": 100}."""


def optimizer_params(kind: str) -> frozenset[str] | None:
    """Parameter names the optimizer type takes; None when the tables do not say."""
    return OPTIMIZER_PARAMS.get(kind.lower())


def other_name(key: str, known: frozenset[str] | set[str]) -> str | None:
    """Our name of a parameter that other libraries call `key`, if `known` has it."""
    name = OTHER_NAMES.get(key.strip().lower())
    return name if name in known else None


def section_params(section: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `params` of a raw optimizer or scheduler section, empty when absent."""
    params = (section or {}).get("params")
    return dict(params) if isinstance(params, Mapping) else {}
