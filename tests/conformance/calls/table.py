"""The table of calls: each file of this folder fills it for some clients, `test_call_shapes.py` runs it on two ranks.

Owns: the two decorators-like entries (`calls`, `refused`) and the small engines the calls need. A row is named by the
call as the client writes it; the function under it makes that call with real arguments and asserts its effect.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed

Body = Callable[[Path], None]
CALLS: dict[str, list[tuple[tuple[str, ...], Body]]] = {}
"""Client -> (the calls, a function that makes them; it gets an empty folder that all ranks see)."""
REFUSED: dict[str, dict[str, str]] = {}
"""Client -> expression of `deepspeed` and a running `engine` -> the feature its refusal names."""


def calls(client: str, *shapes: str) -> Callable[[Body], Body]:
    """Enters a function as the proof of these calls of the client."""

    def enter(body: Body) -> Body:
        CALLS.setdefault(client, []).append((shapes, body))
        return body

    return enter


def refused(client: str, rows: dict[str, str]) -> None:
    """Enters calls that belong to features that are not built: expression -> words of the feature's name."""
    REFUSED.setdefault(client, {}).update(rows)


class Mpu:
    """The object of model-parallel clients: all ranks data parallel, the model whole. Makes no group."""

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_group(self) -> Any:
        return None

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """torch.compile inside leaves nothing behind: it wraps `nn.Module.__init__` for good otherwise."""
    plain = nn.Module.__init__
    try:
        yield
    finally:
        nn.Module.__init__ = plain  # type: ignore[method-assign]
        torch.compiler.reset()


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """These variables of the process, None for unset; all of them are as before afterwards."""
    before = dict(os.environ)
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def settings(stage: int, zero: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """A config; ``zero``: further keys of ``zero_optimization``. No parameter is too small to be sharded."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
        **top,
    }


def model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def start(stage: int, **top: Any) -> Any:
    """A running engine on :func:`model`; ``top`` as for :func:`settings`."""
    return deepspeed.initialize(model=model(), config=settings(stage, **top))[0]


def backward(engine: Any, **options: Any) -> torch.Tensor:
    """Forward and backward of one micro-batch; the loss."""
    batch = torch.ones(2, 4, dtype=next(engine.module.parameters()).dtype)
    loss = engine(batch).float().square().mean()
    engine.backward(loss, **options)
    return loss.detach()


def train(engine: Any, steps: int = 1) -> torch.Tensor:
    """``steps`` whole windows; the last loss."""
    loss = torch.zeros(())
    for _ in range(steps):
        loss = backward(engine)
        engine.step()
    return loss


def weights(engine: Any) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [param.detach().clone() for param in engine.module.parameters()]


def changed(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
