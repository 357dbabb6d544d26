"""`DeepSpeedCPULion`: Lion for parameters in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from deepspeed.ops.lion.lion_update import lion_numbers, lion_update_pairs
from deepspeed.ops.optimizer_base import Pair
from deepspeed.ops.row_optimizer import RowOptimizer


class DeepSpeedCPULion(RowOptimizer):
    """Lion on the CPU. State per parameter: `exp_avg` and `step` (int). The arithmetic is fp32.

    Args:
        model_params: parameters or parameter groups, on the CPU.
        lr, betas, weight_decay: as in `FusedLion`.
        fp32_optimizer_states: False keeps the momentum in the dtype of the parameter.

    Raises:
        RuntimeError: a parameter that is not on the CPU, a sparse gradient.
    """

    _op: ClassVar[str] = "cpu_lion"
    _only_device: ClassVar[str | None] = "cpu"

    def __init__(
        self,
        model_params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
        *,
        adamw_mode: bool = False,  # Accelerate passes it to every CPU optimizer; the decay is decoupled anyway
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(model_params, defaults, fp32_optimizer_states=fp32_optimizer_states)

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _rule(self, group: dict[str, Any], step: int) -> tuple[float, ...]:
        return lion_numbers(group)

    def _update_pairs(self, group: dict[str, Any], pairs: Iterable[Pair]) -> None:
        lion_update_pairs(self, group, pairs)
