"""What the engine may ask of its optimizer. ``ZeroOptimizer`` fulfils it for every stage; others may too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class EngineOptimizer(Protocol):
    """Backward, boundary, and the facts the engine reports."""

    optimizer: torch.optim.Optimizer
    overflow: bool
    norm: float | None
    grad_multiplier: float
    should_reduce: Callable[[], bool]
    on_raw_begin: Callable[[], None]

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def loss_scale(self) -> float: ...
    def needs_scaler(self) -> bool: ...
    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None: ...
    def step(self) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def rescale_grads(self, factor: float) -> None: ...
    def adopt_unfrozen(self) -> list[str]: ...
    def destroy(self) -> None: ...
