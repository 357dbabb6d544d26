"""One rank of ``wire_bytes.py``: counts every collective of one optimizer step, under any ``deepspeed`` or DDP.

The process group's own methods are counted (a torch dispatch mode over the ``c10d`` operators), so nothing depends on
what the library says of itself. Prints one JSON line on rank 0: calls and bytes sent by this rank, by operator.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
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


def _pair() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))


# Parameters: 16 matrices in one list; the same in 8 blocks; 16 too large to stay gathered as small ones do, and enough
# for blocks of the size chosen by default; 100 tensors that are small enough to stay gathered.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "flat": lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)]),
    "blocks": lambda: nn.Sequential(*[_pair() for _ in range(8)]),
    "large": lambda: nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)]),
    "small": lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(50)]),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=("ddp", "0", "1", "2", "3"), required=True)
    parser.add_argument("--bucket", type=int, default=0, help="elements; 0: what the library chooses")
    parser.add_argument("--model", choices=tuple(MODELS), default="flat")
    parser.add_argument("--zero", type=json.loads, default={}, help="more keys of zero_optimization, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = MODELS[options.model]()
    row = torch.ones(2, next(iter(model.parameters())).shape[1])
    numel = sum(param.numel() for param in model.parameters())
    if options.system == "ddp":
        wrapped: Any = DistributedDataParallel(model, bucket_cap_mb=options.bucket * 4 / (1 << 20))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step() -> None:
            wrapped(row).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        import deepspeed

        zero = {"stage": int(options.system), **options.zero}
        if options.bucket:
            zero |= {"reduce_bucket_size": options.bucket, "allgather_bucket_size": options.bucket}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": zero,
        }
        wrapped, *_ = deepspeed.initialize(model=model, config=config)

        def step() -> None:
            wrapped.backward(wrapped(row).sum())
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
    os.environ["DS_SHM"] = "0"  # what goes through shared memory is no call of the process group
    main()
