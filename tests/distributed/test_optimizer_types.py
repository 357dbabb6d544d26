"""Every optimizer type and schedule inside the engine gives the numbers of plain torch in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES, build_scheduler
from deepspeed.runtime.optimizers import build_optimizer

STEPS = 4
TYPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False, "bias_correction": False}),
    ("Adam", {"lr": 0.01, "torch_adam": True}),
    ("Adagrad", {"lr": 0.01}),
    ("Lion", {"lr": 0.01, "weight_decay": 0.1}),
    ("Lamb", {"lr": 0.01, "weight_decay": 0.1}),
    ("Muon", {"lr": 0.01, "muon_lr": 0.02, "weight_decay": 0.1}),
    ("Muon", {"lr": 0.01, "torch_adam": True, "ns_method": "standard"}),
    ("Adafactor", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01}),
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.odd = nn.Linear(5, 7), nn.Linear(7, 9), nn.Linear(9, 6, bias=False)
        self.lm_head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(torch.tanh(self.odd(torch.tanh(self.body(torch.tanh(self.embed(x)))))))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(step)
    return torch.randn(4, 5, generator=gen), torch.randn(4, 3, generator=gen)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def config(stage: int, name: str, params: dict[str, Any], world: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4 // world,
        "optimizer": {"type": name, "params": params},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }


def engine_runs(stage: int) -> list[dict[str, torch.Tensor]]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    results = []
    for name, params in TYPES:
        model = Net()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config(stage, name, params, world)
        )
        own = slice(rank * 4 // world, (rank + 1) * 4 // world)
        for step in range(STEPS):
            x, y = batch(step)
            engine.backward(nn.functional.mse_loss(engine(x[own]), y[own]))
            engine.step()
        results.append(weights(model))
        engine.destroy()
    return results


def plain_run(name: str, params: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = Net()
    for key, param in model.named_parameters():
        param.use_muon = param.ndim == 2 and key.split(".")[0] in ("body", "odd")  # type: ignore[attr-defined]
    optimizer = build_optimizer(name, params, list(model.parameters()))
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.world(2)
@pytest.mark.parametrize("stage", (0, 1, 2))
def test_every_type_equals_one_process(ranks: Any, stage: int) -> None:
    first, second = ranks(engine_runs, stage)
    for (name, params), one, other in zip(TYPES, first, second, strict=True):
        # The mean over ranks rounds differently from the mean over the batch: 1e-7 in a gradient. Muon makes all
        # singular values equal, which magnifies what stands behind a small one up to 3.4^5 = 470 times.
        tolerance = 2e-4 if name == "Muon" else 1e-6
        for key, expected in plain_run(name, params).items():
            assert torch.equal(one[key], other[key]), f"{name} {key}: ranks differ"
            away = float((one[key] - expected).abs().max())
            assert away <= tolerance, f"{name} {key}: {away} away from one process"


SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 3},
    "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 9, "warmup_min_ratio": 0.1},
    "LRRangeTest": {"lr_range_test_step_size": 2},
    "OneCycle": {"cycle_min_lr": [0.01, 0.0001], "cycle_max_lr": [0.1, 0.001], "cycle_first_step_size": 3},
}


def scheduled_runs(stage: int) -> dict[str, list[tuple[list[float], float, float]]]:
    """Per schedule and update: the reported rates, and how far one weight of each group moved under SGD, gradient 1."""
    results = {}
    for name in VALID_LR_SCHEDULES:
        model = nn.Linear(1, 1)
        settings = config(stage, "SGD", {"lr": 0.1}, 1)
        settings["train_micro_batch_size_per_gpu"] = 1
        settings["scheduler"] = {"type": name, "params": SCHEDULES[name]}
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.001}]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings)
        seen = []
        for _ in range(6):
            before = model.weight.item(), model.bias.item()
            reported = engine.get_lr()
            engine.backward(engine(torch.ones(1, 1)).sum())
            engine.step()
            seen.append((reported, before[0] - model.weight.item(), before[1] - model.bias.item()))
        results[name] = seen
        engine.destroy()
    return results


@pytest.mark.world(2)
@pytest.mark.parametrize("stage", (0, 1, 2))
def test_rate_used_is_the_rate_reported_and_groups_keep_their_ratio(ranks: Any, stage: int) -> None:
    first, second = ranks(scheduled_runs, stage)
    assert first == second
    for name, seen in first.items():
        groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.001)]
        optimizer = torch.optim.SGD(groups, lr=0.5)
        schedule = build_scheduler(name, SCHEDULES[name], optimizer)
        for update, (reported, weight_moved, bias_moved) in enumerate(seen, 1):
            assert reported == schedule.get_lr(), f"{name}, update {update}"
            assert reported[0] == pytest.approx(100 * reported[1])
            # Differences of fp32 weights of about 1.
            assert [weight_moved, bias_moved] == pytest.approx(reported, abs=2e-7), f"{name}, update {update}"
            schedule.step()
