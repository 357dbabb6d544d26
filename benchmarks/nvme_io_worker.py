"""The peer's side of ``nvme_io.py``: times its `aio_handle` on one file, as asked line by line on standard input."""

from __future__ import annotations

import sys
import time

import torch

from deepspeed.ops.op_builder import AsyncIOBuilder


def main() -> None:
    path, nbytes, block, depth = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    handle = AsyncIOBuilder().load(verbose=False).aio_handle(block, depth, False, True, 1)
    data = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    data.random_(0, 256)
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        if line.strip() == "write":
            handle.sync_pwrite(data, path)
        else:
            handle.sync_pread(data, path)
        print("seconds", time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
