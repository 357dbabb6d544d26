"""A large host buffer that is kept: mapped once, every page touched, huge pages where the system has them.

Copying into fresh memory is several times slower than into memory that has been used: the kernel makes and clears each
page when it is first written. So whoever copies the same amount again and again keeps the pages.

Owns: the mapping and its registration with the device. Does not own: what lies in it.
Invariant: the buffer starts on a page; its pages are touched before :meth:`HostBuffer.room` returns them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

import torch

from deepspeed.accelerator.real_accelerator import get_accelerator

__all__ = ["PAGE", "HostBuffer", "round_up"]

PAGE = 4096
_HUGE_PAGE = 2 << 20


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """The next multiple of ``unit``."""
    return -(-nbytes // unit) * unit


class HostBuffer:
    """See the module docstring. Not for use by two threads at once."""

    def __init__(self, *, for_device: bool = False, private: bool = False) -> None:
        """``for_device``: page-lock it, so that copies from an accelerator run at full speed.

        ``private``: huge pages also where systems give shared memory none, which disks and copies are quicker with. In
        return a process forked later copies each page that is written (page-locked ones it does not get at all), so
        this is for buffers that are small beside the rest.
        """
        self._for_device = for_device
        self._private = private and hasattr(mmap, "MAP_ANONYMOUS")
        self._map: mmap.mmap | None = None
        self._room: torch.Tensor | None = None
        self._registered: int | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._room is None else self._room.numel()

    def room(self, nbytes: int) -> torch.Tensor:
        """At least ``nbytes`` of host memory; contents undefined, what lay there before is lost.  # 1D uint8

        Raises OSError when the system has no room left.
        """
        if self._room is None or self.nbytes < nbytes:
            self.release()
            self._make(round_up(max(nbytes, 1), _HUGE_PAGE if nbytes >= _HUGE_PAGE else PAGE))
        assert self._room is not None
        return self._room

    def _make(self, nbytes: int) -> None:
        kind = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if self._private else {}
        self._map = mmap.mmap(-1, nbytes, **kind)
        if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # this kernel has none: small pages do
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._room = torch.frombuffer(self._map, dtype=torch.uint8)
        ctypes.memset(self._room.data_ptr(), 0, nbytes)  # without the interpreter's lock
        if self._for_device and get_accelerator().register_host_memory(self._room.data_ptr(), nbytes):
            self._registered = self._room.data_ptr()
            if self._private and hasattr(mmap, "MADV_DONTFORK"):
                self._map.madvise(mmap.MADV_DONTFORK)

    def release(self) -> None:
        """Give the memory back (once nobody else holds a part of it)."""
        if self._registered is not None:
            get_accelerator().unregister_host_memory(self._registered)
        self._registered = self._room = self._map = None


class RunCopier:
    """Copies tensors into host memory; neighbours that are neighbours on both sides go in one call.

    Copies of host tensors run at the speed of memory, without the interpreter's lock. Nothing is there before
    :meth:`finish` returns.
    """

    def __init__(self) -> None:
        self._target = self._source = self._nbytes = 0
        self._held: list[Any] = []
        self._on_device = False

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """``target``: 1D, contiguous, host; ``source``: as many elements in any dtype, on any device.  # any shape"""
        flat = source.detach().resolve_conj().resolve_neg().reshape(-1)
        if flat.device.type != "cpu" or flat.dtype != target.dtype:
            target.copy_(flat, non_blocking=True)
            self._on_device = self._on_device or flat.device.type != "cpu"
            self._held.append(flat)
            return
        where, whence, nbytes = target.data_ptr(), flat.data_ptr(), target.nbytes
        if (where, whence) != (self._target + self._nbytes, self._source + self._nbytes):
            self._copy()
            self._target, self._source = where, whence
        self._nbytes += nbytes
        self._held.append(flat)  # `reshape` may have made it

    def _copy(self) -> None:
        if self._nbytes:
            ctypes.memmove(self._target, self._source, self._nbytes)
        self._nbytes = 0
        if not self._on_device:
            self._held.clear()

    def finish(self) -> None:
        """All copies are done."""
        self._copy()
        if self._on_device:
            get_accelerator().current_stream().synchronize()
        self._held.clear()
