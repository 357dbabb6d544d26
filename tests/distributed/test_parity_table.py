"""The parity table: stage x precision x accumulation x clipping x ranks x optimizer, bit for bit against plain torch.

Rows are batched into one pool call per (ranks, precision, optimizer), because starting a group costs more than a row.
What is compared after each of 5 steps: losses, norm, skipped steps, weights, masters, optimizer states; on all ranks.
"""

from __future__ import annotations

import itertools

import pytest

from tests.harness.parity import OPTIMIZERS, PRECISIONS, Case, assert_same_training

STAGES = (0, 1, 2)
ACCUMULATION = (1, 3)
CLIP = (0.0, 0.5)
WORLD_SIZES = (1, 2, 3, 4)


@pytest.mark.parametrize("optimizer", tuple(OPTIMIZERS))
@pytest.mark.parametrize("precision", tuple(PRECISIONS))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_same_training_as_plain_torch(pool, world_size: int, precision: str, optimizer: str) -> None:
    cases = [
        Case(stage, precision, accumulation, clip, optimizer)
        for stage, accumulation, clip in itertools.product(STAGES, ACCUMULATION, CLIP)
    ]
    assert_same_training(pool, world_size, cases)


@pytest.mark.parametrize("model", ("tied", "shared", "unused", "branches", "lora", "degenerate", "llama", "embeddings"))
@pytest.mark.parametrize("world_size", (2, 3))
def test_same_training_for_every_kind_of_model(pool, world_size: int, model: str) -> None:
    cases = [
        Case(stage, precision, accumulation=2, clip=0.5, model=model, steps=3, zero=zero)
        for stage in STAGES
        for precision in ("fp32", "bf16")
        for zero in ({}, {"reduce_bucket_size": 50, "allgather_bucket_size": 64, "overlap_comm": True})
    ]
    assert_same_training(pool, world_size, cases)
