"""`aio_handle`: the historical way to read and write tensors, on top of the engine.

Owns: names, argument order and return values of the interface. Does not own: transfers (`engine.py`).
Differences to the original, all where that one ends the process or answers -1: any size, offset and address of memory
is taken; a file that is missing or too short, a full disk and I/O errors raise AioError, a full disk before the file
has changed; `wait()` with nothing under way answers 0.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch

from deepspeed.ops.aio.engine import AioEngine, Transfer
from deepspeed.ops.aio.errors import SHORT, AioError, Ended, transfer_failed
from deepspeed.ops.aio.files import AioFile
from deepspeed.ops.aio.pinned import PinnedTensors
from deepspeed.utils.argument_checks import flag, whole

__all__ = ["aio_handle"]

_ALIGNMENT = 512


class aio_handle:
    """Asynchronous tensor I/O with one queue. Sizes are bytes; files are given by name."""

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        """``block_size``: of one request; ``queue_depth``: requests in flight per thread of ``intra_op_parallelism``;
        ``single_submit``: hand requests to the system one at a time; ``overlap_events``: submit while others run.

        Raises ValueError for a number below 1, TypeError for what is no number or flag.
        """
        self._block_size = whole(block_size, "aio_handle", "block_size", minimum=1)
        self._queue_depth = whole(queue_depth, "aio_handle", "queue_depth", minimum=1)
        self._parallel = whole(intra_op_parallelism, "aio_handle", "intra_op_parallelism", minimum=1)
        self._single_submit = flag(single_submit, "aio_handle(single_submit)")
        self._overlap_events = flag(overlap_events, "aio_handle(overlap_events)")
        self._engine = AioEngine(
            self._block_size,
            self._queue_depth,
            self._parallel,
            single_submit=self._single_submit,
            overlap_events=self._overlap_events,
        )
        self._pinned = PinnedTensors()
        self._running: list[tuple[Transfer, AioFile]] = []

    def __repr__(self) -> str:
        return (
            f"aio_handle(block_size={self._block_size}, queue_depth={self._queue_depth}, "
            f"single_submit={self._single_submit}, overlap_events={self._overlap_events}, "
            f"intra_op_parallelism={self._parallel}, engine={self._engine.name!r})"
        )

    def get_block_size(self) -> int:
        return self._block_size

    def get_queue_depth(self) -> int:
        return self._queue_depth

    def get_single_submit(self) -> bool:
        return self._single_submit

    def get_overlap_events(self) -> bool:
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        return self._parallel

    def get_alignment(self) -> int:
        """Bytes that sizes are a multiple of on the fast path (any size is taken)."""
        return _ALIGNMENT * self._parallel

    # ---- reads and writes: a count of transfers that have ended

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill the tensor from the file. Returns 1. Raises AioError, ValueError."""
        return self._now(self._start_read(buffer, filename, file_offset))

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Write the tensor into the file, which is made or kept at least as long. Returns 1. Raises as above."""
        return self._now(self._start_write(buffer, filename, file_offset))

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Start :meth:`sync_pread`; :meth:`wait` ends it. Returns 0."""
        self._running.append(self._start_read(buffer, filename, file_offset))
        return 0

    def async_pwrite(self, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Start :meth:`sync_pwrite`, by the name or the descriptor of a file; :meth:`wait` ends it. Returns 0."""
        self._running.append(self._start_write(buffer, filename, file_offset))
        return 0

    def wait(self) -> int:
        """Until all that was started has ended; how many that were.

        Raises AioError: the first that failed. All have ended then too.
        """
        running, self._running = self._running, []
        problems = []
        for transfer, file in running:
            try:
                self._now((transfer, file))
            except AioError as problem:
                problems.append(problem)
        if problems:
            raise problems[0]
        return len(running)

    def pread(
        self, buffer: torch.Tensor, filename: str, validate: bool, async_op: bool = False, file_offset: int = 0
    ) -> int:
        """Historical: :meth:`sync_pread` or :meth:`async_pread`; ``validate`` compares with an ordinary read."""
        if async_op:
            return self.async_pread(buffer, filename, file_offset)
        self.sync_pread(buffer, filename, file_offset)
        return 1 if not validate else self._validated(buffer, filename, file_offset)

    def pwrite(
        self, buffer: torch.Tensor, filename: str, validate: bool, async_op: bool = False, file_offset: int = 0
    ) -> int:
        """Historical: :meth:`sync_pwrite` or :meth:`async_pwrite`; ``validate`` compares with an ordinary read."""
        if async_op:
            return self.async_pwrite(buffer, filename, file_offset)
        self.sync_pwrite(buffer, filename, file_offset)
        return 1 if not validate else self._validated(buffer, filename, file_offset)

    def read(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Historical: :meth:`pread`, but returns 0."""
        self.pread(buffer, filename, validate, False, file_offset)
        return 0

    def write(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Historical: :meth:`pwrite`, but returns 0."""
        self.pwrite(buffer, filename, validate, False, file_offset)
        return 0

    # ---- pinned memory

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """``num_elem`` zeros of the dtype of ``example_tensor``, on pages of their own.  # 1D, host"""
        number = whole(num_elem, "new_cpu_locked_tensor", "num_elem", minimum=0)
        return self._pinned.new(number, _tensor(example_tensor, "new_cpu_locked_tensor(example_tensor)").dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Forget the tensor; False for one that is not of this handle."""
        return self._pinned.free(_tensor(tensor, "free_cpu_locked_tensor").data_ptr())

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether the tensor is pinned by this handle or by torch."""
        _tensor(buffer, "is_pinned")
        return self._pinned.holds(buffer) or (torch.cuda.is_available() and buffer.is_pinned())

    # ---- inside

    def _start_read(self, buffer: torch.Tensor, filename: str, offset: int) -> tuple[Transfer, AioFile]:
        _tensor(buffer, "reading a file")
        offset = whole(offset, str(filename), "file_offset", minimum=0)
        file = AioFile(_name(filename, "reading a file"))
        try:
            there = max(0, file.nbytes() - offset)
            if there < buffer.nbytes:  # found out before the tensor has changed
                raise transfer_failed(file.path, False, Ended(SHORT, offset + there, buffer.nbytes, there))
            return self._engine.start(False, file, buffer, offset), file
        except BaseException:
            file.close()
            raise

    def _start_write(self, buffer: torch.Tensor, filename: str | int, offset: int) -> tuple[Transfer, AioFile]:
        _tensor(buffer, "writing a file")
        offset = whole(offset, str(filename), "file_offset", minimum=0)
        by_descriptor = isinstance(filename, int) and not isinstance(filename, bool)
        path = _of_descriptor(int(filename)) if by_descriptor else _name(filename, "writing a file")
        made = not by_descriptor and not os.path.exists(path)
        file = AioFile(path, write=True, create=True)
        try:
            file.reserve(offset, buffer.nbytes, extend=True)
            return self._engine.start(True, file, buffer, offset), file
        except BaseException:
            file.close()
            if made:
                with suppress(OSError):
                    os.unlink(file.path)
            raise

    def _now(self, started: tuple[Transfer, AioFile]) -> int:
        transfer, file = started
        try:
            transfer.wait()
        finally:
            if transfer.memory is None:  # otherwise interrupted: the engine still needs the file
                file.close()
        return 1

    def _validated(self, buffer: torch.Tensor, filename: str, offset: int) -> int:
        flat = buffer.detach().as_strided((buffer.numel(),), (1,))  # of one element the stride may be any
        expected = flat.view(torch.uint8).numpy()
        with open(filename, "rb") as file:
            file.seek(offset)
            found = file.read(buffer.nbytes)
        if found != expected.tobytes():
            raise AioError(5, f"what an ordinary read finds at offset {offset} is not what was moved", filename)
        return 1


def _tensor(value: Any, call: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"aio_handle, {call}: expected a torch.Tensor in host memory, found {type(value).__name__}")
    return value


def _name(value: Any, call: str) -> Any:
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise TypeError(f"aio_handle, {call}: expected the name of a file, found {value!r} ({type(value).__name__})")
    return value


def _of_descriptor(descriptor: int) -> str:
    """A name of an open file. Raises AioError for a descriptor that is not open."""
    try:
        os.fstat(descriptor)
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError as problem:
        raise AioError(problem.errno, f"not an open file: {problem.strerror}", f"descriptor {descriptor}") from problem
