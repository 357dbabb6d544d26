"""The memory estimate of a run against the tensors that are really alive."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.zero.memory_estimators import model_state_bytes, model_to_params

# Small against the model, so that what the estimate leaves out is small against the tolerance.
BUCKET_NUMEL = 8192
RUNS = [
    (0, torch.float32, 1),
    (0, torch.bfloat16, 1),
    (1, torch.bfloat16, 1),
    (2, torch.float32, 1),
    (2, torch.bfloat16, 3),
]


def live_bytes() -> int:
    """Bytes of the storages of all tensors in this process, gradients that only autograd knows included."""
    gc.collect()
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        # Plain ones alone: a compiler that ran earlier in this process leaves tensors without memory.
        plain = type(candidate) in (torch.Tensor, torch.nn.Parameter)
        if plain and candidate.device.type == "cpu" and candidate.layout is torch.strided:
            tensors = [candidate, candidate.grad] if candidate.is_leaf else [candidate]
            for tensor in tensors:
                if tensor is not None:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def config(stage: int, dtype: torch.dtype, accumulation: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BUCKET_NUMEL,
            "allgather_bucket_size": BUCKET_NUMEL,
        },
    }


def most_alive(stage: int, dtype: torch.dtype, accumulation: int) -> tuple[int, int]:
    """(parameters of the model, most bytes alive after a backward or a step of the second window)."""
    before = live_bytes()
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(
        model=nn.Sequential(*(nn.Linear(128, 128) for _ in range(16))), config=config(stage, dtype, accumulation)
    )
    numel = model_to_params(engine.module)
    seen = []
    for micro_step in range(2 * accumulation):
        engine.backward(engine(torch.ones(2, 128, dtype=dtype)).float().square().mean())
        if micro_step >= accumulation:
            seen.append(live_bytes() - before)
        engine.step()
    seen.append(live_bytes() - before)
    engine.destroy()
    return numel, max(seen)


def relative_errors() -> list[float]:
    errors = []
    for stage, dtype, accumulation in RUNS:
        numel, measured = most_alive(stage, dtype, accumulation)
        estimate = model_state_bytes(
            numel, dist.get_world_size(), stage, model_dtype=dtype, gradient_accumulation_steps=accumulation
        )
        errors.append(measured / estimate.device - 1)
    return errors


def test_estimates_are_within_five_percent_of_what_is_alive(ranks: Any) -> None:
    for errors in ranks(relative_errors):
        assert {run: error for run, error in zip(RUNS, errors, strict=True) if abs(error) > 0.05} == {}
