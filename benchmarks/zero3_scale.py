"""What one rank of a very large job pays at stage 3: time and memory of ``initialize``, on torch's fake process group.

    python benchmarks/zero3_scale.py                       the table: 70B and 405B on 1,024 and 16,384 ranks
    python benchmarks/zero3_scale.py --model 70b --ranks 1024 --rank 7

Models have the shapes of Llama 3 on the meta device, so nothing but this rank's shard is ever allocated. Collectives
do nothing in the fake group: what is measured is this library's own work and memory. Memory is that of the shard
itself (16-bit weights, fp32 masters; optimizer state comes with the first step) and what the process needs beyond it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Shape:
    layers: int
    dim: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int = 128_256


SHAPES = {
    "8b": Shape(32, 4096, 14_336, 32, 8),
    "70b": Shape(80, 8192, 28_672, 64, 8),
    "405b": Shape(126, 16_384, 53_248, 128, 8),
}


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        head = shape.dim // shape.heads
        self.norm_1, self.norm_2 = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, head * shape.kv_heads, bias=False)
        self.v = nn.Linear(shape.dim, head * shape.kv_heads, bias=False)
        self.o = nn.Linear(shape.dim, shape.dim, bias=False)
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)


class Llama(nn.Module):
    """The parameters of a Llama 3; never run."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(model: str, ranks: int, rank: int) -> dict[str, float]:
    """Initialize as rank ``rank`` of ``ranks``; seconds and bytes."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import deepspeed
    from deepspeed.runtime import build

    build.agree_on_model = lambda model, group: None  # the ranks of a fake group have nothing to compare
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    with torch.device("meta"):
        module = Llama(SHAPES[model]).bfloat16()
    before, start = resident(), time.perf_counter()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 0},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    seconds = time.perf_counter() - start
    held = engine.optimizer.model_state_bytes()
    return {
        "parameters": sum(param.numel() for param in module.parameters()),
        "seconds": seconds,
        "shard_bytes": held["parameter"] + held["master"],
        "beyond_bytes": resident() - before - held["parameter"] - held["master"],
        "workspace_bytes": held["workspace"],
        "blocks": len(engine.sharded_module.gatherer.blocks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SHAPES))
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=5)
    options = parser.parse_args()
    if options.model:
        print(json.dumps(measure(options.model, options.ranks, options.rank)))
        return
    columns = ("model", "ranks", "blocks", "seconds", "shard MB", "beyond it MB", "workspace MB")
    print(" ".join(f"{column:>12}" for column in columns))
    for model in ("70b", "405b"):
        for ranks in (1024, 16_384):
            command = [sys.executable, __file__, "--model", model, "--ranks", str(ranks)]
            environment = {**os.environ, "DS_ACCELERATOR": "cpu", "DS_START_TABLE": "0"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            found = json.loads(done.stdout.splitlines()[-1])
            sizes = [f"{found[key] / 1e6:.0f}" for key in ("shard_bytes", "beyond_bytes", "workspace_bytes")]
            cells = (model, ranks, found["blocks"], f"{found['seconds']:.1f}", *sizes)
            print(" ".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
