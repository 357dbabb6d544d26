"""`FusedLion`: Lion over lists of tensors, on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from deepspeed.ops.lion.lion_update import lion_numbers, lion_update_pairs
from deepspeed.ops.optimizer_base import Pair, refuse_legacy_step_arguments
from deepspeed.ops.row_optimizer import RowOptimizer


class FusedLion(RowOptimizer):
    """Lion. State per parameter: `exp_avg` (shape and dtype of the parameter) and `step` (int).

    Args:
        params: parameters or parameter groups.
        lr: learning rate; Lion wants one about 3 to 10 times smaller than Adam.
        betas: (weight of the momentum in the direction, decay of the momentum).
        weight_decay: decoupled.
        set_grad_none: `zero_grad()` sets gradients to None instead of zero.
        fp32_optimizer_states: keep the momentum of fp16 and bf16 parameters in fp32.

    Raises:
        RuntimeError: a sparse gradient, a parameter that is not floating point.
    """

    _op: ClassVar[str] = "fused_lion"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        fp32_optimizer_states: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(
            params, defaults, fp32_optimizer_states=fp32_optimizer_states, set_grad_none=set_grad_none
        )

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """One update from the parameters' `grad`; returns the loss of `closure`. The other arguments must be None."""
        refuse_legacy_step_arguments(
            self,
            grads=grads,
            output_params=output_params,
            scale=scale,
            grad_norms=grad_norms,
            grad_scaler=grad_scaler,
        )
        return super().step(closure)

    # Beside `step`, because whoever overrides one of the two has to override both.
    update_from = RowOptimizer.update_from

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _rule(self, group: dict[str, Any], step: int) -> tuple[float, ...]:
        return lion_numbers(group)

    def _update_pairs(self, group: dict[str, Any], pairs: Iterable[Pair]) -> None:
        lion_update_pairs(self, group, pairs)
