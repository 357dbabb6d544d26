"""Muon: momentum whose direction is orthogonalised, for the matrices of hidden layers; Adam for all other parameters.

Owns: the update rule and the optimizers that apply it to whole matrices. Does not own: the iteration
(`newton_schulz.py`), choosing which parameters are matrices (`tagging.py`).
Invariant: a parameter is updated from its own gradient and state, as a whole: cut into pieces it has no direction.

With g the gradient, m the momentum and O the orthogonalisation (K. Jordan et al., 2024):

    m  = beta * m + (1 - beta) * g
    u  = O(beta * m + (1 - beta) * g)  (Nesterov)  or  O(m),  times sqrt(max(1, rows / cols))
    p  = (1 - lr * weight_decay) * p - lr * u
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.ops.adam.adam_update import AdamRule, adam_update_group
from deepspeed.ops.optimizer_base import StateOptimizer, run_closure
from deepspeed.runtime.zero.muon.newton_schulz import NS_METHODS as NS_METHODS
from deepspeed.runtime.zero.muon.newton_schulz import (
    check_ns_method,
    zeropower_via_gram_newtonschulz,
    zeropower_via_newtonschulz5,
)
from deepspeed.runtime.zero.muon.newton_schulz import ns_compute_dtype as ns_compute_dtype

MUON_DEFAULTS: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0, "ns_method": "gram"}
ADAM_DEFAULTS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0}


def muon_update(
    grad: torch.Tensor,
    momentum: torch.Tensor,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    ns_method: str = "gram",
    is_expert_group: bool = False,
    num_heads: int | None = None,
) -> torch.Tensor:
    """Advance `momentum` in place and return the direction of the step.

    Args:
        grad: (rows, cols); (experts, rows, cols) is a batch of matrices; filters (out, in, *kernel) with more dims are
            taken as the matrix (out, in * kernel).
        momentum: as `grad`; updated in place.
        beta: decay of the momentum.
        ns_steps: Newton–Schulz steps.
        nesterov: look ahead by one step.
        ns_method: "gram" or "standard".
        is_expert_group: the leading dim counts experts; demands three dims.
        num_heads: orthogonalise each of this many blocks of rows by itself.

    Returns:
        Direction of the shape of `grad`, fp32; to be subtracted times the learning rate.

    Raises:
        ValueError: fewer than two dims, an unknown method, rows that do not split into heads.
    """
    if grad.ndim < 2:
        raise ValueError(
            f"Muon updates whole matrices; got a gradient of shape {tuple(grad.shape)}. Tag the parameter with "
            "`use_muon = False`, so that it is updated by Adam"
        )
    if is_expert_group and grad.ndim != 3:
        raise ValueError(f"a group of experts needs gradients (experts, rows, cols); got {tuple(grad.shape)}")
    grad = grad.to(momentum.dtype)
    momentum.lerp_(grad, 1 - beta)
    direction = grad.lerp(momentum, beta) if nesterov else momentum
    matrix = direction.reshape(len(direction), -1) if direction.ndim > 3 else direction
    if num_heads is not None:
        rows, cols = matrix.shape[-2:]
        if rows % num_heads:
            raise ValueError(f"{rows} rows do not split into num_heads = {num_heads} blocks")
        matrix = matrix.reshape(*matrix.shape[:-2], num_heads, rows // num_heads, cols)
    check_ns_method(ns_method)
    orthogonalise = zeropower_via_gram_newtonschulz if ns_method == "gram" else zeropower_via_newtonschulz5
    scale = max(1.0, matrix.size(-2) / matrix.size(-1)) ** 0.5
    return orthogonalise(matrix, ns_steps).float().mul_(scale).reshape(grad.shape)


def adam_update(
    grad: torch.Tensor,
    buf1: torch.Tensor,
    buf2: torch.Tensor,
    step: int,
    betas: tuple[float, float],
    eps: float,
) -> torch.Tensor:
    """Advance the Adam moments `buf1`, `buf2` in place; return the bias-corrected direction of step `step` (from 1)."""
    buf1.lerp_(grad, 1 - betas[0])
    buf2.lerp_(grad.square(), 1 - betas[1])
    return buf1 / (1 - betas[0] ** step) / ((buf2 / (1 - betas[1] ** step)).sqrt() + eps)


class _MuonBase(StateOptimizer):
    """Applies `muon_update` to the parameters of a group."""

    def __init__(self, params: Any, defaults: dict[str, Any], *, fp32_optimizer_states: bool = True) -> None:
        super().__init__(params, defaults, fp32_optimizer_states=fp32_optimizer_states)

    def _muon_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for param in params:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                self.check_param(param)
                state["momentum_buffer"] = self.new_state(param)
            direction = muon_update(
                param.grad, state["momentum_buffer"], beta=group["momentum"], ns_method=group["ns_method"]
            )
            keep = 1 - group["lr"] * group["weight_decay"]
            if param.dtype == direction.dtype:
                param.mul_(keep).sub_(direction * group["lr"])
            else:
                # One rounding to the dtype of the parameter instead of two.
                param.copy_(param.float().mul_(keep).sub_(direction * group["lr"]))


class SingleDeviceMuon(_MuonBase):
    """Muon for parameters that are all matrices and all present on this rank. State: `momentum_buffer`.

    Args:
        params: matrices, or groups of them.
        lr: in units of the spectral norm of the update.
        weight_decay: decoupled.
        momentum: decay of the momentum.
        ns_method: "gram" or "standard".
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        weight_decay: float = 0,
        momentum: float = 0.95,
        ns_method: str = "gram",
    ) -> None:
        check_ns_method(ns_method)
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_method": ns_method}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; parameters without a gradient stay as they are."""
        loss = run_closure(closure)
        for group in self.param_groups:
            self._muon_group(group, group["params"])
        return loss


class _Shared(_MuonBase):
    """Adds sharing of the work: each rank updates some of the matrices and sends them to the others."""

    def _shared_muon_group(self, group: dict[str, Any]) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world == 1:
            self._muon_group(group, group["params"])
            return
        # Largest first, in turn: the ranks get about the same work. All ranks sort the same shapes the same way.
        ordered = sorted(group["params"], key=lambda p: -p.numel())
        self._muon_group(group, ordered[dist.get_rank() :: world])
        for index, param in enumerate(ordered):
            dist.broadcast(param, src=index % world)


class Muon(_Shared):
    """`SingleDeviceMuon` for parameters that every rank holds with equal gradients; the work is shared by all ranks.

    A rank holds the momentum of the matrices it updates, so a checkpoint needs the state of every rank.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        weight_decay: float = 0,
        momentum: float = 0.95,
        ns_method: str = "gram",
    ) -> None:
        check_ns_method(ns_method)
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_method": ns_method}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; every rank calls it, with gradients for the same parameters."""
        loss = run_closure(closure)
        for group in self.param_groups:
            self._shared_muon_group(group)
        return loss


class SingleDeviceMuonWithAuxAdam(_MuonBase):
    """Muon for groups with `use_muon=True`, AdamW for groups with `use_muon=False`.

    Args:
        param_groups: dicts with `params`, `use_muon`, and `lr, momentum, weight_decay, ns_method` (Muon) or
            `lr, betas, eps, weight_decay` (Adam). State: `momentum_buffer`, or `exp_avg, exp_avg_sq, step`.

    Raises:
        ValueError: a group without `use_muon`, or with an unknown method.
    """

    adam_w_mode = True

    def __init__(self, param_groups: Any, *, fp32_optimizer_states: bool = True) -> None:
        super().__init__(check_groups(param_groups), {}, fp32_optimizer_states=fp32_optimizer_states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the defaults of its half for values it does not have."""
        (group,) = check_groups([param_group])
        super().add_param_group({**(MUON_DEFAULTS if group["use_muon"] else ADAM_DEFAULTS), **group})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; parameters without a gradient stay as they are."""
        loss = run_closure(closure)
        for group in self.param_groups:
            if group["use_muon"]:
                self._muon_group(group, group["params"])
            else:
                self._adam_group(group)
        return loss

    def _adam_group(self, group: dict[str, Any]) -> None:
        adam_update_group(self, group, AdamRule.of_group(group, decoupled=self.adam_w_mode))


class MuonWithAuxAdam(_Shared, SingleDeviceMuonWithAuxAdam):
    """`SingleDeviceMuonWithAuxAdam` with the work on matrices shared by all ranks, as in `Muon`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; every rank calls it, with gradients for the same parameters."""
        loss = run_closure(closure)
        for group in self.param_groups:
            if group["use_muon"]:
                self._shared_muon_group(group)
            else:
                self._adam_group(group)
        return loss


def check_groups(param_groups: Any) -> list[dict[str, Any]]:
    """The groups as a list.

    Raises:
        ValueError: a group without `use_muon`, or with an unknown `ns_method`.
    """
    groups = list(param_groups)
    for index, group in enumerate(groups):
        if not isinstance(group, dict) or "use_muon" not in group:
            found = sorted(group) if isinstance(group, dict) else type(group).__name__
            raise ValueError(
                f"Muon: parameter group {index} has no `use_muon` (found {found}); mark each group with "
                "use_muon=True (matrices of hidden layers) or use_muon=False (everything else)"
            )
        if group["use_muon"]:
            check_ns_method(group.get("ns_method", MUON_DEFAULTS["ns_method"]))
    return groups
