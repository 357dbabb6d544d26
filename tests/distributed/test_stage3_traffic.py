"""How many collectives a step of stage 3 makes, counted at the backend: few, however many Linears."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from benchmarks.wire_worker import WireCounter
from tests.harness.width import wide


@patch.dict(os.environ, DS_SHM="0")  # what goes through shared memory is no call of the backend
def collectives(width: int, count: int, zero: dict[str, Any]) -> tuple[int, float]:
    """(collectives, elements sent in units of P(N-1)/N) of the third step of ``count`` Linears in fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
    numel = sum(param.numel() for param in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, **zero},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    world = dist.get_world_size()
    for _ in range(3):
        with WireCounter(world) as counter:
            engine.backward(engine(torch.ones(1, width)).mean())
            engine.step()
    engine.destroy()
    # The agreement is an all-reduce of doubles: four, and one a parameter.
    agreement = 2 * 8 * (4 + 2 * count) * (world - 1) / world
    sent = (sum(counter.sent.values()) - agreement) / 4 / (numel * (world - 1) / world)
    return sum(counter.calls.values()), sent


@pytest.mark.parametrize(
    ("width", "count", "zero", "calls"),
    (
        # 4 blocks of 4 matrices and one of the biases: each reduced once and gathered once; and the agreement.
        (512, 16, {}, 11),
        wide(1024, 16, {}, 11),
        (16, 50, {}, 3),
        # Released: 4 blocks and the biases, whose block is small enough to stay.
        (512, 16, {"stage3_max_live_parameters": 0, "reduce_bucket_size": 4 * 512 * 512}, 4 * 3 - 1 + 2 + 1),
    ),
)
def test_collectives_of_a_step(pool: Any, width: int, count: int, zero: dict[str, Any], calls: int) -> None:
    for made, sent in pool.run(2, collectives, width, count, zero):
        assert made == calls
        assert sent == 2 if not zero else 2 < sent < 3
