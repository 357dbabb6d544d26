"""Transfers between host memory and files that run beside the interpreter.

Owns: the choice of the engine, memory and files staying alive until a transfer has ended, errors with the file's name.
Does not own: opening files (``files.py``), the historical methods (``handle.py``), C++ (``native/csrc/aio.cpp``).
Invariants: a transfer is waited for exactly once; a handle is used by the process that made it.

Environment:
    DS_AIO_ENGINE   uring, threads or python; without it the first of these that works here
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from typing import Any, Protocol

import torch

from deepspeed.native.build import NativeUnavailable, load
from deepspeed.ops.aio.errors import Ended, transfer_failed
from deepspeed.ops.aio.fallback import PythonQueue
from deepspeed.ops.aio.files import AioFile
from deepspeed.utils.logging import logger, warning_once

__all__ = ["ENGINES", "AioEngine", "Transfer", "copy_bytes", "host_bytes"]

ENGINES = ("uring", "threads", "python")
_PAGE = 4096  # offsets and sizes of direct requests, as in aio.cpp
_WAIT_MS = 200  # how long the interpreter's signal handlers may have to wait


class Queue(Protocol):
    """What runs transfers."""

    name: str

    def submit(
        self, write: bool, direct: int, plain: int, address: int, nbytes: int, offset: int, after: int
    ) -> int: ...

    def wait(self, ticket: int, timeout_ms: int) -> Ended | None: ...

    def fault(self, after: int, code: int) -> None: ...

    def close(self) -> None: ...


class _Result(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("code", "offset", "expected", "found")]


@functools.cache
def _library() -> ctypes.CDLL:
    """Raises NativeUnavailable."""
    library = load("aio")
    i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    result = ctypes.POINTER(_Result)
    for name, returns, takes in (
        ("open", pointer, (i64, i32, i32, i32, i32, ctypes.POINTER(i32))),
        ("engine", i32, (pointer,)),
        ("submit", i64, (pointer, i32, i32, i32, pointer, i64, i64, i64)),
        ("wait", i32, (pointer, i64, i32, result)),
        ("fault", None, (pointer, i64, i32)),
        ("close", None, (pointer,)),
        ("copy", None, (pointer, pointer, i64, i32)),
    ):
        function = getattr(library, f"ds_aio_{name}")
        function.restype, function.argtypes = returns, takes
    return library


class NativeQueue:
    """The C++ engine."""

    def __init__(self, engine: str, block_nbytes: int, depth: int, threads: int, flags: int) -> None:
        """``engine``: uring, threads, or "" for the best. Raises NativeUnavailable."""
        self._library = _library()
        reason = ctypes.c_int32()
        kind = {"": 0, "uring": 1, "threads": 2}[engine]
        self._handle = self._library.ds_aio_open(block_nbytes, depth, threads, kind, flags, ctypes.byref(reason))
        if not self._handle:
            raise NativeUnavailable(
                f"io_uring cannot be used here ({os.strerror(reason.value)}); DS_AIO_ENGINE=threads needs none"
            )
        self.name = ENGINES[self._library.ds_aio_engine(self._handle) - 1]

    def submit(self, write: bool, direct: int, plain: int, address: int, nbytes: int, offset: int, after: int) -> int:
        return self._library.ds_aio_submit(self._handle, write, direct, plain, address, nbytes, offset, after)

    def wait(self, ticket: int, timeout_ms: int) -> Ended | None:
        result = _Result()
        answer = self._library.ds_aio_wait(self._handle, ticket, timeout_ms, ctypes.byref(result))
        if answer < 0:
            raise ValueError(f"transfer {ticket} is unknown: it was waited for already")
        return Ended(result.code, result.offset, result.expected, result.found) if answer else None

    def fault(self, after: int, code: int) -> None:
        self._library.ds_aio_fault(self._handle, after, code)

    def close(self) -> None:
        self._library.ds_aio_close(self._handle)


def _open_queue(block_nbytes: int, depth: int, threads: int, flags: int) -> Queue:
    asked = os.environ.get("DS_AIO_ENGINE", "").strip().lower()
    if asked and asked not in ENGINES:
        raise ValueError(f"DS_AIO_ENGINE={asked!r}: expected one of {', '.join(ENGINES)}")
    if asked != "python":
        try:
            return NativeQueue(asked, block_nbytes, depth, threads, flags)
        except NativeUnavailable as problem:
            if asked:
                raise
            _say_slow(str(problem))
    return PythonQueue(block_nbytes, threads)


@functools.cache
def _say_slow(problem: str) -> None:
    logger.warning(f"files are read and written by Python threads, which is slower: {problem}")


class Transfer:
    """One read or write that was started. Its memory stays until it has ended, waited for or not."""

    def __init__(self, engine: AioEngine, write: bool, file: AioFile, memory: torch.Tensor, ticket: int) -> None:
        self._engine, self._write, self._file, self._ticket = engine, write, file, ticket
        self.memory: torch.Tensor | None = memory

    @property
    def path(self) -> str:
        return self._file.path

    def done(self) -> bool:
        """Whether :meth:`wait` would return (or raise) at once. Does not end the transfer."""
        return self._engine._ended(self, 0) is not None

    def wait(self) -> None:
        """Until all bytes have moved.

        Raises AioError: file, offset, bytes expected and found. What a failed read left in memory is undefined.
        """
        while (ended := self._engine._ended(self, _WAIT_MS)) is None:
            pass
        self._engine._forget(self)
        self.memory = None
        if ended.code:
            raise transfer_failed(self.path, self._write, ended)


class AioEngine:
    """Starts transfers; see the module docstring. Threads may share one."""

    def __init__(
        self,
        block_nbytes: int,
        queue_depth: int,
        threads: int,
        *,
        single_submit: bool = False,
        overlap_events: bool = True,
    ) -> None:
        """``block_nbytes``: of one request; ``queue_depth``: requests in flight per thread of ``threads``.

        Raises NativeUnavailable when DS_AIO_ENGINE asks for what this system has not; ValueError for another value.
        """
        if block_nbytes % _PAGE:
            warning_once(
                f"aio: block_size {block_nbytes} is not a multiple of {_PAGE} bytes, as disks want it: requests of "
                f"{-(-block_nbytes // _PAGE) * _PAGE} bytes are made"
            )
        flags = int(single_submit) | (0 if overlap_events else 2)
        pool = max(threads, min(queue_depth, 8))
        self._queue: Queue = _open_queue(block_nbytes, queue_depth * threads, pool, flags)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._started: dict[int, tuple[torch.Tensor, AioFile]] = {}
        self._results: dict[int, Ended] = {}
        # The dictionary is an argument so that memory of transfers under way outlives this object.
        self._close = weakref.finalize(self, _close, self._queue, self._started, self._process)

    @property
    def name(self) -> str:
        """Which engine runs: uring, threads or python."""
        return self._queue.name

    def start(
        self, write: bool, file: AioFile, memory: torch.Tensor, offset: int, after: Transfer | None = None
    ) -> Transfer:
        """Read into, or write from, all of ``memory``.  # any shape, contiguous, host

        ``after``: a transfer that must have ended, well or not, before this one touches memory or file.

        Raises ValueError for memory that cannot be used; RuntimeError in a forked process.
        """
        address, nbytes = host_bytes(memory)
        if offset < 0:
            raise ValueError(f"{file.path}: file offset {offset} is negative")
        self._check_process()
        with self._lock:
            ticket = self._queue.submit(
                write, file.direct, file.plain, address, nbytes, offset, after._ticket if after else 0
            )
            self._started[ticket] = (memory, file)
        return Transfer(self, write, file, memory, ticket)

    def fault(self, after: int, code: int) -> None:
        """For tests: the block after ``after`` more ends with errno ``code``; code 0: every block moves half."""
        self._queue.fault(after, code)

    def close(self) -> None:
        """Wait for everything under way, then end. A second call does nothing."""
        self._close()

    def _ended(self, transfer: Transfer, timeout_ms: int) -> Ended | None:
        self._check_process()
        ticket = transfer._ticket
        found = self._results.get(ticket)
        if found is None:
            found = self._queue.wait(ticket, timeout_ms)
            if found is not None:
                self._results[ticket] = found
        return found

    def _forget(self, transfer: Transfer) -> None:
        self._results.pop(transfer._ticket, None)
        self._started.pop(transfer._ticket, None)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this I/O handle belongs to process {self._process}, its threads are not in the forked process "
                f"{os.getpid()}; make a handle after the fork (or start workers by 'spawn')"
            )
        if not self._close.alive:
            raise RuntimeError("this I/O handle is closed")


def _close(queue: Queue, started: dict[int, tuple[torch.Tensor, AioFile]], process: int) -> None:
    if os.getpid() == process:  # a forked child has the memory, but not the threads
        queue.close()
    started.clear()


def host_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor that files can be read into.  # any shape

    Raises ValueError: another device, or not contiguous.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"expected a tensor in host memory, found one on {tensor.device}; copy it to the host first")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(
            f"expected a contiguous tensor, found shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride() if tensor.layout == torch.strided else tensor.layout}; use .contiguous()"
        )
    return tensor.data_ptr(), tensor.nbytes


def copy_bytes(target: Any, source: Any, nbytes: int, threads: int = 1) -> None:
    """memcpy between two addresses without the interpreter's lock."""
    try:
        _library().ds_aio_copy(target, source, nbytes, threads)
    except NativeUnavailable:
        ctypes.memmove(target, source, nbytes)
