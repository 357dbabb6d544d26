"""Offload on one GPU: the numbers of training without it, and device memory really free. Skipped without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from tests.device.test_cuda_training import STEPS, batch, model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")

KINDS = ("cpu", "super", "half", "param", "all", "disk", "disk_all", "zenflow")
# Of windows of one step: each element is updated in each step, by the device or by the host.
COLUMNS = {"topk_ratio": 0.25, "select_strategy": "step", "select_interval": 2, "update_interval": 1}


def sections(kind: str, folder: Path) -> dict[str, Any]:
    place: dict[str, Any] = {"device": "cpu"}
    if kind.startswith("disk"):
        place = {"device": "nvme", "nvme_path": str(folder)}
    found: dict[str, Any] = {"sub_group_size": 5000}
    if not kind.endswith("param"):
        more = {"half": {"ratio": 0.5}, "super": {"super_offload": True}}.get(kind, {})
        found["offload_optimizer"] = {**place, **more}
    if kind.endswith(("param", "all")):
        found["offload_param"] = dict(place)
    if kind == "zenflow":
        found |= {"zenflow": COLUMNS, "overlap_comm": True}
    return found


def train(dtype: torch.dtype, zero: dict[str, Any], accumulation: int) -> list[torch.Tensor]:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(model=model(), config=config)
    for step in range(STEPS * accumulation):
        x, y = (tensor.to(dtype) for tensor in batch(step))
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = [param.detach().float().cpu() for param in engine.module.parameters()]
    engine.destroy()
    return weights


@pytest.mark.parametrize("accumulation", (1, 2))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "kind"), ((1, "cpu"), (1, "zenflow"), (2, "super"), *((3, kind) for kind in KINDS)))
def test_offload_changes_no_number(stage: int, kind: str, dtype: torch.dtype, accumulation: int, tmp_path: Path):
    right = train(dtype, {"stage": stage}, accumulation)
    # The update runs on another processor: fused multiply-adds differ, and one rounding of bf16 may follow.
    rtol, atol = (1e-5, 1e-6) if dtype is torch.float32 else (2e-2, 2e-3)
    found = train(dtype, {"stage": stage, **sections(kind, tmp_path)}, accumulation)
    for seen, value in zip(found, right, strict=True):
        torch.testing.assert_close(seen, value, rtol=rtol, atol=atol)


@pytest.mark.parametrize("stage", (2, 3))
def test_threads_beside_training_change_no_number(stage: int, tmp_path: Path):
    """Staged weights are not written to while they travel, nor gradients while they are summed up: two runs agree."""
    flow = {**COLUMNS, "update_interval": 2, "select_interval": 5, "overlap_step": True}
    section = {"stage": stage, **sections("zenflow", tmp_path), "zenflow": flow}
    one, two = (train(torch.bfloat16, section, 1) for _ in range(2))
    for left, right in zip(one, two, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("stage", (1, 3))
def test_states_leave_the_device(stage: int):
    width = 2048
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=nn.Linear(width, width), config=config)
    x = torch.ones(2, width, device=engine.device, dtype=torch.bfloat16)
    losses = []
    for _ in range(2):
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        before = torch.cuda.memory_allocated()
        engine.offload_states()
        assert before - torch.cuda.memory_allocated() > 12 * width * width * 0.9  # masters and two moments
        engine.reload_states()
    assert losses[1] != losses[0]
    engine.destroy()
