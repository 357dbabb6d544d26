"""One rank of ``zeropp_wire.py``. Rank 0 prints one JSON line: bytes that left its node by collective, and seconds."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from slow_link import SlowLink

from deepspeed import comm
from deepspeed.comm import collectives, quantized
from deepspeed.comm.group_facts import facts_of
from deepspeed.comm.mesh import ParallelMesh

PER_NODE = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm.init_distributed("gloo")
    world = dist.get_world_size()
    nodes = [rank // PER_NODE for rank in range(world)]
    levels = ParallelMesh.build().levels(PER_NODE)
    torch.manual_seed(dist.get_rank())
    full = torch.randn(options.numel).bfloat16()
    shard = torch.randn(options.numel // world).bfloat16()
    secondary = torch.randn(options.numel // PER_NODE).bfloat16()
    out = torch.empty(options.numel // world)
    calls: dict[str, Callable[[], object]] = {
        "plain gather": lambda: collectives.all_gather(full, shard, None),
        "plain reduce": lambda: collectives.reduce_scatter(out, full, None, average=True),
        "qwZ": lambda: quantized.all_gather(full, shard, levels),
        "hpZ": lambda: collectives.all_gather(full, secondary, levels.inner),
        "qgZ": lambda: quantized.reduce_scatter(out, full, levels, average=True),
    }
    crossed, sent = {}, {}
    between = facts_of(levels.outer)
    for name, call in calls.items():
        before = between.bytes_sent
        with SlowLink(nodes, float("inf")) as link:
            call()
        crossed[name] = link.crossed_bytes * PER_NODE
        if name in ("qwZ", "hpZ", "qgZ"):
            sent[name] = (between.bytes_sent - before) * PER_NODE
    steps = {"plain": ("plain gather", "plain gather", "plain reduce"), "packed": ("qwZ", "hpZ", "qgZ")}
    seconds = {name: float("inf") for name in steps}
    for _ in range(3):
        for name, names in steps.items():
            collectives.barrier()
            started = time.perf_counter()
            with SlowLink(nodes, options.rate):
                for call in names:
                    calls[call]()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    if dist.get_rank() == 0:
        print(json.dumps({"crossed": crossed, "sent": sent, "seconds": seconds}), flush=True)
    collectives.barrier()
    comm.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
