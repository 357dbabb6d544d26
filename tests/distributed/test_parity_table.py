"""The parity table: stage x precision x accumulation x clipping x ranks x optimizer, bit for bit against plain torch.

Rows are batched into one pool call per (ranks, precision, optimizer), because starting a group costs more than a row.
What is compared after each of 5 steps: losses, norm, skipped steps, weights, masters, optimizer states; on all ranks.
"""

from __future__ import annotations

import itertools

import pytest

from tests.harness.parity import OPTIMIZERS, PRECISIONS, Case, assert_same_training
from tests.harness.width import product

STAGES = (0, 1, 2)
ACCUMULATION = (1, 3)
CLIP = (0.0, 0.5)
WORLD_SIZES = (1, 2, 3, 4)


def _in_daily_run(world_size: int, precision: str, optimizer: str) -> bool:
    return world_size == 2 or optimizer == "adamw" or (precision == "bf16" and world_size == 4)


@pytest.mark.parametrize(
    ("world_size", "precision", "optimizer"),
    product(WORLD_SIZES, tuple(PRECISIONS), tuple(OPTIMIZERS), daily=_in_daily_run),
)
def test_same_training_as_plain_torch(pool, world_size: int, precision: str, optimizer: str) -> None:
    cases = [
        Case(stage, precision, accumulation, clip, optimizer)
        for stage, accumulation, clip in itertools.product(STAGES, ACCUMULATION, CLIP)
    ]
    assert_same_training(pool, world_size, cases)


@pytest.mark.parametrize(
    ("world_size", "model"),
    product(
        (2, 3),
        ("tied", "shared", "unused", "branches", "lora", "degenerate", "llama", "embeddings"),
        daily=lambda world_size, model: world_size == 2 or model in ("branches", "degenerate"),
    ),
)
def test_same_training_for_every_kind_of_model(pool, world_size: int, model: str) -> None:
    cases = [
        Case(stage, precision, accumulation=2, clip=0.5, model=model, steps=3, zero=zero)
        for stage in STAGES
        for precision in ("fp32", "bf16")
        for zero in ({}, {"reduce_bucket_size": 50, "allgather_bucket_size": 64, "overlap_comm": True})
    ]
    assert_same_training(pool, world_size, cases)
