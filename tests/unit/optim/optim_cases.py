"""Small tensors and loops for the optimizer tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

SHAPES = ((7, 5), (1,), (0,), (33,), (2, 3, 4))

Build = Callable[[list[torch.nn.Parameter]], Optimizer]


def parameters(dtype: torch.dtype = torch.float32, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Any]:
    gen = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=gen).to(dtype)) for s in shapes]


def train(
    build: Build,
    params: list[torch.nn.Parameter],
    steps: int = 5,
    skip: Callable[[int, int], bool] = lambda step, index: False,
    optimizer: Optimizer | None = None,
    first: int = 0,
) -> Optimizer:
    """Steps with seeded gradients; `skip(step, index)` leaves a gradient out."""
    optimizer = optimizer or build(params)
    for step in range(first, first + steps):
        gen = torch.Generator().manual_seed(100 + step)
        for index, p in enumerate(params):
            grad = torch.randn(p.shape, generator=gen)
            p.grad = None if skip(step, index) else grad.to(p.dtype)
        optimizer.step()
    return optimizer


def assert_same_bits(left: list[torch.nn.Parameter], right: list[torch.nn.Parameter]) -> None:
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a, b), f"parameter {index}: differs by {float((a - b).abs().max())}"
