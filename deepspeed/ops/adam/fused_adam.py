"""`FusedAdam`: Adam and AdamW with one fused call per device and dtype, on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from deepspeed.ops.adam.adam_update import AdamRule, adam_update_pairs
from deepspeed.ops.optimizer_base import Pair, StateOptimizer, refuse_legacy_step_arguments
from deepspeed.ops.row_optimizer import RowOptimizer


class FusedAdam(RowOptimizer):
    """Adam (`adam_w_mode=False`) or AdamW, equal to torch's fused optimizer bit by bit.

    State per parameter: `exp_avg` and `exp_avg_sq` (shape and dtype of the parameter) and `step` (int).

    Args:
        params: parameters or parameter groups.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        bias_correction: False leaves out the division of the moments by 1 - beta^step.
        adam_w_mode: decoupled weight decay (AdamW); False adds `weight_decay * param` to the gradient (Adam).
        amsgrad: not supported by this class.
        set_grad_none: `zero_grad()` sets gradients to None instead of zero.
        fp32_optimizer_states: keep the moments of fp16 and bf16 parameters in fp32.

    Raises:
        RuntimeError: `amsgrad=True`; a sparse gradient; a parameter that is not floating point.
    """

    _extra_attributes: ClassVar[tuple[str, ...]] = (*StateOptimizer._extra_attributes, "adam_w_mode")
    _op: ClassVar[str] = "fused_adam"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        fp32_optimizer_states: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError(
                "FusedAdam does not support amsgrad=True; take torch's optimizer (`optimizer.params.torch_adam: true`)"
            )
        self.adam_w_mode = adam_w_mode
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
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
        return self._adam(group).state_keys

    def _rule(self, group: dict[str, Any], step: int) -> tuple[float, ...]:
        return self._adam(group).numbers(step)

    def _update_pairs(self, group: dict[str, Any], pairs: Iterable[Pair]) -> None:
        adam_update_pairs(self, pairs, self._adam(group))

    def _adam(self, group: dict[str, Any]) -> AdamRule:
        return AdamRule.of_group(group, decoupled=self.adam_w_mode)
