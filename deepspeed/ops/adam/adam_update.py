"""The Adam and AdamW update over all parameters of a group: torch's fused kernels, made safe for any mix of tensors.

Owns: grouping by device, dtype and step count, bias correction, the fused calls. Does not own: groups, state creation.
Invariant: where torch's fused optimizer is defined (one dtype, contiguous tensors) the result equals it bit by bit.

With m, v the moments, g the gradient, t the step (Kingma and Ba, "Adam", ICLR 2015; Loshchilov and Hutter, "Decoupled
Weight Decay Regularization", ICLR 2019):

    g += weight_decay * p                       if not decoupled
    p *= 1 - lr * weight_decay                  if decoupled
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

Without bias correction the two brackets 1 - beta^t are 1, which is their value at t = infinity: the kernels are given
that step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.ops.elementwise import Row, run_staged
from deepspeed.ops.optimizer_base import Pair, StateOptimizer, gradients


@dataclass(frozen=True)
class AdamRule:
    """Hyper-parameters of one call. `lr` may be a tensor, as in torch."""

    lr: float | torch.Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool
    amsgrad: bool = False

    @classmethod
    def of_group(cls, group: dict[str, Any], *, decoupled: bool) -> AdamRule:
        """The rule of a parameter group; groups may lack the optional keys, e.g. those of another optimizer's file."""
        beta1, beta2 = group["betas"]
        return cls(
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=decoupled,
            bias_correction=group.get("bias_correction", True),
            amsgrad=group.get("amsgrad", False),
        )

    def numbers(self, step: int) -> tuple[float, ...]:
        """What a kernel needs at this step (`Adam` in update_rules.h); `lr` as it is, a tensor stays one."""
        bias1, bias2 = (1 - self.beta1**step, 1 - self.beta2**step) if self.bias_correction else (1.0, 1.0)
        flags = 1 * self.decoupled + 2 * self.amsgrad
        return (
            self.lr,  # type: ignore[return-value]
            self.beta1,
            self.beta2,
            self.eps,
            self.weight_decay,
            bias1,
            math.sqrt(bias2),
            flags,
        )

    @property
    def state_keys(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")


def adam_update_group(optimizer: StateOptimizer, group: dict[str, Any], rule: AdamRule) -> None:
    """Update every parameter of the group that has a gradient, see `adam_update_pairs`."""
    adam_update_pairs(optimizer, gradients(group["params"]), rule)


def adam_update_pairs(optimizer: StateOptimizer, pairs: Iterable[Pair], rule: AdamRule) -> None:
    """Update parameters of one group from the gradients beside them; makes states and `step` at first use.

    Parameters of one device, dtype and step count go to one fused call; the others one by one through fp32 scratch.
    """
    # This loop is what an optimizer step over many small tensors costs, so it looks at each attribute once.
    # (dtype, device index, step) -> columns [params, grads, exp_avgs, exp_avg_sqs(, max_exp_avg_sqs)]
    batches: dict[tuple[torch.dtype, int, int], list[list[torch.Tensor]]] = {}
    amsgrad = rule.amsgrad
    states = optimizer.state
    for param, grad in pairs:
        if grad.is_sparse:
            raise RuntimeError(
                f"{type(optimizer).__name__} got a sparse gradient for a parameter of shape {tuple(param.shape)}; "
                "use a dense gradient (`sparse=False` in the embedding) or torch.optim.SparseAdam"
            )
        state = states[param]
        if not state:
            _make_state(optimizer, param, state, amsgrad)
        state["step"] = step = state["step"] + 1
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        dtype = param.dtype
        direct = (
            dtype is grad.dtype
            and dtype is exp_avg.dtype
            and param.is_contiguous()
            and grad.is_contiguous()
            and exp_avg.is_contiguous()
            and exp_avg_sq.is_contiguous()
        )
        if not direct:
            row: Row = [param, grad, exp_avg, exp_avg_sq]
            if amsgrad:
                row.append(state["max_exp_avg_sq"])
            run_staged(_Fused(rule, _step_tensor(rule, step, param.device)), row)
            continue
        key = (dtype, param.get_device(), step)
        columns = batches.get(key)
        if columns is None:
            columns = batches[key] = [[] for _ in range(5 if amsgrad else 4)]
        columns[0].append(param)
        columns[1].append(grad)
        columns[2].append(exp_avg)
        columns[3].append(exp_avg_sq)
        if amsgrad:
            columns[4].append(state["max_exp_avg_sq"])
    for (_, _, step), columns in batches.items():
        _Fused(rule, _step_tensor(rule, step, columns[0][0].device))(columns)


def adam_update_columns(rule: AdamRule, step: int, columns: list[list[torch.Tensor]]) -> None:
    """Update rows of any dtype and layout at one step; columns: [params, grads, exp_avgs, exp_avg_sqs]."""
    for row in zip(*columns, strict=True):
        run_staged(_Fused(rule, _step_tensor(rule, step, row[0].device)), list(row))


def _make_state(optimizer: StateOptimizer, param: torch.Tensor, state: dict[str, Any], amsgrad: bool) -> None:
    optimizer.check_param(param)
    state["step"] = 0
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq"):
        state[key] = optimizer.new_state(param)


@dataclass(frozen=True)
class _Fused:
    """One call of torch's fused kernel; `step` is a 0-dim fp32 tensor on the device of the parameters."""

    rule: AdamRule
    step: torch.Tensor

    def __call__(self, columns: list[list[torch.Tensor]]) -> None:
        rule = self.rule
        params, grads, exp_avgs, exp_avg_sqs, *rest = columns
        kernel = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
        kernel(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            rest[0] if rest else [],
            [self.step] * len(params),
            lr=rule.lr,
            beta1=rule.beta1,
            beta2=rule.beta2,
            weight_decay=rule.weight_decay,
            eps=rule.eps,
            amsgrad=rule.amsgrad,
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )


def _step_tensor(rule: AdamRule, step: int, device: torch.device) -> torch.Tensor:
    return torch.full((), step if rule.bias_correction else math.inf, dtype=torch.float32, device=device)
