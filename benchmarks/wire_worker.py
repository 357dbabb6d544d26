"""One rank of ``wire_bytes.py``: counts every collective of one optimizer step, under any ``deepspeed`` or DDP.

The process group's own methods are counted (a torch dispatch mode over the ``c10d`` operators), so nothing depends on
what the library says of itself. Prints one JSON line on rank 0: calls and bytes sent by this rank, by operator.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(_nbytes(item) for item in value)
    return 0


class WireCounter(TorchDispatchMode):
    """Bytes by the usual convention: all-reduce of M sends 2M(N-1)/N per rank, the others M(N-1)/N."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world = world
        self.calls: dict[str, int] = {}
        self.sent: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::") and "barrier" not in name:
            kind = name.removeprefix("c10d::").rstrip("_")
            self.calls[kind] = self.calls.get(kind, 0) + 1
            self.sent[kind] = self.sent.get(kind, 0.0) + self._bytes(kind, args)
        return func(*args, **(kwargs or {}))

    def _bytes(self, kind: str, args: Any) -> float:
        share = (self.world - 1) / self.world
        if "allreduce" in kind:
            return 2 * _nbytes(args[0]) * share
        if kind == "send":
            return float(_nbytes(args[0]))
        if kind.startswith("recv"):
            return 0.0
        if "alltoall" in kind:
            return float(_nbytes(args[1])) * (1 if self._exchanges_halves(args) else share)
        if "broadcast" in kind:
            return _nbytes(args[0]) * share
        return max(_nbytes(args[0]), _nbytes(args[1]) if len(args) > 1 else 0) * share

    def _exchanges_halves(self, args: Any) -> bool:
        """An all-to-all whose split towards this rank itself is empty sends all of its input."""
        splits = [item for item in args if isinstance(item, (list, tuple)) and item and isinstance(item[0], int)]
        return any(split[dist.get_rank()] == 0 for split in splits)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=("ddp", "0", "1", "2"), required=True)
    parser.add_argument("--bucket", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)])
    numel = sum(param.numel() for param in model.parameters())
    if options.system == "ddp":
        wrapped: Any = DistributedDataParallel(model, bucket_cap_mb=options.bucket * 4 / (1 << 20))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step() -> None:
            wrapped(torch.ones(2, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        import deepspeed

        zero = {
            "stage": int(options.system),
            "reduce_bucket_size": options.bucket,
            "allgather_bucket_size": options.bucket,
        }
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": zero,
        }
        wrapped, *_ = deepspeed.initialize(model=model, config=config)

        def step() -> None:
            wrapped.backward(wrapped(torch.ones(2, 256)).sum())
            wrapped.step()

    step()
    step()
    with WireCounter(world) as counter:
        step()
    if dist.get_rank() == 0:
        print(json.dumps({"calls": counter.calls, "sent": counter.sent, "numel": numel, "world": world}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
