"""``MappedFiles``: host memory that is really a file, of which the system keeps in memory what is free.

For shards of parameters at ``offload_param.device: nvme``: they are read once per use and written once per step, in
large runs, which is what the page cache and its read-ahead are for.

Owns: the file and its mappings. Does not own: what lies in them.
Invariant: a tensor it gives stays valid as long as somebody holds it; its content starts as zeros, and takes room in
the file at once, so that a full disk is an error when it is made and not when it is written.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from deepspeed.ops.aio.errors import AioError
from deepspeed.runtime.swap_tensor.host_store import HostMemory
from deepspeed.runtime.swap_tensor.swap_folder import SwapFolder
from deepspeed.utils.host_buffer import round_up


class MappedFiles(HostMemory):
    """See the module docstring. The file lies in a folder of this process below ``folder``."""

    kind = "disk"

    def __init__(self, folder: Path, *, rank: int) -> None:
        """Raises AioError (an OSError): the folder cannot be made or written; the text names the setting."""
        super().__init__(pin=False)
        self._folder = SwapFolder(Path(folder), rank, "zero_optimization.offload_param.nvme_path")
        self._path = self._folder.path / f"rank{rank}.parameters"
        self._end = 0

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """``numel`` elements of the file, mapped.  # 1D, contiguous

        Raises AioError with the bytes needed and free where the disk has too little room.
        """
        if not numel:
            return torch.zeros(0, dtype=dtype)
        nbytes = round_up(numel * dtype.itemsize, mmap.ALLOCATIONGRANULARITY)
        with open(self._path, "a+b") as file:
            try:
                os.posix_fallocate(file.fileno(), self._end, nbytes)
            except OSError as problem:
                disk = os.statvfs(self._folder.path)
                raise AioError(
                    problem.errno,
                    f"{problem.strerror}: parameters need {nbytes:,} bytes, {disk.f_bavail * disk.f_frsize:,} are free",
                    str(self._path),
                ) from problem
        with open(self._path, "r+b") as file:
            view = mmap.mmap(file.fileno(), nbytes, offset=self._end)
        self._end += nbytes
        return torch.frombuffer(view, dtype=dtype, count=numel)

    def release(self) -> None:
        """Remove the file; tensors that are still held keep their values."""
        self._folder.close()
