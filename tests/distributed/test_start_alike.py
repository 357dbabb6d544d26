"""Ranks that do not start alike are told so at `initialize`, each with what it has in another way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime import config_alike
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_alike import settings_of_all_ranks
from deepspeed.runtime.replicas import ModelsDiffer, SettingsDiffer

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "rate": (
        {"optimizer": {"type": "Adam", "params": {"lr": 2e-3, "betas": [0.9, 0.99]}}},
        "[optimizer.params.lr = 0.002], on rank 0 it is [optimizer.params.lr = 0.001]",
    ),
    "accumulation": (
        {"gradient_accumulation_steps": 3},
        "[gradient_accumulation_steps = 3], on rank 0 it is [gradient_accumulation_steps = 1]",
    ),
    "stage": ({"zero_optimization": {"stage": 1}}, "[zero_optimization.stage = "),
    "clipping": ({"gradient_clipping": 0.5}, "[gradient_clipping = 0.5], on rank 0 it is [gradient_clipping = 1.0]"),
}
OF_ONE_RANK = {"train_micro_batch_size_per_gpu": 5, "steps_per_print": 3, "zero_optimization": {"stage": 0}}


def start(last: dict[str, Any], width: int = 4) -> str:
    """`initialize` with settings and a layer that only the last rank has in another way; the error, or ""."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, width if odd else 4))
    try:
        engine, *_ = deepspeed.initialize(model=model, config=BASE | (last if odd else {}))
    except (ModelsDiffer, SettingsDiffer) as error:
        return f"{type(error).__name__}: {error}"
    engine.destroy()
    return ""


@pytest.mark.parametrize("which", OTHERS)
def test_another_config_is_an_error_on_every_rank(pool: Any, which: str) -> None:
    last, text = OTHERS[which]
    found = pool.run(3, start, last)
    assert all(error.startswith("SettingsDiffer: the ranks have different configs. ") for error in found), found
    assert [f"rank {rank} has the config of rank 0" in found[rank] for rank in (0, 1, 2)] == [True, True, False]
    assert "rank 2: setting " in found[2]
    assert text in found[2]


def test_another_model_is_an_error_on_every_rank(pool: Any) -> None:
    first, last = pool.run(2, start, {}, 5)
    assert "ModelsDiffer: the ranks hold different models. rank 0 has the model of rank 0. " in first
    assert "rank 1: parameter 2 is [1.weight (5, 4) torch.float32 trainable], on rank 0 it is [1.weight (4, 4)" in last


def test_what_is_a_ranks_own_may_differ(pool: Any) -> None:
    assert pool.run(2, start, OF_ONE_RANK) == ["", ""]


def test_paths_and_pinned_memory_are_a_hosts_own() -> None:
    offload = {"device": "nvme", "pin_memory": True}
    lines = [
        settings_of_all_ranks(
            DeepSpeedConfig.parse(BASE | {"zero_optimization": {"stage": 3, "offload_optimizer": place}})
        )
        for place in ({**offload, "nvme_path": "/a"}, {**offload, "nvme_path": "/b", "pin_memory": False})
    ]
    assert lines[0] == lines[1]
    assert any(line.startswith("zero_optimization.offload_optimizer.device = ") for line in lines[0])


def test_objects_are_compared_by_their_class() -> None:
    """Two processes show other addresses of what is alike."""
    shown = config_alike._shown([object(), {2, 1}, "x", 0.5, None, torch.float16])
    assert shown == "[object, [1, 2], 'x', 0.5, None, torch.float16]"
