"""The engine where there is no compiler: threads of Python, which read and write without the interpreter's lock.

The same answers as ``native/csrc/aio.cpp``, one block at a time per thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

from deepspeed.ops.aio.errors import SHORT, Ended

__all__ = ["PythonQueue"]

_PAGE = 4096
_MEMORY_ALIGN = 512


@dataclass
class _Transfer:
    write: bool
    offset: int
    nbytes: int
    left: int = 0
    code: int = 0
    bad_offset: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    held_up: list[Any] = field(default_factory=list)  # blocks of others, which may start when this has ended


class PythonQueue:
    """See the module docstring."""

    name = "python"

    def __init__(self, block_nbytes: int, threads: int) -> None:
        self._block = max(_PAGE, -(-block_nbytes // _PAGE) * _PAGE)
        self._blocks: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._transfers: dict[int, _Transfer] = {}
        self._lock = threading.Lock()
        self._next = 1
        self._fault: list[int] | None = None
        self._threads = [
            threading.Thread(target=self._serve, name=f"aio-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, write: bool, direct: int, plain: int, address: int, nbytes: int, offset: int, after: int) -> int:
        transfer = _Transfer(write, offset, nbytes)
        with self._lock:
            ticket = self._next
            self._next += 1
            self._transfers[ticket] = transfer
        end = offset + nbytes
        first = end if direct < 0 or address % _MEMORY_ALIGN != offset % _MEMORY_ALIGN else -(-offset // _PAGE) * _PAGE
        first = min(end, first)
        last = max(first, end // _PAGE * _PAGE)
        cut = []
        for start, stop, handle in ((offset, first, plain), (first, last, direct), (last, end, plain)):
            for at in range(start, stop, self._block):
                cut.append((transfer, handle, plain, address + at - offset, at, min(self._block, stop - at)))
        transfer.left = len(cut)
        if not cut:
            transfer.done.set()
        with self._lock:
            first_one = self._transfers.get(after)
            if first_one is not None and first_one.left:
                first_one.held_up += cut
                return ticket
        for block in cut:
            self._blocks.put(block)
        return ticket

    def wait(self, ticket: int, timeout_ms: int) -> Ended | None:
        transfer = self._transfers.get(ticket)
        if transfer is None:
            raise ValueError(f"transfer {ticket} is unknown: it was waited for already")
        if not transfer.done.wait(timeout_ms / 1000):
            return None
        del self._transfers[ticket]
        stopped = transfer.bad_offset if transfer.code else transfer.offset + transfer.nbytes
        return Ended(transfer.code, stopped, transfer.nbytes, stopped - transfer.offset)

    def fault(self, after: int, code: int) -> None:
        self._fault = [after, code] if after >= 0 else None

    def close(self) -> None:
        for transfer in list(self._transfers.values()):
            transfer.done.wait()
        for _ in self._threads:
            self._blocks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (block := self._blocks.get()) is not None:
            transfer, handle, plain, address, at, nbytes = block
            code, stopped = self._move(transfer.write, handle, plain, address, at, nbytes)
            with self._lock:
                if code and (not transfer.code or stopped < transfer.bad_offset):
                    transfer.code, transfer.bad_offset = code, stopped
                transfer.left -= 1
                if transfer.left:
                    continue
                transfer.done.set()
                for held_up in transfer.held_up:
                    self._blocks.put(held_up)

    def _injected(self) -> int:
        """0: none; an errno; -1: move half."""
        with self._lock:
            fault = self._fault
            if fault is None:
                return 0
            if fault[1] == 0:
                return -1
            fault[0] -= 1
            return fault[1] if fault[0] == -1 else 0

    def _move(self, write: bool, handle: int, plain: int, address: int, at: int, nbytes: int) -> tuple[int, int]:
        """All of one block: ``(code, offset it stopped at)``."""
        while nbytes:
            injected = self._injected()
            if injected > 0:
                return injected, at
            half = nbytes // 2 // _PAGE * _PAGE or nbytes // 2
            size = half if injected and half else nbytes
            memory = (ctypes.c_char * size).from_address(address)
            try:
                moved = os.pwrite(handle, memory, at) if write else os.preadv(handle, [memory], at)
            except OSError as problem:
                if problem.errno != errno.EINVAL or handle == plain:
                    return problem.errno or errno.EIO, at
                handle = plain  # this file system wants another alignment: the cache takes any
                continue
            if moved == 0:
                return (errno.EIO if write else SHORT), at
            address, at, nbytes = address + moved, at + moved, nbytes - moved
            if at % _PAGE or nbytes % _PAGE:
                handle = plain
        return 0, at
