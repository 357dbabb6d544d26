"""One rank of `zero_init.py`: builds the model under `zero.Init` and says what that took. Public API only."""

from __future__ import annotations

import json
import os
import sys
import time


def resident(field: str) -> int:
    """Bytes from /proc/self/status: VmRSS (now) or VmHWM (highest since :func:`forget_peak`)."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")


def main() -> None:
    vocabulary, width, layers = (int(argument) for argument in sys.argv[1:4])
    import torch
    import torch.distributed as dist
    from torch import nn

    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")

    def build(vocabulary: int, width: int, layers: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(vocabulary, width), *(nn.Linear(width, width) for _ in range(layers)))

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        build(256, 256, 2)  # whatever is loaded or made once
    dist.barrier()
    start = time.perf_counter()
    model = build(vocabulary, width, layers)
    bare_s = time.perf_counter() - start
    numel = sum(param.numel() for param in model.parameters())
    largest = max(param.numel() for param in model.parameters())
    del model
    dist.barrier()
    before = resident("VmRSS")
    forget_peak()
    start = time.perf_counter()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build(vocabulary, width, layers)
    dist.barrier()
    init_s = time.perf_counter() - start
    peak, after = resident("VmHWM") - before, resident("VmRSS") - before
    highest = torch.tensor([peak, after], dtype=torch.int64)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    result = {"numel": numel, "largest": largest, "bare_s": bare_s, "init_s": init_s, "world": dist.get_world_size(),
              "peak": int(highest[0]), "after": int(highest[1])}  # fmt: skip
    del model
    dist.barrier()
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
