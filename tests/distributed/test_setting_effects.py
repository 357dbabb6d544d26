"""Settings that say how gradients travel and add up, end to end: what each changes in trained weights, and what not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.logging import logger

STEPS = 3
SAME: dict[str, dict[str, Any]] = {
    "prescale": {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
    "predivide": {"gradient_predivide_factor": 4.0},
    "fp32 wire": {"communication_data_type": "fp32"},
    "unmanaged": {"managed_gradient_accumulation": False},
    "no override": {"zero": {"override_module_apply": False, "memory_efficient_linear": False}},
    "buckets": {"zero": {"use_multi_rank_bucket_allreduce": False, "allgather_partitions": False}},
}
# Relative error of one rounding of each rank's gradient, of one sum and, at stage 0, of what comes back.
ROUNDED = {"bf16 wire": ("bf16", 3 * 2.0**-9), "fp16 wire": ("fp16", 3 * 2.0**-12)}


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def trained(stage: int, settings: dict[str, Any], steps: int = STEPS, spoiled: int = -1) -> tuple[list[Any], int]:
    """Weights after ``steps`` steps of SGD (whose update is the gradient), and the steps that were skipped."""
    top = {key: value for key, value in settings.items() if key != "zero"}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, **settings.get("zero", {})},
        **top,
    }
    engine, *_ = deepspeed.initialize(model=model(), config=config)
    dtype = next(engine.module.parameters()).dtype
    for step in range(steps):
        inputs = batch(step, dist.get_rank()) * (float("inf") if step == spoiled else 1.0)
        engine.backward(engine(inputs.to(dtype)).float().square().mean())
        engine.step()
    found = [safe_get_full_fp32_param(param).clone() for param in engine.module.parameters()]
    skipped = engine.skipped_steps
    engine.destroy()
    return found, skipped


def table(stage: int) -> dict[str, list[Any]]:
    rows = {"plain": {}, **SAME, **{name: {"communication_data_type": kind} for name, (kind, _) in ROUNDED.items()}}
    found = {name: trained(stage, settings)[0] for name, settings in rows.items()}
    one = {"plain": trained(stage, {}, steps=1)[0]}
    one |= {name: trained(stage, {"communication_data_type": kind}, steps=1)[0] for name, (kind, _) in ROUNDED.items()}
    if stage < 3:
        one["sum"] = trained(stage, {"gradient_allreduce_op": "sum"}, steps=1)[0]
    return {**found, **{f"{name}, one step": weights for name, weights in one.items()}}


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_how_gradients_travel(ranks: Callable[..., list[Any]], stage: int) -> None:
    first, second = ranks(table, stage)
    for name, weights in first.items():
        assert all(torch.equal(a, b) for a, b in zip(weights, second[name], strict=True)), name
    for name in SAME:  # powers of two: dividing before or after is the same to the last bit
        assert all(torch.equal(a, b) for a, b in zip(first[name], first["plain"], strict=True)), name
    start = [param.detach() for param in model().parameters()]
    update = [a - b for a, b in zip(first["plain, one step"], start, strict=True)]
    for name, (_, error) in ROUNDED.items():
        found = first[f"{name}, one step"]
        apart = [(a - b).abs().max() for a, b in zip(found, first["plain, one step"], strict=True)]
        assert max(apart) > 0, f"{name} changes nothing"
        for difference, moved in zip(apart, update, strict=True):
            assert difference <= error * 2 * moved.abs().max() + 1e-7, name
    if stage < 3:
        for a, b, moved in zip(first["sum, one step"], start, update, strict=True):
            torch.testing.assert_close(a - b, 2 * moved, rtol=1e-5, atol=1e-7)


def spoiled(stage: int) -> dict[str, tuple[list[Any], int]]:
    rows: dict[str, dict[str, Any]] = {
        "bf16": {"bf16": {"enabled": True}},
        "checked": {"bf16": {"enabled": True, "check_grad_overflow": True}},
        "all bf16": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    }
    return {name: trained(stage, settings, spoiled=1) for name, settings in rows.items()}


@pytest.mark.parametrize("stage", (0, 3))
def test_a_spoiled_batch_in_bf16_is_skipped(ranks: Callable[..., list[Any]], stage: int) -> None:
    for found in ranks(spoiled, stage):
        for name, (weights, skipped) in found.items():
            assert skipped == 1, name
            assert all(bool(weight.isfinite().all()) for weight in weights), name
        assert all(w.equal(w.bfloat16().float()) for w in found["all bf16"][0])  # masters are bf16 themselves
        assert not all(w.equal(w.bfloat16().float()) for w in found["bf16"][0])


def too_few_buffers(folder: str) -> str:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": folder, "buffer_count": 2},
        },
    }
    with pytest.raises(ValueError, match="buffer_count") as refused:
        deepspeed.initialize(model=model(), config=config)
    return str(refused.value)


@pytest.mark.world(1)
def test_too_few_buffers_for_files_are_refused_at_once(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    (text,) = ranks(too_few_buffers, str(tmp_path))
    assert text == (
        "zero_optimization.offload_optimizer.buffer_count is 2; DeepSpeedCPUAdam needs 3: one for the weights and one "
        "for each of its states (exp_avg, exp_avg_sq)"
    )


def both_optimizers() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    built = model()
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}}
    try:
        engine, *_ = deepspeed.initialize(
            model=built, optimizer=torch.optim.SGD(built.parameters(), lr=0.1), config=config
        )
    finally:
        logger.removeHandler(handler)
    engine.destroy()
    return lines


@pytest.mark.world(1)
def test_an_optimizer_section_beside_the_clients_optimizer_is_warned_of(ranks: Callable[..., list[Any]]) -> None:
    (lines,) = ranks(both_optimizers)
    assert any("optimizer.type='AdamW' has no effect" in line and "(SGD) is used" in line for line in lines)
