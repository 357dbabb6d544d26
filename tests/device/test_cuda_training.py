"""The engine on one GPU equals plain torch on the same GPU. Skipped without one; ``scripts/gpu_check.sh`` runs it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import deepspeed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")

STEPS = 5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).cuda()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 64, generator=generator).cuda(), torch.randn(8, 64, generator=generator).cuda()


def plain(dtype: torch.dtype) -> list[torch.Tensor]:
    """Mixed-precision AdamW with fp32 masters and clipping, written out."""
    low = model().to(dtype)
    masters = [nn.Parameter(param.detach().float()) for param in low.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.0, fused=True)
    for step in range(STEPS):
        x, y = (tensor.to(dtype) for tensor in batch(step))
        nn.functional.mse_loss(low(x), y).backward()
        for master, param in zip(masters, low.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, low.parameters(), strict=True):
                param.copy_(master)
    return [param.detach().float() for param in low.parameters()]


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=["fp32", "bf16"])
def test_training_equals_plain_torch(stage: int, dtype: torch.dtype):
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "overlap_comm": True},
    }
    engine, *_ = deepspeed.initialize(model=copy.deepcopy(model()), config=config)
    for step in range(STEPS):
        x, y = (tensor.to(dtype) for tensor in batch(step))
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    # The norm is summed in another order than clip_grad_norm_'s, so the clip factor may differ in its last bit.
    for ours, theirs in zip(engine.module.parameters(), plain(dtype), strict=True):
        torch.testing.assert_close(
            ours.detach().float(), theirs, rtol=1e-5, atol=1e-6 if dtype is torch.float32 else 4e-3
        )
    engine.destroy()


def test_fp16_skips_a_step_that_overflows_and_goes_on():
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=model(), config=config)
    before = engine.loss_scale()
    for step in range(30):
        x, y = (tensor.half() for tensor in batch(step))
        engine.backward(nn.functional.mse_loss(engine(x).float(), y.float()))
        engine.step()
    assert engine.skipped_steps > 0
    assert engine.loss_scale() < before
    assert engine.global_steps - engine.skipped_steps > 0
    assert all(torch.isfinite(param).all() for param in engine.module.parameters())
    engine.destroy()


@pytest.mark.parametrize("decoupled", (False, True), ids=["at once", "beside training"])
@pytest.mark.parametrize("stage", (0, 3))
def test_a_resumed_run_equals_the_one_that_went_on(stage: int, decoupled: bool, tmp_path):
    """What is saved is what the device held at the call, although training goes on while it is written."""
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"writer": {"type": "FAST", "decoupled": decoupled}} if decoupled else {},
    }

    def train(engine, first: int) -> list[float]:
        losses = []
        for step in range(first, first + STEPS):
            x, y = (tensor.bfloat16() for tensor in batch(step))
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    engine, *_ = deepspeed.initialize(model=model(), config=config)
    train(engine, 0)
    engine.save_checkpoint(str(tmp_path))
    went_on = train(engine, STEPS)
    engine.destroy()
    resumed, *_ = deepspeed.initialize(model=model(), config=config)
    path, _ = resumed.load_checkpoint(str(tmp_path))
    assert path is not None
    assert train(resumed, STEPS) == went_on
    resumed.destroy()
