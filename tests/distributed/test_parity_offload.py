"""Masters, states and gradients in host memory against plain torch, bit for bit: offload changes no number."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.offload import offload_sections
from tests.harness.parity import PRECISIONS, Case, assert_same_training
from tests.harness.width import product, wide

CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
IN_UNITS = {**CPU, "sub_group_size": 30, "reduce_bucket_size": 50, "overlap_comm": True}
RELEASED = {
    **CPU,
    "reduce_bucket_size": 50,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "overlap_comm": False,
}
PARAMETERS = {**RELEASED, "offload_param": {"device": "cpu"}}
PARAMETERS_ALONE = {"offload_param": {"device": "cpu"}, "reduce_bucket_size": 50}
DISK = {**RELEASED, **offload_sections("disk"), "sub_group_size": 30}
DISK_ALL = {**offload_sections("disk_all"), "sub_group_size": 200}
SUPER = {**IN_UNITS, **offload_sections("super")}
TWIN_FLOW = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "reduce_bucket_size": 64}
DAILY_MODELS = ("shared", "lora", "degenerate")
MODELS = ("tied", "unused", "llama", "embeddings")


def _in_daily_run(world_size: int, precision: str, optimizer: str) -> bool:
    if optimizer == "adamw":
        return world_size == 2 and precision in ("fp32", "bf16", "fp16")
    return (world_size, precision, optimizer) == (1, "bf16", "sgd")


@pytest.mark.parametrize(
    ("world_size", "precision", "optimizer"),
    product((1, 2, 3, 4), tuple(PRECISIONS), ("adamw", "sgd", "group_lr"), daily=_in_daily_run),
)
def test_same_training_as_plain_torch(pool, world_size: int, precision: str, optimizer: str) -> None:
    rows = ((1, CPU, 1, 0.5), (2, IN_UNITS, 3, 0.0), (3, IN_UNITS, 1, 0.5), (3, RELEASED, 3, 0), (3, TWIN_FLOW, 1, 0))
    rows += ((3, PARAMETERS, 3, 0.5), (3, PARAMETERS_ALONE, 1, 0.5), (3, DISK, 1, 0), (3, DISK_ALL, 3, 0.5))
    rows += ((2, SUPER, 1, 0.0), (3, SUPER, 3, 0.5))
    steps = 5 if precision == "fp16" else 3  # a loss scale falls and grows again
    cases = [
        Case(stage, precision, micros, clip, optimizer, steps=steps, zero=zero) for stage, zero, micros, clip in rows
    ]
    assert_same_training(pool, world_size, cases)


@pytest.mark.parametrize("model", (*DAILY_MODELS, *map(wide, MODELS)))
def test_same_training_for_every_kind_of_model(pool, model: str) -> None:
    rows = ((2, CPU, "bf16"), (1, IN_UNITS, "fp32"), (3, PARAMETERS, "bf16"), (3, DISK_ALL, "fp32"))
    cases = [Case(stage, p, accumulation=2, clip=0.5, model=model, steps=3, zero=zero) for stage, zero, p in rows]
    assert_same_training(pool, 2, cases)
