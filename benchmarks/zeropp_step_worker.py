"""One rank of ``zeropp_step.py``. Rank 0 prints one JSON line: bytes between nodes, seconds of each step, by mode."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from slow_link import SlowLink
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.comm import collectives

PER_NODE = 2
FORCED = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
}
PACKED = {"zero_quantized_weights": True, "zero_hpz_partition_size": PER_NODE, "zero_quantized_gradients": True}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hpZ": {"zero_hpz_partition_size": PER_NODE},
    "qwZ + hpZ + qgZ": PACKED,
    "qwZ + hpZ + qgZ + LoCo": {**PACKED, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}},
    "MiCS": {"mics_shard_size": PER_NODE},
}


class Mode:
    """One way to train, and what its steps took."""

    def __init__(self, zero: dict[str, Any], width: int, layers: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 10**9,
            "bf16": {"enabled": True},
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, **FORCED, **zero},
        }
        self.engine, *_ = deepspeed.initialize(model=model, config=config)
        self.x = torch.randn(2, width).bfloat16()
        self.found: dict[str, Any] = {"seconds": [], "free_seconds": []}

    def step(self) -> None:
        self.engine.backward(self.engine(self.x).float().pow(2).mean())
        self.engine.step()

    def timed(self, name: str, rate: float) -> None:
        collectives.barrier()
        with SlowLink([rank // PER_NODE for rank in range(dist.get_world_size())], rate) as link:
            started = time.perf_counter()
            self.step()
            collectives.barrier()
            self.found[name].append(time.perf_counter() - started)
        self.found["bytes"] = link.crossed_bytes * PER_NODE


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, required=True)
    for key in ("layers", "width", "steps"):
        parser.add_argument(f"--{key}", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm.init_distributed("gloo", verbose=False)
    modes = {name: Mode(zero, options.width, options.layers) for name, zero in MODES.items()}
    for mode in modes.values():
        mode.step()
        mode.step()
    for _ in range(options.steps):  # in turn, so that a machine that is busy for a while moves all of them
        for mode in modes.values():
            mode.timed("free_seconds", float("inf"))
            mode.timed("seconds", options.rate)
    found = {name: mode.found for name, mode in modes.items()}
    for mode in modes.values():
        mode.engine.destroy()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    collectives.barrier()
    comm.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
