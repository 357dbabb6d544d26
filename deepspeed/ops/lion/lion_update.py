"""The Lion update over all parameters of a group.

Owns: the arithmetic, in bounded temporary memory. Does not own: groups, state creation.

With m the momentum and g the gradient (Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023,
program 1):

    p *= 1 - lr * weight_decay
    p -= lr * sign(beta1 * m + (1 - beta1) * g)
    m  = beta2 * m + (1 - beta2) * g
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.ops.elementwise import Row, is_direct, run_direct, run_staged, slices
from deepspeed.ops.optimizer_base import Pair, StateOptimizer

# Low precision rows go through fp32: a sign taken from a rounded sum would flip where the two terms nearly cancel.
_NATIVE = (torch.float32, torch.float64)


def lion_numbers(group: dict[str, Any]) -> tuple[float, ...]:
    """What a kernel needs (`Lion` in update_rules.h); `lr` as it is, a tensor stays one."""
    beta1, beta2 = group["betas"]
    return group["lr"], beta1, beta2, group["weight_decay"], 0.0, 0.0, 0.0, 0.0


def lion_update_pairs(optimizer: StateOptimizer, group: dict[str, Any], pairs: Iterable[Pair]) -> None:
    """Update parameters of the group from the gradients beside them; makes `exp_avg` and `step` at first use."""
    direct: dict[tuple[torch.device, torch.dtype], list[Row]] = {}
    beta1, beta2 = group["betas"]
    kernel = _Lion(float(group["lr"]), beta1, beta2, group["weight_decay"])
    for param, grad in pairs:
        if grad.is_sparse:
            raise RuntimeError(
                f"{type(optimizer).__name__} got a sparse gradient for a parameter of shape {tuple(param.shape)}; "
                "use a dense gradient (`sparse=False` in the embedding)"
            )
        state = optimizer.state[param]
        if not state:
            optimizer.check_param(param)
            state["step"] = 0
            state["exp_avg"] = optimizer.new_state(param)
        state["step"] += 1
        row = [param, grad, state["exp_avg"]]
        if is_direct(row, _NATIVE):
            direct.setdefault((param.device, param.dtype), []).append(row)
        else:
            run_staged(kernel, row)
    for rows in direct.values():
        for batch in slices(rows):
            run_direct(kernel, batch)


def lion_update_row(lr: float, beta1: float, beta2: float, weight_decay: float, row: Row) -> None:
    """The update of one row [param, grad, momentum] of any dtype and layout, in place."""
    run_staged(_Lion(lr, beta1, beta2, weight_decay), row)


@dataclass(frozen=True)
class _Lion:
    lr: float
    beta1: float
    beta2: float
    weight_decay: float

    def __call__(self, columns: list[list[torch.Tensor]]) -> None:
        params, grads, exp_avgs = columns
        if self.weight_decay:
            torch._foreach_mul_(params, 1 - self.lr * self.weight_decay)
        directions = torch._foreach_lerp(exp_avgs, grads, 1 - self.beta1)
        torch._foreach_sign_(directions)
        torch._foreach_add_(params, directions, alpha=-self.lr)
        torch._foreach_lerp_(exp_avgs, grads, 1 - self.beta2)
