"""One rank of ``transport.py``: times each collective through `deepspeed.comm` and through gloo, alternating.

Prints one JSON line on rank 0: {"kind/bytes": {"ours": [best, median], "gloo": [best, median]}} in microseconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)


def calls(kind: str, nbytes: int, ranks: int) -> dict[str, Callable[[], Any]]:
    """The same call of both: `nbytes` of the full tensor in fp32."""
    from deepspeed import comm

    numel = nbytes // 4 // ranks * ranks
    full, shard, out = torch.ones(numel), torch.ones(numel // ranks), torch.ones(numel)
    if kind == "all_reduce":
        return {"ours": lambda: comm.all_reduce(full), "gloo": lambda: torch_dist.all_reduce(full)}
    if kind == "reduce_scatter":
        return {
            "ours": lambda: comm.reduce_scatter_tensor(shard, full),
            "gloo": lambda: torch_dist.reduce_scatter_tensor(shard, full),
        }
    if kind == "all_gather":
        return {
            "ours": lambda: comm.all_gather_into_tensor(full, shard),
            "gloo": lambda: torch_dist.all_gather_into_tensor(full, shard),
        }
    if kind == "broadcast":
        return {"ours": lambda: comm.broadcast(full, 0), "gloo": lambda: torch_dist.broadcast(full, 0)}
    return {
        "ours": lambda: comm.all_to_all_single(out, full),
        "gloo": lambda: torch_dist.all_to_all_single(out, full),
    }


def pretend_hosts(hosts: int) -> None:
    """Let neighbouring ranks share a host and others not, for the package alone: gloo sees one machine."""
    from deepspeed.comm import same_host

    host = int(os.environ["RANK"]) * hosts // int(os.environ["WORLD_SIZE"])
    same_host.host_identity = lambda: hashlib.sha256(bytes([host])).digest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=1, help="pretend to be on so many")
    options = parser.parse_args()
    if options.hosts > 1:
        pretend_hosts(options.hosts)
    warnings.simplefilter("ignore")  # torch renames its flat collectives
    torch.set_num_threads(1)
    torch_dist.init_process_group("gloo")
    ranks = torch_dist.get_world_size()
    found: dict[str, dict[str, list[float]]] = {}
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"):
        for nbytes in SIZES:
            times: dict[str, list[float]] = {"ours": [], "gloo": []}
            pair = calls(kind, nbytes, ranks)
            for _ in range(options.rounds):
                for name, call in pair.items():
                    for _ in range(3):
                        call()
                    torch_dist.barrier()
                    for _ in range(60 if nbytes < 1 << 20 else 12 if nbytes < 1 << 24 else 4):
                        begin = time.perf_counter()
                        call()
                        times[name].append((time.perf_counter() - begin) * 1e6)
            found[f"{kind}/{nbytes}"] = {name: [min(v), statistics.median(v)] for name, v in times.items()}
    if torch_dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    torch_dist.barrier()
    torch_dist.destroy_process_group()


if __name__ == "__main__":
    main()
