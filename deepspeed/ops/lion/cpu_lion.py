"""`DeepSpeedCPULion`: Lion for parameters in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from deepspeed.ops.lion.lion_update import lion_update_group
from deepspeed.ops.optimizer_base import StateOptimizer, run_closure


class DeepSpeedCPULion(StateOptimizer):
    """Lion on the CPU. State per parameter: `exp_avg` and `step` (int). The arithmetic is fp32.

    Args:
        model_params: parameters or parameter groups, on the CPU.
        lr, betas, weight_decay: as in `FusedLion`.
        fp32_optimizer_states: False keeps the momentum in the dtype of the parameter.

    Raises:
        RuntimeError: a parameter that is not on the CPU, a sparse gradient.
    """

    _only_device: ClassVar[str | None] = "cpu"

    def __init__(
        self,
        model_params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(model_params, defaults, fp32_optimizer_states=fp32_optimizer_states)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update from the parameters' `grad`; returns the loss of `closure`."""
        loss = run_closure(closure)
        for group in self.param_groups:
            lion_update_group(self, group)
        return loss
