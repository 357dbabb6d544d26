"""`DeepSpeedCPUAdagrad`: Adagrad for parameters in host memory, with sparse gradients.

With s the sum of squares and g the gradient (Duchi et al., "Adaptive Subgradient Methods", JMLR 2011):

    g += weight_decay * p
    s += g * g
    p -= lr * g / (sqrt(s) + eps)

A sparse gradient updates the rows it names and no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from deepspeed.ops.elementwise import Row, is_direct, run_direct, run_staged
from deepspeed.ops.optimizer_base import Pair
from deepspeed.ops.row_optimizer import RowOptimizer

_NATIVE = (torch.float32, torch.float64)


class DeepSpeedCPUAdagrad(RowOptimizer):
    """Adagrad on the CPU; fp32 parameters: equal to torch's fused optimizer bit by bit.

    State per parameter: `exp_avg_sq`, the running sum of squares (the name is historical), and `step` (int).

    Args:
        model_params: parameters or parameter groups, on the CPU.
        lr, eps, weight_decay: as in torch.optim.Adagrad.
        amsgrad: must be False; Adagrad has no such form.
        fp32_optimizer_states: False keeps the sum in the dtype of the parameter.

    Raises:
        ValueError: `amsgrad=True`.
        RuntimeError: a parameter that is not on the CPU; weight decay with a sparse gradient.
    """

    _op: ClassVar[str] = "cpu_adagrad"
    _only_device: ClassVar[str | None] = "cpu"

    def __init__(
        self,
        model_params: Any,
        lr: float | torch.Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        *,
        adamw_mode: bool = False,  # for Accelerate, which passes it to every CPU optimizer
    ) -> None:
        if adamw_mode:
            raise ValueError("DeepSpeedCPUAdagrad: adamw_mode = True; Adagrad's decay is not decoupled, leave it out")
        if amsgrad:
            raise ValueError("DeepSpeedCPUAdagrad: amsgrad = True; Adagrad has no amsgrad form, leave it out")
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(model_params, defaults, fp32_optimizer_states=fp32_optimizer_states)

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg_sq",)

    def _rule(self, group: dict[str, Any], step: int) -> tuple[float, ...]:
        return float(group["lr"]), group["eps"], group["weight_decay"], 0.0, 0.0, 0.0, 0.0, 0.0

    def _update_pairs(self, group: dict[str, Any], pairs: Iterable[Pair]) -> None:
        direct: dict[torch.dtype, list[Row]] = {}
        kernel = _Adagrad(float(group["lr"]), group["eps"], group["weight_decay"])
        for param, grad in pairs:
            state = self.state[param]
            if not state:
                self.check_param(param)
                state["step"] = 0
                state["exp_avg_sq"] = self.new_state(param)
            state["step"] += 1
            if grad.is_sparse:
                self._update_rows(kernel, param, grad, state["exp_avg_sq"])
                continue
            row = [param, grad, state["exp_avg_sq"]]
            if is_direct(row, _NATIVE):
                direct.setdefault(param.dtype, []).append(row)
            else:
                run_staged(kernel, row)
        for rows in direct.values():
            run_direct(kernel, rows)

    @staticmethod
    def _update_rows(
        kernel: _Adagrad, param: torch.Tensor, grad: torch.Tensor, squares: torch.Tensor
    ) -> None:
        if kernel.weight_decay:
            raise RuntimeError(
                f"DeepSpeedCPUAdagrad: weight_decay = {kernel.weight_decay} with a sparse gradient of a parameter of "
                f"shape {tuple(param.shape)}: decay would touch every row; put the parameter into a group with "
                "weight_decay 0 or make its gradient dense"
            )
        grad = grad.coalesce()
        # As many indices as sparse dims; one for the gradient of an embedding.
        where = tuple(grad.indices())
        rows = [param[where], grad.values(), squares[where]]
        run_staged(kernel, rows)
        param[where] = rows[0]
        squares[where] = rows[2]


def adagrad_update(lr: float, eps: float, weight_decay: float, row: Row) -> None:
    """The update in torch of one row [param, grad, sum of squares] of any dtype and layout, in place."""
    run_staged(_Adagrad(lr, eps, weight_decay), row)


@dataclass(frozen=True)
class _Adagrad:
    lr: float
    eps: float
    weight_decay: float

    def __call__(self, columns: list[list[torch.Tensor]]) -> None:
        params, grads, squares = columns
        # The kernel reads the step for its learning rate decay only, which is 0.
        step = torch.ones((), dtype=torch.float32)
        torch._fused_adagrad_(
            params,
            grads,
            squares,
            [step] * len(params),
            lr=self.lr,
            lr_decay=0.0,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=False,
        )
