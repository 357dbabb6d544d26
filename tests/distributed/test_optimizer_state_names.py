"""`safe_get_*` and `safe_set_*` with the name of an optimizer state: unknown ones are refused, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.utils import (
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)


def start(stage: int, optimizer: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage},
    }
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 1))
    return deepspeed.initialize(model=model, config=config)[0]


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 6)).square().mean())
    engine.step()


def unknown(stage: int) -> None:
    engine = start(stage, {"type": "AdamW", "params": {"lr": 0.1}})
    params = list(engine.module.parameters())
    assert [safe_get_full_optimizer_state(param, "anything") for param in params] == [None] * 3  # no states yet
    step(engine)
    said = r"parameter '2\.bias' has no optimizer state tensor 'momentum'; \w+ keeps: (exp_avg, exp_avg_sq|none on)"
    for name in ("momentum", "step"):  # one rank owns the bias, all refuse
        with pytest.raises(ValueError, match=said.replace("'momentum'", f"'{name}'")):
            safe_get_full_optimizer_state(params[2], name)
    owns_bias = safe_get_local_optimizer_state(params[2], "exp_avg").numel() > 0
    if owns_bias:
        for call in (
            lambda: safe_get_local_optimizer_state(params[2], "momentum"),
            lambda: safe_set_full_optimizer_state(params[2], torch.ones(1), "momentum"),
            lambda: safe_set_local_optimizer_state(params[2], torch.ones(1), "momentum"),
        ):
            with pytest.raises(ValueError, match=said):
                call()
    assert safe_get_full_optimizer_state(params[0], "exp_avg").shape == (8, 6)
    engine.destroy()


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_unknown_names_are_refused_by_every_rank(ranks: Callable[..., list[Any]], stage: int) -> None:
    ranks(unknown, stage)


def of_other_groups() -> None:
    engine = start(2, {"type": "Muon", "params": {"lr": 0.1}})
    params = list(engine.module.parameters())
    step(engine)
    # Muon's buffer for matrices, Adam's moments for the bias: a loop over all parameters meets both.
    for name in ("momentum_buffer", "exp_avg"):
        found = [safe_get_full_optimizer_state(param, name) for param in params]
        assert [value is not None for value in found] == [name == "momentum_buffer"] * 2 + [name == "exp_avg"]
        for param in params:
            safe_get_local_optimizer_state(param, name)
    with pytest.raises(ValueError, match="no optimizer state tensor 'max_exp_avg_sq'"):
        safe_get_full_optimizer_state(params[0], "max_exp_avg_sq")
    engine.destroy()


def test_states_of_another_group_are_none(ranks: Callable[..., list[Any]]) -> None:
    ranks(of_other_groups)


def without_momentum() -> None:
    engine = start(1, {"type": "SGD", "params": {"lr": 0.1}})
    step(engine)
    assert safe_get_full_optimizer_state(next(engine.module.parameters()), "momentum_buffer") is None
    engine.destroy()


def test_states_an_optimizer_knows_and_does_not_use_are_none(ranks: Callable[..., list[Any]]) -> None:
    ranks(without_momentum)
