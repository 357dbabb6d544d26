"""``MappedFiles``: host memory that is really a file, of which the system keeps in memory what is free.

For shards of parameters at ``offload_param.device: nvme``: they are read once per use and written once per step, in
large runs, which is what the page cache and its read-ahead are for.

Owns: the files and their mappings. Does not own: what lies in them.
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


class MappedFiles(HostMemory):
    """See the module docstring. The files lie in a folder of this process below ``folder``."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        """Raises AioError (an OSError): the folder cannot be made or written."""
        super().__init__(pin=False)
        self._folder = SwapFolder(Path(folder), rank)
        self._count = 0

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A file of ``numel`` elements, mapped.  # 1D, contiguous

        Raises AioError with the bytes needed and free where the disk has too little room.
        """
        if not numel:
            return torch.zeros(0, dtype=dtype)
        nbytes = numel * dtype.itemsize
        path = self._folder.path / f"parameters{self._count}.swap"
        self._count += 1
        with open(path, "w+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as problem:
                free = os.statvfs(path.parent)
                raise AioError(
                    problem.errno,
                    f"{problem.strerror}: parameters need {nbytes:,} bytes, {free.f_bavail * free.f_frsize:,} are free",
                    str(path),
                ) from problem
            view = mmap.mmap(file.fileno(), nbytes)
        return torch.frombuffer(view, dtype=dtype)

    def release(self) -> None:
        """Remove the files; tensors that are still held keep their values."""
        self._folder.close()
