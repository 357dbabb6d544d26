"""Checkpointed layers train to the same bits under every stage and number format."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint

RUNS = [(stage, dtype) for stage in (0, 1, 2) for dtype in (torch.float32, torch.bfloat16, torch.float16)]


class Layers(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Dropout(0.2), nn.Tanh()) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x) if self.checkpointed else layer(x)
        return x


def train(checkpointed: bool, stage: int, dtype: torch.dtype) -> tuple[list[float], list[list[float]]]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.5,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16, "initial_scale_power": 8},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=Layers(checkpointed), config=config)
    torch.manual_seed(7 + dist.get_rank())
    losses = []
    for _ in range(6):
        loss = engine(torch.randn(2, 9).to(dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = [param.detach().float().flatten().tolist() for param in engine.module.parameters()]
    engine.destroy()
    return losses, weights


def runs_that_differ() -> list[tuple[int, torch.dtype]]:
    return [run for run in RUNS if train(True, *run) != train(False, *run)]


def test_same_bits_in_every_stage(ranks: Any) -> None:
    assert ranks(runs_that_differ) == [[], []]
