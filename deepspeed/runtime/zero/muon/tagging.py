"""Which parameters Muon updates, and the parameter groups that follow from it.

Owns: the `use_muon` tag on parameters and the split of groups into their Muon and Adam halves. Does not own: updates.
Invariant: every parameter of the model carries a tag after `set_optimizer_flags`, also one that is frozen and may be
unfrozen later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.runtime.config_problems import DeepSpeedConfigError
from deepspeed.runtime.optimizer_config import MUON_OPTIMIZER

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

# Matrices whose rows or columns are words, not features: their gradients are sparse in one dim, so a direction with
# equal singular values would move words that did not occur.
_WORD_MATRICES = ("embed", "lm_head")
_MUON_KEYS = ("lr", "momentum", "weight_decay", "ns_method")
_ADAM_KEYS = ("lr", "betas", "eps", "weight_decay")


def set_optimizer_flags(config_class: DeepSpeedConfig, model: torch.nn.Module) -> None:
    """If the config asks for Muon, set `use_muon` on every parameter of the model.

    True for tensors of two or more dims whose name contains neither "embed" nor "lm_head"; a tag that is already there
    is kept, so a model can choose for itself.
    """
    if config_class.optimizer_name != MUON_OPTIMIZER:
        return
    for name, param in model.named_parameters():
        if not hasattr(param, "use_muon"):
            is_word_matrix = any(word in name for word in _WORD_MATRICES)
            param.use_muon = param.ndim >= 2 and not is_word_matrix  # type: ignore[attr-defined]


def split_muon_groups(param_groups: list[dict[str, Any]], params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each group as a "...muon-params" and an "...adam-params" group (an empty half is left out).

    Args:
        param_groups: the client's groups; what they set themselves wins over `params`.
        params: the config's `optimizer.params`; `muon_lr` and `adam_lr` stand in for `lr` in their half.

    Raises:
        DeepSpeedConfigError: a parameter without a `use_muon` tag.
    """
    halves = []
    for group in param_groups:
        members = list(group["params"])
        untagged = [tuple(p.shape) for p in members if not hasattr(p, "use_muon")]
        if untagged:
            raise DeepSpeedConfigError(
                f"optimizer.type: Muon needs a `use_muon` tag on every parameter, but {len(untagged)} of "
                f"{len(members)} have none (first shapes: {untagged[:3]}). deepspeed.initialize tags the parameters of "
                "the model it is given; set param.use_muon = True or False on parameters from elsewhere"
            )
        rest = {k: v for k, v in group.items() if k not in ("params", "muon_lr", "adam_lr")}
        prefix = f"{group['name']}-" if group.get("name") else ""
        for use_muon, keys, own_lr, suffix in (
            (True, _MUON_KEYS, "muon_lr", "muon-params"),
            (False, _ADAM_KEYS, "adam_lr", "adam-params"),
        ):
            chosen = [p for p in members if bool(p.use_muon) == use_muon]
            if not chosen:
                continue
            values = {key: params[key] for key in keys if key in params}
            if own_lr in params:
                values["lr"] = params[own_lr]
            foreign = set(_MUON_KEYS + _ADAM_KEYS) - set(keys)
            values.update({key: value for key, value in rest.items() if key not in foreign})
            if own_lr in group:
                values["lr"] = group[own_lr]
            halves.append({**values, "params": chosen, "use_muon": use_muon, "name": prefix + suffix})
    return halves
