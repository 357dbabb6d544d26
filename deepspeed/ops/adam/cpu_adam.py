"""`DeepSpeedCPUAdam`: Adam and AdamW for parameters in host memory, with fp32 moments for low precision parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from deepspeed.ops.adam.adam_update import AdamRule, adam_update_pairs
from deepspeed.ops.optimizer_base import Pair, StateOptimizer
from deepspeed.ops.row_optimizer import RowOptimizer


class DeepSpeedCPUAdam(RowOptimizer):
    """Adam (`adamw_mode=False`) or AdamW on the CPU; fp32 parameters: equal to torch's fused optimizer bit by bit.

    State per parameter: `exp_avg`, `exp_avg_sq` (and `max_exp_avg_sq` with amsgrad) and `step` (int). The arithmetic is
    fp32 whatever the dtypes are.

    Args:
        model_params: parameters or parameter groups, on the CPU.
        lr, betas, eps, weight_decay, amsgrad: as in torch.optim.AdamW.
        bias_correction: False leaves out the division of the moments by 1 - beta^step.
        adamw_mode: decoupled weight decay.
        fp32_optimizer_states: False keeps the moments in the dtype of the parameter.

    Raises:
        RuntimeError: a parameter that is not on the CPU, a sparse gradient.
    """

    _extra_attributes: ClassVar[tuple[str, ...]] = (*StateOptimizer._extra_attributes, "adam_w_mode")
    _op: ClassVar[str] = "cpu_adam"
    _only_device: ClassVar[str | None] = "cpu"

    def __init__(
        self,
        model_params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self.adam_w_mode = adamw_mode
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "amsgrad": amsgrad,
        }
        super().__init__(model_params, defaults, fp32_optimizer_states=fp32_optimizer_states)

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._adam(group).state_keys

    def _rule(self, group: dict[str, Any], step: int) -> tuple[float, ...]:
        return self._adam(group).numbers(step)

    def _update_pairs(self, group: dict[str, Any], pairs: Iterable[Pair]) -> None:
        adam_update_pairs(self, pairs, self._adam(group))

    def _adam(self, group: dict[str, Any]) -> AdamRule:
        return AdamRule.of_group(group, decoupled=self.adam_w_mode)
