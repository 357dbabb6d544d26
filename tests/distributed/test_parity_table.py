"""The parity table: stage x precision x accumulation x clipping x ranks x optimizer, bit for bit against plain torch.

Rows are batched into pool calls per (ranks, precision, optimizer), because starting a group costs more than a row. The
daily run takes one half of the rows of each, in which every pair of values of the other axes occurs.
Compared after each of 3 to 5 steps, on all ranks: losses, norm, skipped steps, weights, masters, optimizer states.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.harness.parity import OPTIMIZERS, PRECISIONS, Case, assert_same_training, steps_for
from tests.harness.width import product

STAGES = (0, 1, 2)
ACCUMULATION = (1, 3)
CLIP = (0.0, 0.5)
WORLD_SIZES = (1, 2, 3, 4)
MODELS = ("tied", "shared", "unused", "branches", "lora", "degenerate", "llama", "embeddings")
WHOLE: dict[str, Any] = {}
IN_PIECES = {"reduce_bucket_size": 50, "allgather_bucket_size": 64, "overlap_comm": True}


def _in_daily_run(world_size: int, precision: str, optimizer: str) -> bool:
    return world_size == 2 or optimizer == "adamw" or (precision == "bf16" and world_size == 4)


def _halves(*axes: Sequence[Any]) -> tuple[list[tuple[Any, ...]], ...]:
    """The product of the axes in two halves; in each, every value of an axis meets every value of every other axis."""
    halves: tuple[list[tuple[Any, ...]], ...] = ([], [])
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        halves[sum(places) % 2].append(tuple(axis[place] for axis, place in zip(axes, places, strict=True)))
    return halves


@pytest.mark.parametrize(
    ("world_size", "precision", "optimizer", "half"),
    product(
        WORLD_SIZES, tuple(PRECISIONS), tuple(OPTIMIZERS), (0, 1),
        daily=lambda world_size, precision, optimizer, half: _in_daily_run(world_size, precision, optimizer)
        and half == (world_size + list(PRECISIONS).index(precision) + list(OPTIMIZERS).index(optimizer)) % 2,
    ),
)  # fmt: skip
def test_same_training_as_plain_torch(pool, world_size: int, precision: str, optimizer: str, half: int) -> None:
    cases = [
        Case(stage, precision, accumulation, clip, optimizer, steps=steps_for(world_size, precision))
        for stage, accumulation, clip in _halves(STAGES, ACCUMULATION, CLIP)[half]
    ]
    assert_same_training(pool, world_size, cases)


@pytest.mark.parametrize(
    ("world_size", "model", "half"),
    product(
        (2, 3), MODELS, (0, 1),
        daily=lambda world_size, model, half: (world_size == 2 or model in ("branches", "degenerate"))
        and half == (world_size + MODELS.index(model)) % 2,
    ),
)  # fmt: skip
def test_same_training_for_every_kind_of_model(pool, world_size: int, model: str, half: int) -> None:
    cases = [
        Case(stage, precision, accumulation=2, clip=0.5, model=model, steps=3, zero=zero)
        for stage, precision, zero in _halves(STAGES, ("fp32", "bf16"), (WHOLE, IN_PIECES))[half]
    ]
    assert_same_training(pool, world_size, cases)
