"""One process's part of a measurement: files of its own, transfers in a loop, seconds.

Owns: the files (in a folder that is removed at the end, and by the next start after a crash). Does not own: what the
seconds mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.ops.aio.handle import aio_handle
from deepspeed.ops.aio.module import aio_read, aio_write
from deepspeed.runtime.swap_tensor.swap_folder import SwapFolder

__all__ = ["IoJob", "run"]


@dataclass(frozen=True)
class IoJob:
    """What to measure. Sizes are bytes."""

    folder: str
    io_size: int
    read: bool
    block_size: int = 1 << 20
    queue_depth: int = 32
    single_submit: bool = False
    overlap_events: bool = True
    threads: int = 1
    engine: str = "aio_handle"
    loops: int = 3
    warmup_loops: int = 1
    device: int | None = None
    """Index of the accelerator whose memory is the other end; None: host memory."""
    pinned: bool = True
    validate: bool = False
    new_file_each_time: bool = False
    legacy_save: bool = False


def run(job: IoJob, number: int = 0, ready: Callable[[], Any] = lambda: None) -> list[float]:
    """Seconds of each transfer, those of the warm-up first. ``ready`` is called before each, outside of the time.

    Raises AioError (an OSError): what the disk refuses.
    """
    folder = SwapFolder(Path(job.folder), number)
    try:
        return _timed(job, folder.path, ready)
    finally:
        folder.close()


def _timed(job: IoJob, folder: Path, ready: Callable[[], Any]) -> list[float]:
    handle = aio_handle(job.block_size, job.queue_depth, job.single_submit, job.overlap_events, job.threads)
    example = torch.empty(0, dtype=torch.uint8)
    pinned = handle.new_cpu_locked_tensor(job.io_size, example) if job.pinned else None
    host = torch.empty(job.io_size, dtype=torch.uint8) if pinned is None else pinned
    host.random_(0, 256)
    place = None if job.device is None else torch.device(get_accelerator().device_name(job.device))
    device = None if place is None else host.to(place)
    transfer = _transfers(job, handle)
    seconds = []
    try:
        for index in range(job.warmup_loops + job.loops):
            path = str(folder / f"{'read' if job.read else 'write'}{index if job.new_file_each_time else 0}")
            if job.read and not Path(path).exists():
                _write_first(job, handle, host, path)
            ready()
            began = time.perf_counter()
            if device is not None and not job.read:
                host.copy_(device)
            transfer(host, path)
            if device is not None and job.read:
                device.copy_(host)
                get_accelerator().synchronize()
            seconds.append(time.perf_counter() - began)
            if job.new_file_each_time:
                Path(path).unlink()
    finally:
        handle._engine.close()
    return seconds


def _write_first(job: IoJob, handle: aio_handle, host: torch.Tensor, path: str) -> None:
    """The file that is going to be read."""
    if job.engine == "torch_io":
        torch.save(host, path, _use_new_zipfile_serialization=not job.legacy_save)
    else:
        handle.sync_pwrite(host, path)


def _transfers(job: IoJob, handle: aio_handle) -> Callable[[torch.Tensor, str], Any]:
    if job.engine == "torch_io":
        if job.read:
            return lambda host, path: host.copy_(torch.load(path, weights_only=True))
        return lambda host, path: torch.save(host, path, _use_new_zipfile_serialization=not job.legacy_save)
    if job.engine == "aio_basic":
        basic = aio_read if job.read else aio_write
        return lambda host, path: basic(
            host, path, job.block_size, job.queue_depth, job.single_submit, job.overlap_events, job.validate
        )
    method = handle.pread if job.read else handle.pwrite
    return lambda host, path: method(host, path, job.validate, False)
