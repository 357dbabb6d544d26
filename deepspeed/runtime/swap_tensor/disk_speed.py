"""How fast a folder's disk reads and writes, measured in about a fifth of a second, and what that means for a step.

Owns: the measurement, kept per folder for the life of the process. Does not own: who shows it.
Invariant: the file it makes is gone when it returns, also when it fails.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from deepspeed.ops.aio.engine import AioEngine
from deepspeed.ops.aio.files import AioFile, free_nbytes
from deepspeed.runtime.swap_tensor.aio_config import AioConfig
from deepspeed.utils.host_buffer import HostBuffer

__all__ = ["DiskSpeed", "measure_disk"]

_PART = 16 << 20
_PARTS = 4
_BUDGET_S = 0.15  # per direction: a slow disk is measured with fewer bytes


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes per second, and how they were moved."""

    read: float
    write: float
    engine: str
    """uring, threads or python."""
    direct: bool
    """Whether transfers go past the page cache; if not, the figures are those of memory rather than of the disk."""

    def step_seconds(self, read_nbytes: int, write_nbytes: int) -> float:
        """The least time for so many bytes, reads and writes one after the other.  # seconds"""
        return read_nbytes / self.read + write_nbytes / self.write

    def describe(self, read_nbytes: int, write_nbytes: int) -> str:
        """One line for the start: speed, and the cost of a step that moves so many bytes."""
        how = "past the page cache" if self.direct else "through the page cache"
        return (
            f"disk: read {self.read / 1e9:.2f} GB/s, write {self.write / 1e9:.2f} GB/s ({self.engine}, {how}); a step "
            f"reads {read_nbytes / 1e9:.3g} GB and writes {write_nbytes / 1e9:.3g} GB: at least "
            f"{self.step_seconds(read_nbytes, write_nbytes):.3g} s"
        )


_measured: dict[str, DiskSpeed] = {}
_measuring = threading.Lock()


def measure_disk(folder: Path | str, aio: AioConfig | None = None) -> DiskSpeed:
    """Write and read up to 64 MiB in ``folder`` (made if it is missing). Later calls for it return the same figures.

    Raises AioError or OSError: the folder cannot be made or written, or has no room for 32 MiB.
    """
    key = os.path.realpath(folder)
    with _measuring:
        if key not in _measured:
            _measured[key] = _measure(Path(folder), aio or AioConfig(queue_depth=32))
        return _measured[key]


def _measure(folder: Path, aio: AioConfig) -> DiskSpeed:
    folder.mkdir(parents=True, exist_ok=True)
    free = free_nbytes(str(folder))
    parts = _PARTS if free is None else max(1, min(_PARTS, free // (2 * _PART)))
    engine = AioEngine(aio.block_size, aio.queue_depth, aio.intra_op_parallelism)
    handle, name = tempfile.mkstemp(prefix=".disk-speed-", dir=folder)
    os.close(handle)
    try:
        file = AioFile(name, write=True)
    finally:
        os.unlink(name)  # the descriptors keep it
    try:
        file.reserve(0, parts * _PART, extend=True)
        memory = HostBuffer(private=True).room(_PART)[:_PART]
        memory.random_(0, 256)  # some disks are quick with zeros
        rates = {}
        for write in (True, False):
            began, moved = time.perf_counter(), 0
            for part in range(parts):
                engine.start(write, file, memory, part * _PART).wait()
                moved += _PART
                if time.perf_counter() - began > _BUDGET_S:
                    break
            rates[write] = moved / (time.perf_counter() - began)
            parts = moved // _PART  # only what was written is read
        return DiskSpeed(rates[False], rates[True], engine.name, file.direct >= 0)
    finally:
        engine.close()
        file.close()
