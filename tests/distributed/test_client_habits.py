"""What wrapper libraries do to an engine that plain training scripts do not: each habit without the library.

Accelerate sets the boundary by hand at every backward and calls ``step()`` at boundaries only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed


def start(stage: int, model: nn.Module | None = None, **top: Any) -> Any:
    torch.manual_seed(3)
    model = model if model is not None else nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": float("inf"),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        **top,
    }
    return deepspeed.initialize(model=model, config_params=config)[0]


def wrapped_backward(engine: Any, number: int, boundary: bool) -> None:
    """As Accelerate does it: boundary by hand, loss already divided, ``step()`` at the boundary alone."""
    inputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    engine.set_gradient_accumulation_boundary(is_boundary=boundary)
    engine.backward(engine(inputs).square().mean() / 2, scale_wrt_gas=False)
    if boundary:
        engine.step()


def saves_between_windows(stage: int, folder: str) -> list[str]:
    """What saving after a window says, and where a resumed run goes on."""
    engine = start(stage, gradient_accumulation_steps=2)
    said: list[str] = []
    engine.checkpoint._say = said.append
    for number in range(6):
        wrapped_backward(engine, number, boundary=number % 2 == 1)
    engine.save_checkpoint(folder)
    engine.destroy()
    again = start(stage, gradient_accumulation_steps=2)
    again.load_checkpoint(folder)
    assert again.global_steps == 3
    # From here on without the wrapper: the next micro-step is the first of a window.
    assert not again.is_gradient_accumulation_boundary()
    again.destroy()
    return said


@pytest.mark.parametrize("stage", (0, 3))
def test_saving_after_a_window_set_by_hand(ranks: Callable[..., Any], tmp_path: Path, stage: int) -> None:
    for said in ranks(saves_between_windows, stage, str(tmp_path)):
        assert not [line for line in said if "inside a window" in line]


def saves_inside_a_window(stage: int, folder: str) -> list[str]:
    """What saving after the first of two micro-steps says, while the client keeps the count of them."""
    engine = start(stage, gradient_accumulation_steps=2)
    said: list[str] = []
    engine.checkpoint._say = said.append
    wrapped_backward(engine, 0, boundary=False)
    assert engine.holds_gradients
    engine.save_checkpoint(folder, "part")
    engine.zero_grad()
    engine.save_checkpoint(folder, "whole")
    assert not engine.holds_gradients
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_saving_inside_a_window_set_by_hand(ranks: Callable[..., Any], tmp_path: Path, stage: int) -> None:
    for said in ranks(saves_inside_a_window, stage, str(tmp_path)):
        assert len([line for line in said if "gradients since the last optimizer step are not saved" in line]) == 1


def evaluates_with_a_schedule_in_the_file(stage: int) -> Any:
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": stage},
    }
    engine, optimizer, _, schedule = deepspeed.initialize(model=nn.Linear(6, 2), config=config)
    assert optimizer is None or not hasattr(optimizer, "param_groups")
    assert schedule is None
    out = engine.eval()(torch.ones(2, 6)).detach().clone()
    engine.destroy()
    return out


@pytest.mark.parametrize("stage", (0, 3))
def test_an_engine_that_only_evaluates_ignores_the_schedule(ranks: Callable[..., Any], stage: int) -> None:
    """Trainer.evaluate() takes the optimizer out of the config and leaves the schedule in."""
    first, second = ranks(evaluates_with_a_schedule_in_the_file, stage)
    assert torch.equal(first, second)
