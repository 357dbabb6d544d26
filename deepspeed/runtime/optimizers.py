"""From the config's `optimizer` block to an optimizer object, and what the ZeRO core must know about any optimizer.

Owns: which class a type name means, the arguments it gets, and `is_elementwise`. Does not own: the classes, and the
check of a config before anything is built (`config_checks.py`, from the same tables of names).
Invariant: every key of `optimizer.params` reaches the class, or is refused by its full path; none is dropped unless it
asks for what happens anyway.

    type (any case)          class
    Adam, AdamW              FusedAdam; DeepSpeedCPUAdam if the states are in host memory; torch.optim.Adam or AdamW
                             with `torch_adam: true`. Adam has decoupled decay too unless `adam_w_mode: false`.
    Adagrad                  torch.optim.Adagrad; DeepSpeedCPUAdagrad if the states are in host memory
    Lamb                     FusedLamb
    Lion                     FusedLion; DeepSpeedCPULion if the states are in host memory
    Muon                     MuonWithAuxAdam over groups split by the `use_muon` tags
    MuAdam, MuAdamW, MuSGD   torch's Adam, AdamW, SGD over groups with muP rates
    (exact case)             the class of that name in torch.optim
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from deepspeed.ops import mup
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.config_problems import DeepSpeedConfigError, nearest, show
from deepspeed.runtime.optimizer_config import (
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    BUILT_IN_TITLES,
    LAMB_OPTIMIZER,
    LION_OPTIMIZER,
    MUADAM_OPTIMIZER,
    MUADAMW_OPTIMIZER,
    MUON_OPTIMIZER,
    MUSGD_OPTIMIZER,
    ONEBIT_OPTIMIZERS,
    other_name,
)
from deepspeed.runtime.optimizer_config import optimizer_params as known_params
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.muon.tagging import split_muon_groups

Params = dict[str, Any]
Groups = list[dict[str, Any]]

ELEMENTWISE_OPTIMIZERS: frozenset[str] = frozenset(
    f"{cls.__module__}.{cls.__qualname__}"
    for cls in (
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop),
        *(torch.optim.Adamax, torch.optim.Adadelta, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD),
        *(torch.optim.Rprop, FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad),
    )
) | {"apex.optimizers.fused_adam.FusedAdam"}
"""Full names of the classes whose update of an element depends on that element's own gradient and states alone (and on
the group's values and the step count). A parameter may be cut anywhere without changing their numbers."""


def is_elementwise(optimizer: Optimizer, group: dict[str, Any] | None = None) -> bool:
    """Whether the optimizer (or its treatment of one group) is elementwise; False for every class that is not known.

    Subclasses are not known: they may have changed `step`. The Adam groups of `MuonWithAuxAdam` are elementwise.
    """
    cls = type(optimizer)
    if isinstance(optimizer, MuonWithAuxAdam) and group is not None:
        inner = optimizer.adam_optimizer
        return not group["use_muon"] and (inner is None or is_elementwise(inner))
    return f"{cls.__module__}.{cls.__qualname__}" in ELEMENTWISE_OPTIMIZERS


@dataclass(frozen=True)
class _Setting:
    """What a builder may want to know besides the parameters."""

    title: str
    """The type as the user wrote it."""
    host_states: bool
    """The update runs in host memory (optimizer offload)."""
    low_precision_masters: bool
    """The optimizer will see fp16 or bf16 tensors."""

    def refuse(self, key: str, why: str) -> DeepSpeedConfigError:
        return DeepSpeedConfigError(f"optimizer.params.{key}: {self.title}: {why}")


def build_optimizer(
    name: str,
    params_config: Params | None,
    param_groups: Iterable[Any],
    *,
    host_states: bool = False,
    low_precision_masters: bool = False,
) -> Optimizer:
    """Make the optimizer of a config.

    Args:
        name: `optimizer.type`.
        params_config: `optimizer.params`; not modified.
        param_groups: parameters or group dicts; values that a group sets itself win.
        host_states: optimizer offload: the CPU classes are taken.
        low_precision_masters: the master weights are fp16 or bf16, and the caller has put `fp32_optimizer_states` into
            `params_config` to say what the moments are to be; a type without that parameter has moments in the dtype
            of its parameters.

    Raises:
        DeepSpeedConfigError: unknown type or parameter (with the nearest known name), a value the class refuses,
            `max_grad_norm` above 0, a type that is not built yet. All ranks raise the same text.
    """
    params = dict(params_config or {})
    kind = name.lower()
    setting = _Setting(title=name, host_states=host_states, low_precision_masters=low_precision_masters)
    _check_max_grad_norm(setting, params)
    builder = _BUILDERS.get(kind)
    if builder is None:
        builder = _torch_builder(name)
        known = _keywords(getattr(torch.optim, name))
    else:
        known = (known_params(kind) or _MUP_PARAMS[kind]) | _FROM_THE_ENGINE.get(kind, frozenset())
    if low_precision_masters and "fp32_optimizer_states" not in known:
        params.pop("fp32_optimizer_states", None)
    _check_params(setting, params, known)
    if isinstance(params.get("betas"), list):
        params["betas"] = tuple(params["betas"])
    groups = _as_groups(param_groups)
    try:
        return builder(params, groups, setting)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, DeepSpeedConfigError):
            raise
        raise DeepSpeedConfigError(f"optimizer.params: {name} refused {params}: {error}") from error


# ---- builders ------------------------------------------------------------------------------------------------------


def _adam(params: Params, groups: Groups, setting: _Setting) -> Optimizer:
    decoupled = bool(params.pop("adam_w_mode", True)) or setting.title.lower() == ADAMW_OPTIMIZER
    if params.pop("torch_adam", False):
        return _torch_adam(decoupled, params, groups, setting)
    for key in ("foreach", "fused", "maximize", "capturable", "differentiable"):
        if params.pop(key, None):
            raise setting.refuse(key, "is an option of torch's optimizer; add `torch_adam: true`, or leave it out")
    if setting.host_states:
        # What `zero_grad()` does by default; the engine sets gradients to None itself.
        params.pop("set_grad_none", None)
        return DeepSpeedCPUAdam(groups, adamw_mode=decoupled, **params)
    if params.pop("amsgrad", False):
        raise setting.refuse("amsgrad", "the fused Adam has no amsgrad; add `torch_adam: true`")
    return FusedAdam(groups, adam_w_mode=decoupled, **params)


def _torch_adam(decoupled: bool, params: Params, groups: Groups, setting: _Setting) -> Optimizer:
    if not params.pop("bias_correction", True):
        raise setting.refuse("bias_correction", "torch's optimizer always corrects; leave out `torch_adam`")
    if not params.pop("set_grad_none", True):
        raise setting.refuse("set_grad_none", "torch's optimizer takes this at zero_grad(); leave out `torch_adam`")
    _drop_state_dtype(params, setting)
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    if not any(key in params for key in ("foreach", "fused", "capturable", "differentiable")):
        # torch's default on CPU is a loop over parameters, about five times slower. Its fused form pairs wrong elements
        # where a parameter and its gradient have different strides, so only contiguous parameters take it.
        params["fused"] = all(member.is_contiguous() and member.is_floating_point() for member in _members(groups))
    return cls(groups, **params)


def _members(groups: Groups) -> list[torch.Tensor]:
    return [member for group in groups for member in group["params"]]


def _adagrad(params: Params, groups: Groups, setting: _Setting) -> Optimizer:
    if params.pop("amsgrad", False):
        raise setting.refuse("amsgrad", "Adagrad has no amsgrad form; leave it out")
    if not setting.host_states:
        _drop_state_dtype(params, setting)
        return torch.optim.Adagrad(groups, **params)
    for key in ("lr_decay", "initial_accumulator_value", "foreach", "fused", "maximize", "differentiable"):
        if params.pop(key, None):
            raise setting.refuse(key, "not with optimizer states in host memory (offload_optimizer); leave it out")
    return DeepSpeedCPUAdagrad(groups, **params)


def _lamb(params: Params, groups: Groups, setting: _Setting) -> Optimizer:
    return FusedLamb(groups, **params)


def _lion(params: Params, groups: Groups, setting: _Setting) -> Optimizer:
    if setting.host_states:
        params.pop("set_grad_none", None)
        return DeepSpeedCPULion(groups, **params)
    return FusedLion(groups, **params)


def _muon(params: Params, groups: Groups, setting: _Setting) -> Optimizer:
    if params.pop("per_head_muon", False):
        raise setting.refuse("per_head_muon", "not built yet; leave it out to orthogonalise whole matrices")
    decoupled = bool(params.pop("adam_w_mode", True))
    inner = (torch.optim.AdamW if decoupled else torch.optim.Adam) if params.pop("torch_adam", False) else None
    fp32 = bool(params.pop("fp32_optimizer_states", True))
    halves = split_muon_groups(groups, params)
    return MuonWithAuxAdam(halves, adam_optimizer=inner, adam_w_mode=decoupled, fp32_optimizer_states=fp32)


def _mup(make: Callable[..., Optimizer]) -> Callable[[Params, Groups, _Setting], Optimizer]:
    return lambda params, groups, setting: make(groups, **params)


def _onebit(params: Params, groups: Groups, setting: _Setting) -> Optimizer:
    raise DeepSpeedConfigError(
        f"optimizer.type: {show(setting.title)} is a 1-bit optimizer, which is not built yet; use Adam or Lamb"
    )


_BUILDERS: dict[str, Callable[[Params, Groups, _Setting], Optimizer]] = {
    ADAM_OPTIMIZER: _adam,
    ADAMW_OPTIMIZER: _adam,
    ADAGRAD_OPTIMIZER: _adagrad,
    LAMB_OPTIMIZER: _lamb,
    LION_OPTIMIZER: _lion,
    MUON_OPTIMIZER: _muon,
    MUADAM_OPTIMIZER: _mup(mup.MuAdam),
    MUADAMW_OPTIMIZER: _mup(mup.MuAdamW),
    MUSGD_OPTIMIZER: _mup(mup.MuSGD),
    **dict.fromkeys(ONEBIT_OPTIMIZERS, _onebit),
}


def _torch_builder(name: str) -> Callable[[Params, Groups, _Setting], Optimizer]:
    cls = getattr(torch.optim, name, None)
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer:
        return lambda params, groups, setting: cls(groups, **params)
    names = [n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, Optimizer)]
    names = sorted({*BUILT_IN_TITLES, *names} - {"Optimizer"})
    meant = nearest(name, names)
    hint = f"; did you mean {meant!r}?" if meant else ""
    raise DeepSpeedConfigError(
        f"optimizer.type: found {show(name)}, which is neither a built-in optimizer nor a class of torch.optim{hint}; "
        f"known: {', '.join(names)}"
    )


# ---- parameters ----------------------------------------------------------------------------------------------------


def _keywords(cls: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments after the parameters."""
    return frozenset(list(inspect.signature(cls).parameters)[1:])


_MUP_PARAMS: dict[str, frozenset[str]] = {
    MUADAM_OPTIMIZER: _keywords(torch.optim.Adam) | {"decoupled_wd"},
    MUADAMW_OPTIMIZER: _keywords(torch.optim.AdamW) | {"decoupled_wd"},
    MUSGD_OPTIMIZER: _keywords(torch.optim.SGD) | {"decoupled_wd"},
}

_FROM_THE_ENGINE: dict[str, frozenset[str]] = {
    LAMB_OPTIMIZER: frozenset({"fp32_optimizer_states"}),
    MUON_OPTIMIZER: frozenset({"fp32_optimizer_states"}),
}
"""Parameters that a config cannot name, but the precision sections decide."""

_WORDS = frozenset({"ns_method", "line_search_fn", "adjust_lr_fn", "comm_backend_name"})
"""Parameters whose value is a word; any other text is a mistake."""


def _check_params(setting: _Setting, params: Params, known: frozenset[str]) -> None:
    lines = []
    for key, value in params.items():
        if key not in known:
            meant = other_name(key, known) or nearest(key, known)
            hint = f"; did you mean `{meant}`?" if meant else ""
            lines.append(
                f"optimizer.params.{key}: found {show(value)}, which {setting.title} does not take{hint} "
                f"It takes {', '.join(sorted(known))}"
            )
        elif isinstance(value, str) and key not in _WORDS:
            lines.append(f"optimizer.params.{key}: found {show(value)}; expected a value that is not text")
    if lines:
        raise DeepSpeedConfigError("\n".join(lines))


def _check_max_grad_norm(setting: _Setting, params: Params) -> None:
    limit = params.pop("max_grad_norm", 0) or 0
    if limit > 0:
        raise setting.refuse(
            "max_grad_norm", f"found {show(limit)}; clipping is done by the engine: set `gradient_clipping` instead"
        )


def _drop_state_dtype(params: Params, setting: _Setting) -> None:
    """Take out `fp32_optimizer_states` where torch's optimizer does what it says; its states follow the parameters."""
    wanted = params.pop("fp32_optimizer_states", None)
    if wanted is None:
        return
    if bool(wanted) == setting.low_precision_masters:
        dtype = "low precision" if setting.low_precision_masters else "fp32"
        raise setting.refuse(
            "fp32_optimizer_states",
            f"found {show(wanted)}, but torch's class keeps states in the dtype of the master weights, {dtype} here; "
            "leave it out, or use Adam or AdamW without `torch_adam`",
        )


def _as_groups(param_groups: Iterable[Any]) -> Groups:
    """Group dicts with lists of tensors, from groups, (name, tensor) pairs or tensors."""
    listed = list(param_groups)
    if not listed or not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    groups = []
    for group in listed:
        members = group["params"]
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        groups.append({**group, "params": [m[1] if isinstance(m, tuple) else m for m in members]})
    return groups
