"""One rank of ``zeropp_convergence.py``. Rank 0 prints one JSON line: the loss at the end by mode."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.comm import collectives

VOCABULARY, LENGTH, ROWS, WIDTH = 61, 24, 8, 64
PACKED = {"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "qwZ + hpZ + qgZ": PACKED,
    "qwZ + hpZ + qgZ + LoCo": {**PACKED, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}},
    "MiCS": {"mics_shard_size": 2},
}


class Small(nn.Module):
    """Embedding with positions, two transformer layers, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.place[:length]
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)


def sentences(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    follows = torch.rand(ROWS, LENGTH, generator=generator) < 2 / 3
    for place in range(1, LENGTH):
        tokens[:, place] = torch.where(follows[:, place], (3 * tokens[:, place - 1] + 1) % VOCABULARY, tokens[:, place])
    return tokens


def train(zero: dict[str, Any], steps: int) -> float:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 3, **zero},
    }
    engine, *_ = deepspeed.initialize(model=Small(), config=config)
    total, counted = torch.zeros(1), 0
    for step in range(steps):
        tokens = sentences(step, dist.get_rank())
        logits = engine(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        if step >= steps - steps // 5:
            total, counted = total + loss.detach(), counted + 1
        engine.backward(loss)
        engine.step()
    engine.destroy()
    dist.all_reduce(total)
    return float(total) / counted / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm.init_distributed("gloo", verbose=False)
    found = {name: train(zero, options.steps) for name, zero in MODES.items()}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    collectives.barrier()
    comm.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
