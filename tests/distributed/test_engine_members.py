"""Members of the engine and of its helpers that scripts call now and then: each does what its name says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_local_grad,
    safe_set_local_grad,
    safe_update_full_grad_vectorized,
)


def start(stage: int, module: nn.Module | None = None, **top: Any) -> Any:
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        **top,
    }
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)) if module is None else module
    return deepspeed.initialize(model=made, config=config)[0]


def batch(number: int) -> torch.Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def weights(engine: Any) -> list[torch.Tensor]:
    return [safe_get_full_fp32_param(param).clone() for param in engine.module.parameters()]


def coalesced(stage: int, together: bool) -> tuple[list[torch.Tensor], int]:
    """Two losses of one step, each with a backward of its own; the weights, and the reductions they took."""
    engine = start(stage)
    reductions = 0
    reduce_now = engine.zero_optimizer.reduce_now

    def counted() -> None:
        nonlocal reductions
        reductions += 1
        reduce_now()

    engine.zero_optimizer.reduce_now = counted
    if together:
        with engine.coalesce_grad_reduction():
            for number in range(2):
                engine.backward(engine(batch(number)).square().mean())
    else:
        for number in range(2):
            engine.backward(engine(batch(number)).square().mean())
    engine.step()
    found = weights(engine)
    engine.destroy()
    return found, reductions


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_coalesced_backward_passes_are_reduced_once(ranks: Callable[..., list[Any]], stage: int) -> None:
    expected = ranks(coalesced, stage, False)[0][0]
    for found, reductions in ranks(coalesced, stage, True):
        assert reductions == 1
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other)  # local gradients are added before they are averaged, or after


def edited(stage: int) -> None:
    engine = start(stage)
    params = list(engine.module.parameters())
    before = weights(engine)
    engine.backward(engine(batch(0)).square().mean())
    plain = [safe_get_full_grad(param).clone() for param in params]
    safe_update_full_grad_vectorized(params, lambda grad, param: grad * 2 + torch.ones(param.shape))
    for param, grad in zip(params, plain, strict=True):
        torch.testing.assert_close(safe_get_full_grad(param), 2 * grad + 1)
    own = safe_get_local_grad(params[0])
    safe_set_local_grad(params[0], own - 1)  # every rank its own elements
    torch.testing.assert_close(safe_get_full_grad(params[0]), 2 * plain[0])
    engine.step()
    for number, (after, start_value) in enumerate(zip(weights(engine), before, strict=True)):
        torch.testing.assert_close(after, start_value - 0.1 * (2 * plain[number] + (number > 0)))
    engine.destroy()


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_gradients_are_edited_before_the_step(ranks: Callable[..., list[Any]], stage: int) -> None:
    ranks(edited, stage)


def loads_data(stage: int) -> list[float]:
    engine = start(stage)
    data = [torch.full((6,), float(number)) for number in range(8)]
    loader = engine.deepspeed_io(data)
    seen = torch.cat([part[:, 0] for part in loader]).tolist()
    assert len(loader) == 2
    assert all(part.shape == (2, 6) for part in engine.deepspeed_io(data))
    assert [len(part) for part in engine.deepspeed_io(data, batch_size=4)] == [4]
    doubled = engine.deepspeed_io(data, route="eval", collate_fn=lambda rows: 2 * torch.stack(rows))
    assert sum(len(part) for part in doubled) >= 4
    engine.destroy()
    return seen


def test_a_loader_of_the_engine_gives_each_rank_its_rows(ranks: Callable[..., list[Any]]) -> None:
    first, second = ranks(loads_data, 1)
    assert sorted(first + second) == list(range(8))


def changes_sizes() -> None:
    engine = start(2, gradient_accumulation_steps=2)
    assert [call() for call in engine.get_batch_info()] == [8, 2, 2]
    engine.set_train_micro_batch_size(3)
    assert [call() for call in engine.get_batch_info()] == [12, 3, 2]
    engine.set_train_batch_size(6)
    assert [call() for call in engine.get_batch_info()] == [6, 3, 1]
    for call, words in ((engine.set_train_micro_batch_size, "must be positive"), (engine.set_train_batch_size, "mult")):
        with pytest.raises(ValueError, match=words):
            call(0)
    engine.backward(engine(batch(0)).square().mean())
    engine.step()
    assert (engine.global_steps, engine.global_samples) == (1, 6)
    engine.destroy()


def test_batch_sizes_change_between_steps(ranks: Callable[..., list[Any]]) -> None:
    ranks(changes_sizes)


class Borrows(nn.Module):
    """Uses a weight of a module that it does not own, through a function torch does not dispatch on."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Linear(6, 6)
        self.user = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.user(x) + (x @ self.owner.weight).sum(-1, keepdim=True)


def borrows(stage: int, registered: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    module = Borrows()
    engine = start(stage, module)
    if registered:
        deepspeed.zero.register_external_parameter(module, module.owner.weight)
        assert [name for name, _ in module.ds_external_parameters()]
    for number in range(3):
        engine.backward(engine(batch(number)).square().mean())
        engine.step()
        if registered and number == 1:
            deepspeed.zero.unregister_external_parameter(module, module.owner.weight)
            assert not list(module.ds_external_parameters())
    found = weights(engine)
    engine.destroy()
    return found


def test_a_borrowed_parameter_trains_registered_or_not(ranks: Callable[..., list[Any]]) -> None:
    expected = ranks(borrows, 1, False)[0]
    for registered in (False, True):
        for found in ranks(borrows, 3, registered):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def exports(folder: str, stage: int) -> None:
    engine = start(stage, bf16={"enabled": True}, zero_optimization={
        "stage": stage, "stage3_gather_16bit_weights_on_model_save": True})  # fmt: skip
    assert engine.save_fp16_model(folder, "weights.bin")
    expected = [value.bfloat16() for value in weights(engine)]
    saved = torch.load(Path(folder) / "weights.bin")
    assert all(torch.equal(a, b) for a, b in zip(saved.values(), expected, strict=True))
    with torch.no_grad():
        for param in engine.module.parameters():
            param.data.fill_(0.5)
    engine.optimizer.refresh_fp32_params()
    assert all(bool((value == 0.5).all()) for value in weights(engine))
    engine.destroy()


@pytest.mark.parametrize("stage", (1, 3))
def test_the_16_bit_export_by_its_old_name(ranks: Callable[..., list[Any]], stage: int, tmp_path: Path) -> None:
    ranks(exports, str(tmp_path), stage)
