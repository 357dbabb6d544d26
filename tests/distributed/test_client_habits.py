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
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP


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


def steps_the_optimizer(stage: int, way: str) -> list[torch.Tensor]:
    """Two windows of two micro-steps, each of another size of loss; the weights after each window."""
    engine = start(stage, gradient_accumulation_steps=2)
    told: list[str] = []
    engine._client_steps._tell = told.append
    found = []
    for number in range(4):
        inputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        loss = engine(inputs).square().mean() * (1 + number)
        if way == "loss.backward":
            loss.backward()
        else:
            engine.backward(loss)
        if way == "engine":
            engine.step()
        elif way != "once" or number % 2:
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        if number % 2:
            assert (engine.global_steps, engine.micro_steps) == ((number + 1) // 2, number + 1)
            found += [deepspeed.utils.safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]
    assert len(told) == (2 if way in ("every micro-step", "loss.backward") else 0)
    assert not told or "nothing is updated before the last" in told[0]
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_stepping_the_optimizer_keeps_the_windows(ranks: Callable[..., Any], stage: int) -> None:
    """As Lightning Fabric and plain loops do; a step in mid-window was an update with a part of the gradients."""
    expected = ranks(steps_the_optimizer, stage, "engine")[0]
    for way in ("every micro-step", "once", "loss.backward"):
        for found in ranks(steps_the_optimizer, stage, way):
            assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True)), way


def drops_a_bad_batch(stage: int, bad: float) -> list[torch.Tensor]:
    """In the second window the first gradients are thrown away before they are stepped on."""
    engine = start(stage, gradient_accumulation_steps=2)
    for number, scale in ((0, 1.0), (1, 1.0), (2, bad), (2, 1.0), (3, 1.0)):
        inputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        engine.backward(engine(inputs).square().mean() * scale)
        if scale == 1.0:
            engine.optimizer.step()
        engine.optimizer.zero_grad()
    found = [deepspeed.utils.safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_gradients_are_dropped_where_no_step_came_before(ranks: Callable[..., Any], stage: int) -> None:
    """Kept are only those of a step that counted, not those of the same place in a later window."""
    small = ranks(drops_a_bad_batch, stage, 0.5)[0]
    for large in ranks(drops_a_bad_batch, stage, 1e6):
        assert all(torch.equal(a, b) for a, b in zip(large, small, strict=True))


def drops_part_of_a_window() -> list[str]:
    engine = start(2, gradient_accumulation_steps=2)
    told: list[str] = []
    engine._client_steps._tell = told.append
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 6)).square().mean())
        engine.step()
        engine.optimizer.zero_grad()
    engine.destroy()
    return told


def test_dropping_part_of_a_window_is_told(ranks: Callable[..., Any]) -> None:
    for told in ranks(drops_part_of_a_window):
        assert len(told) == 1
        assert "drops the gradients" in told[0]


def moves_where_it_is() -> None:
    engine = start(3)
    model = engine.module
    for device in ("cpu", "cpu:0", torch.device("cpu", 0)):
        model.to(device)
    assert model.to("cpu:0", torch.float32)[0].weight.device == torch.device("cpu")
    engine.destroy()


def test_a_sharded_model_is_moved_to_its_own_device_by_another_name(ranks: Callable[..., Any]) -> None:
    ranks(moves_where_it_is)


class TiledBlock(nn.Module):
    """A linear layer, then an MLP whose forward a client has replaced by one in tiles."""

    def __init__(self, tiles: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.tiles = tiles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return TiledMLP.apply(nn.Sequential.forward, self.mlp, self.first(x), self.tiles, list(self.mlp.parameters()))


def trains_in_tiles(stage: int, tiles: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    engine = start(stage, TiledBlock(tiles), gradient_accumulation_steps=2)
    for number in range(4):
        inputs = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        engine.backward(engine(inputs).square().mean())
        engine.step()
    found = [deepspeed.utils.safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_a_block_in_tiles_trains_as_the_whole(ranks: Callable[..., Any], stage: int) -> None:
    whole = ranks(trains_in_tiles, stage, 1)[0]
    for found in ranks(trains_in_tiles, stage, 3):
        for mine, other in zip(found, whole, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)  # positions are added in another order


def told_of(body: Callable[[Any], None], **top: Any) -> tuple[list[str], Any]:
    engine = start(2, gradient_accumulation_steps=2, **top)
    told: list[str] = []
    engine._client_steps._tell = told.append
    body(engine)
    found = (engine.global_steps, engine.micro_steps, engine.get_lr()[0])
    engine.destroy()
    return told, found


def run_backward(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 6)).square().mean())


def both_steps(engine: Any) -> None:
    for _ in range(4):
        run_backward(engine)
        engine.optimizer.step()
        engine.step()


def waits_for_a_boundary(engine: Any) -> None:
    for _ in range(20):
        run_backward(engine)
        if engine.is_gradient_accumulation_boundary():
            engine.optimizer.step()


def leaves_the_schedule(engine: Any) -> None:
    for _ in range(2):
        run_backward(engine)
        engine.optimizer.step()


def habits() -> dict[str, tuple[list[str], Any]]:
    warmup = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 20}}}
    return {
        "both": told_of(both_steps),
        "waits": told_of(waits_for_a_boundary),
        "schedule": told_of(leaves_the_schedule, **warmup),
    }


def test_habits_that_train_otherwise_than_they_look_are_told(ranks: Callable[..., Any]) -> None:
    for found in ranks(habits):
        told, counts = found["both"]
        assert counts[:2] == (2, 4)  # each micro-step is counted once
        assert sum("Call one of the two" in line for line in told) == 4
        told, counts = found["waits"]
        assert counts[:2] == (0, 0)
        assert [line for line in told if "16 backward passes and no step yet" in line]
        told, counts = found["schedule"]
        assert counts == (1, 2, 0.0)
        assert [line for line in told if "learning rate stays what it is" in line]


def losses_that_are_none() -> None:
    engine = start(1)
    loss = engine(torch.ones(2, 6))
    with pytest.raises(ValueError, match=r"found a loss of shape \(2, 1\); expected one element: .* loss.mean\(\)"):
        engine.backward(loss)
    with pytest.raises(TypeError, match="found Tensor without a graph"):
        engine.backward(loss.mean().detach())
    engine.backward(loss.mean())
    engine.step()
    engine.destroy()


def test_a_loss_that_is_none_is_refused_by_what_it_is(pool: Any) -> None:
    pool.run(1, losses_that_are_none)
