"""Saves one tag of a 67M-parameter model at stage 3, under this release or the peer; prints one JSON object."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

import deepspeed

WIDTH, LAYERS, VOCABULARY = 640, 12, 12_800


class Block(nn.Module):
    """The tensors of a transformer block; what they compute does not matter here."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.qkv(self.norm(x))[..., :WIDTH])
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embed(tokens)).float().square().mean()


def main() -> None:
    folder = sys.argv[1]
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "steps_per_print": 10**9,
    }
    model = Model()
    shapes = [param.numel() for param in model.parameters()]
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.backward(engine(torch.zeros(1, 4, dtype=torch.int64)))
    engine.step()
    engine.save_checkpoint(folder, tag="tag")
    if dist.get_rank() == 0:
        print(json.dumps({"parameters": sum(shapes), "tensors": len(shapes), "largest": max(shapes)}))


if __name__ == "__main__":
    main()
