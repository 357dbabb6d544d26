"""Trains and saves, or loads a universal folder, under whichever ``deepspeed`` the interpreter has; prints digests.

    universal_worker.py save|load STAGE PRECISION FOLDER

The last line of rank 0 is a JSON object: a hash of every master and moment, the step count, and what one more step
makes of the masters (so that step counts and hyper-parameters are seen too).
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}  # no fp16 there on CPUs


class Model(nn.Module):
    """Odd sizes, a tied weight, a buffer. Nothing frozen: the peer does not load that from universal folders."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 7)
        self.mix, self.back = nn.Linear(7, 13), nn.Linear(13, 7)
        self.head = nn.Linear(7, 23, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.back(torch.tanh(self.mix(self.embed(tokens))))))


def settings(stage: int, precision: str, loading: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        "checkpoint": {"load_universal": loading},
        **PRECISIONS[precision],
    }


def step(engine: Any, index: int) -> None:
    generator = torch.Generator().manual_seed(index)  # the same on every rank: no sum over ranks rounds differently
    tokens = torch.randint(0, 23, (2, 6), generator=generator)
    engine.backward(F.cross_entropy(engine(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()))
    engine.step()


def digests(engine: Any) -> dict[str, str]:
    found = {}
    for name, param in engine.module.named_parameters():
        tensors = {key: safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")}
        for key, value in {"fp32": safe_get_full_fp32_param(param), **tensors}.items():
            bits = value.detach().float().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[f"{name}/{key}"] = hashlib.sha256(bits).hexdigest()[:16]
    return found


def main() -> None:
    mode, stage, precision, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0 if mode == "save" else 5)
    engine, *_ = deepspeed.initialize(model=Model(), config=settings(stage, precision, mode == "load"))
    if mode == "save":
        for index in range(3):
            step(engine, index)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    report: dict[str, Any] = {"state": digests(engine), "steps": engine.global_steps}
    report["rate"] = engine.optimizer.param_groups[0]["lr"]
    step(engine, 9)
    report["masters"] = [
        safe_get_full_fp32_param(param).flatten()[:5].tolist() for _, param in engine.module.named_parameters()
    ]
    if dist.get_rank() == 0:
        print(json.dumps(report), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
