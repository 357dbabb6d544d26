"""`initialize` in the forms of client packages: what they pass as args, config, parameters and schedule."""

from __future__ import annotations

import base64
import functools
import json
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import deepspeed

CONFIG = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}


def _rate(optimizer: Any, factor: float) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor)


def forms(model: nn.Module) -> dict[str, dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    text = base64.urlsafe_b64encode(json.dumps({**CONFIG, **ADAM}).encode()).decode()
    trainable = filter(lambda p: p.requires_grad, model.parameters())
    groups = [{"params": [p], "weight_decay": 0.01} for p in model.parameters()]
    return {
        "config in args": {"args": Namespace(deepspeed_config={**CONFIG, **ADAM}, local_rank=0), "optimizer": None},
        "base64 in args": {"args": Namespace(deepspeed_config=text), "dist_init_required": False},
        "args without a config": {
            "args": Namespace(device_rank=0),
            "config": CONFIG,
            "optimizer": optimizer,
            "model_parameters": trainable,
            "dist_init_required": False,
        },
        "args is a dict": {
            "args": {"local_rank": 0},
            "config": {**CONFIG, **ADAM},
            "model_parameters": groups,
            "lr_scheduler": functools.partial(_rate, factor=1.0),
            "dist_init_required": True,
        },
        "the old name": {"config_params": {**CONFIG, **ADAM}, "args": None},
        "args.deepspeed_config is None": {"args": Namespace(deepspeed_config=None), "config": {**CONFIG, **ADAM}},
    }


def train_each() -> dict[str, float]:
    found = {}
    for name in forms(nn.Linear(1, 1)):
        torch.manual_seed(1)
        model = nn.Linear(64, 1)
        result = deepspeed.initialize(model=model, **forms(model)[name])
        assert len(result) == 4
        engine: Any = result[0]
        for _ in range(2):
            loss = engine(torch.ones(2, 64)).square().mean()
            engine.backward(loss)
            engine.step()
        found[name] = loss.item()
        engine.destroy()
    return found


def test_every_form_trains_the_same(ranks: Callable[..., list[Any]]) -> None:
    first, second = ranks(train_each)
    assert first == second
    assert len(first) == 6
    assert max(first.values()) - min(first.values()) < 1e-4  # the form decides nothing but weight decay


def test_launcher_calls_of_wrappers() -> None:
    from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion

    assert not fetch_hostfile("/nowhere/hostfile")
    assert dict(parse_inclusion_exclusion({"a": 2, "b": 2}, "a:1", "")) == {"a": [1]}
