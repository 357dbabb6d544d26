"""Command-line flags of the schedules."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.runtime import lr_schedules
from deepspeed.runtime.lr_schedules import (
    VALID_LR_SCHEDULES,
    add_tuning_arguments,
    build_scheduler,
    get_config_from_args,
    get_lr_from_config,
    override_params,
    parse_arguments,
)

DEFAULTS = {
    "lr_schedule": None,
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "lr_range_test_staircase": False,
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_momentum": False,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
    "warmup_min_lr": 0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "warmup_min_ratio": 0.01,
    "cos_min_ratio": 0.01,
}


def parsed(*argv: str) -> argparse.Namespace:
    return add_tuning_arguments(argparse.ArgumentParser()).parse_args(argv)


def test_flags_and_their_defaults() -> None:
    assert vars(parsed()) == DEFAULTS


def test_values_are_converted() -> None:
    args = parsed("--warmup_num_steps=7", "--cycle_max_lr=0.5", "--lr_range_test_staircase", "--warmup_type=linear")
    assert (args.warmup_num_steps, args.cycle_max_lr, args.lr_range_test_staircase) == (7, 0.5, True)
    assert args.warmup_type == "linear"


def test_other_arguments_are_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--lr_schedule", "WarmupLR", "--model", "x"])
    args, rest = parse_arguments()
    assert (args.lr_schedule, rest) == ("WarmupLR", ["--model", "x"])


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_flags_make_a_scheduler_block_that_builds(name: str) -> None:
    config, error = get_config_from_args(parsed("--lr_schedule", name))
    assert error is None
    assert config is not None
    assert config["type"] == name
    params = config["params"]
    if name == "WarmupDecayLR":
        params["total_num_steps"] = 5000  # has no flag
    if name == "WarmupCosineLR":
        params["total_num_steps"] = 5000
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = build_scheduler(name, params, optimizer)
    assert schedule.get_lr() == [optimizer.param_groups[0]["lr"]]


def test_what_is_missing_is_said() -> None:
    assert get_config_from_args(parsed()) == (None, "--lr_schedule not specified on command line")
    assert get_config_from_args(SimpleNamespace()) == (None, "--lr_schedule not specified on command line")
    config, error = get_config_from_args(parsed("--lr_schedule", "Nope"))
    assert config is None
    assert error is not None
    assert "Nope" in error
    assert "WarmupLR" in error


PEAKS: tuple[tuple[dict[str, Any], float | None, str], ...] = (
    ({"type": "OneCycle", "params": {"cycle_max_lr": 3}}, 3, ""),
    ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 2}}, 2, ""),
    ({"type": "WarmupDecayLR", "params": {"warmup_max_lr": 1}}, 1, ""),
    ({"type": "WarmupLR", "params": {}}, None, "warmup_max_lr"),
    ({"type": "WarmupCosineLR", "params": {}}, None, "ratio"),
    ({"type": "Nope", "params": {}}, None, "Nope is not a valid LR schedule"),
    ({"type": "WarmupLR"}, None, "params not defined"),
    ({}, None, "type not defined"),
)


@pytest.mark.parametrize(("config", "rate", "text"), PEAKS)
def test_rate_of_a_block(config: dict[str, Any], rate: float | None, text: str) -> None:
    found, why = get_lr_from_config(config)
    assert found == rate
    assert text in why
    assert bool(why) == (rate is None)


def test_overrides_copy_the_flags_that_are_there() -> None:
    params: dict[str, Any] = {"cycle_min_lr": 5}
    override_params(SimpleNamespace(), params)
    assert params == {"cycle_min_lr": 5}
    override_params(SimpleNamespace(cycle_min_lr=1, warmup_type="linear", unrelated=3), params)
    assert params == {"cycle_min_lr": 1, "warmup_type": "linear"}
    only: dict[str, Any] = {}
    lr_schedules.override_warmupCosineLR_params(parsed(), only)
    assert set(only) == {"warmup_num_steps", "warmup_type", "warmup_min_ratio", "cos_min_ratio"}
