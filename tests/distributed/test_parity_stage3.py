"""Stage 3 against plain torch, bit for bit: everything kept gathered, and everything released as soon as it may be.

`FORCED` releases a block at the next use of another one, so that every forward and backward gathers; `SMALL` cuts the
model into many blocks and prefetches; `PERSISTENT` keeps small parameters.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.parity import OPTIMIZERS, PRECISIONS, Case, assert_same_training, steps_for
from tests.harness.width import product

KEPT: dict[str, Any] = {}
FORCED = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
}
SMALL = {**FORCED, "reduce_bucket_size": 50, "stage3_prefetch_bucket_size": 200}
PERSISTENT = {
    "reduce_bucket_size": 64,
    "stage3_max_live_parameters": 300,
    "stage3_max_reuse_distance": 200,
    "stage3_param_persistence_threshold": 20,
    "overlap_comm": False,
}
MODELS = ("tied", "shared", "unused", "lora", "degenerate", "llama", "embeddings", "branches")


def _in_daily_run(world_size: int, precision: str, optimizer: str) -> bool:
    return world_size == 2 or (world_size > 2 and optimizer == "adamw") or (precision, optimizer) == ("bf16", "sgd")


@pytest.mark.parametrize(
    ("world_size", "precision", "optimizer"),
    product((1, 2, 3, 4), tuple(PRECISIONS), tuple(OPTIMIZERS), daily=_in_daily_run),
)
def test_same_training_as_plain_torch(pool, world_size: int, precision: str, optimizer: str) -> None:
    steps = steps_for(world_size, precision)
    # Both settings meet every accumulation and every clip, and every pair of these meets one of the settings.
    cases = [
        Case(3, precision, accumulation, clip, optimizer, steps=steps, zero=zero)
        for zero, accumulation, clip in ((KEPT, 1, 0.5), (KEPT, 3, 0.0), (SMALL, 3, 0.5), (SMALL, 1, 0.0))
    ]
    assert_same_training(pool, world_size, cases)


@pytest.mark.parametrize(
    ("world_size", "model", "half"),
    product(
        (2, 3), MODELS, (0, 1),
        daily=lambda world_size, model, half: (world_size == 2 or model in ("llama", "lora"))
        and half == world_size % 2,
    ),
)  # fmt: skip
def test_same_training_for_every_kind_of_model(pool, world_size: int, model: str, half: int) -> None:
    # A layer that only one rank uses cannot be gathered by itself; it is as part of a block that all ranks use.
    settings = (KEPT,) if model == "branches" else (KEPT, FORCED, SMALL, PERSISTENT)
    cases = [
        Case(3, precision, accumulation=2, clip=0.5, model=model, steps=3, zero=zero)
        for number, zero in enumerate(settings)
        for place, precision in enumerate(("fp32", "bf16"))
        if half == (number + place + MODELS.index(model)) % 2
    ]
    assert_same_training(pool, world_size, cases)
