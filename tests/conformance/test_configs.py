"""Config files as clients ship them: each trains two steps, or is refused with the reason; no key is ignored."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

FOLDER = Path(__file__).parent / "configs"
CONFIGS = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
REFUSED = {
    "refused_onebit": "optimizer.type: .*1-bit optimizers",
    "refused_elasticity": "elasticity.enabled: .*elastic batch sizes",
}


def train(paths: list[str]) -> list[list[float]]:
    """The losses of two steps under each config."""
    losses = []
    for path in paths:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        engine: Any = deepspeed.initialize(model=model, config=path)[0]
        found = []
        for _ in range(2):
            inputs = torch.ones(2, 6, dtype=next(engine.module.parameters()).dtype)
            loss = engine(inputs).float().square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        assert engine.global_steps == 2
        engine.destroy()
        losses.append(found)
    return losses


def test_accepted_configs_train(ranks: Callable[..., list[Any]]) -> None:
    paths = [str(path) for name, path in CONFIGS.items() if name not in REFUSED]
    for found in ranks(train, paths):
        assert len(found) == len(paths)
        assert all(math.isfinite(loss) for losses in found for loss in losses)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_configs_say_why(name: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=REFUSED[name]):
        DeepSpeedConfig.parse(json.loads(CONFIGS[name].read_text()), strict=True, dp_world_size=1)
