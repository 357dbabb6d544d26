"""Adam's states moved between devices, and the optimizer that is none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.accelerator.real_accelerator import get_accelerator

__all__ = ["DummyOptim", "offload_adam_states", "reload_adam_states"]

_ADAM_STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class DummyOptim:
    """Holds parameters in ``param_groups`` where ZeRO runs without an optimizer."""

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": params}]


def _adam_states(optimizer: Any) -> list[torch.Tensor]:
    return [
        state[key]
        for state in optimizer.state.values()
        for key in _ADAM_STATES
        if isinstance(state.get(key), torch.Tensor)
    ]


def offload_adam_states(
    optimizer: Any, device: str | torch.device, pin_memory: bool = False, non_blocking: bool = False
) -> None:
    """Move the moments of an Adam-like optimizer to ``device``; ``pin_memory`` page-locks them on the host."""
    for state in _adam_states(optimizer):
        if pin_memory and torch.device(device).type == "cpu":
            target = get_accelerator().pin_empty_like(state)
            target.copy_(state.data, non_blocking=non_blocking)
            state.data = target
        else:
            state.data = state.data.to(device, non_blocking=non_blocking)


def reload_adam_states(optimizer: Any, device: str | torch.device, non_blocking: bool = False) -> None:
    """Move the moments of an Adam-like optimizer back to ``device``."""
    for state in _adam_states(optimizer):
        state.data = state.data.to(device, non_blocking=non_blocking)
