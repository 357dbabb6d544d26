"""Optimizers in the maximal update parametrisation: MuAdam, MuAdamW, MuSGD.

Owns: the rates and decays that follow from a parameter's shape. Does not own: base shapes; they come from the `mup`
package (`mup.set_base_shapes(model, base_model)`), which puts an `infshape` on every parameter, or from any object with
the same three methods. The optimizers are our own, so training needs no `mup` import.

With `width_mult` the growth of the fan-in over the base model, and the number of dims that grow (G. Yang et al.,
"Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer", 2022, table 8):

    growing dims      Adam: lr              SGD: lr
    2 (matrix)        lr / width_mult       lr / (growth of fan-in over growth of fan-out)
    1 (vector)        lr                    lr * width_mult
    0                 lr                    lr

The decay is divided by what the rate is multiplied by, so that their product, the shrinking of a weight per step, does
not depend on width; `decoupled_wd=True` leaves it alone, for decay that does not pass through the rate. As in the
package, the decay is 0 unless it is given, for MuAdamW too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class InfShape(Protocol):
    """What is asked of `param.infshape`."""

    def ninf(self) -> int:
        """Number of dims that grow with width."""

    def width_mult(self) -> float:
        """Growth of the fan-in over the base model."""

    def fanin_fanout_mult_ratio(self) -> float:
        """Growth of the fan-in over growth of the fan-out."""


def MuAdam(params: Any, *, decoupled_wd: bool = False, **kwargs: Any) -> torch.optim.Adam:
    """torch.optim.Adam over groups with muP rates. Errors: see `_mup_groups`."""
    return torch.optim.Adam(_mup_groups(params, _adam_factor, "MuAdam", decoupled_wd, kwargs), **kwargs)


def MuAdamW(params: Any, *, decoupled_wd: bool = False, **kwargs: Any) -> torch.optim.AdamW:
    """torch.optim.AdamW over groups with muP rates. Errors: see `_mup_groups`."""
    return torch.optim.AdamW(_mup_groups(params, _adam_factor, "MuAdamW", decoupled_wd, kwargs), **kwargs)


def MuSGD(params: Any, *, decoupled_wd: bool = False, **kwargs: Any) -> torch.optim.SGD:
    """torch.optim.SGD over groups with muP rates. Errors: see `_mup_groups`."""
    return torch.optim.SGD(_mup_groups(params, _sgd_factor, "MuSGD", decoupled_wd, kwargs), **kwargs)


def _adam_factor(shape: InfShape) -> float:
    return 1.0 / shape.width_mult() if shape.ninf() == 2 else 1.0


def _sgd_factor(shape: InfShape) -> float:
    if shape.ninf() == 2:
        return 1.0 / shape.fanin_fanout_mult_ratio()
    return shape.width_mult() if shape.ninf() == 1 else 1.0


_DEFAULT_LR = 1e-3


def _mup_groups(
    params: Any,
    factor_of: Callable[[InfShape], float],
    owner: str,
    decoupled_wd: bool,
    kwargs: dict[str, Any],
) -> list[dict[str, Any]]:
    """Split each group by the factor its parameters' rates get; order within a group is kept.

    Raises:
        ValueError: a parameter without `infshape`, or with more than two growing dims.
    """
    groups = list(params)
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    split = []
    for group in groups:
        members = group["params"]
        by_factor: dict[float, list[torch.Tensor]] = {}
        for param in [members] if isinstance(members, torch.Tensor) else members:
            by_factor.setdefault(factor_of(_infshape(param, owner)), []).append(param)
        lr = group.get("lr", kwargs.get("lr", _DEFAULT_LR))
        decay = group.get("weight_decay", kwargs.get("weight_decay", 0.0))
        for factor, chosen in by_factor.items():
            scaled = {"lr": lr * factor, "weight_decay": decay if decoupled_wd else decay / factor}
            split.append({**group, **scaled, "params": chosen})
    return split


def _infshape(param: torch.Tensor, owner: str) -> InfShape:
    shape = getattr(param, "infshape", None)
    if shape is None:
        raise ValueError(
            f"{owner}: a parameter of shape {tuple(param.shape)} has no `infshape`; call "
            "mup.set_base_shapes(model, base_model) before deepspeed.initialize"
        )
    if shape.ninf() > 2:
        raise ValueError(
            f"{owner}: a parameter of shape {tuple(param.shape)} has {shape.ninf()} dims that grow with width; "
            "the parametrisation is defined for at most 2"
        )
    return shape
