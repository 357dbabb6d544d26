"""Flat tensors that live in a file and pass through a few host buffers.

Read ahead with `prefetch`, change between `fetch` and `commit`, go on while the file is written: with three buffers the
reading of the next tensor, the update of this one and the writing of the last one overlap.

Owns: the file, where each key lies in it, the buffers and what each of them is doing. Does not own: transfers
(`ops/aio/engine.py`), the folder (`swap_folder.py`), which keys there are.
Invariants: a key is in at most one buffer; a buffer that is read, written or held is given to nobody else; every extent
starts and ends on a page, so that all transfers go past the page cache; no more than `buffer_count` buffers exist.
"""

from __future__ import annotations

import enum
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch

from deepspeed.ops.aio.engine import AioEngine, Transfer
from deepspeed.ops.aio.errors import AioError
from deepspeed.ops.aio.files import AioFile
from deepspeed.runtime.swap_tensor.aio_config import AioConfig
from deepspeed.runtime.swap_tensor.swap_folder import SwapFolder
from deepspeed.utils.host_buffer import HostBuffer, round_up
from deepspeed.utils.logging import logger

__all__ = ["NvmeStore"]


# Quantized elements mean nothing without a scale, which a flat file does not keep.
_UNSUPPORTED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)


class _State(enum.Enum):
    FREE = "free"
    READING = "reading"  # on its way from the file
    READY = "ready"  # as in the file, nobody has it
    HELD = "held"  # the caller's
    WRITING = "writing"  # on its way to the file


@dataclass
class _Entry:
    """One key."""

    key: str
    numel: int
    dtype: torch.dtype
    offset: int  # in the file
    written: bool = False  # false: it is all zeros, and nothing of it is in the file
    failure: AioError | None = None  # what is in the file is undefined

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class _Buffer:
    pinned: bool
    memory: HostBuffer = field(init=False)
    state: _State = _State.FREE
    entry: _Entry | None = None
    transfer: Transfer | None = None  # of reading

    def __post_init__(self) -> None:
        self.memory = HostBuffer(for_device=self.pinned, private=True)

    def pages(self, entry: _Entry, nbytes: int) -> torch.Tensor:
        """Whole pages, as they lie in the file.  # 1D uint8"""
        return self.memory.room(nbytes)[: round_up(entry.nbytes)]

    def tensor(self, nbytes: int) -> torch.Tensor:
        """The elements of the key that is in it.  # 1D (numel,)"""
        assert self.entry is not None
        return self.memory.room(nbytes)[: self.entry.nbytes].view(self.entry.dtype)


class NvmeStore:
    """Flat tensors of one rank in a file of one folder; each key is a 1D tensor of fixed numel and dtype.

    Not for use by two threads at once. Errors of reading and writing are AioError (an OSError) with the file's name,
    the offset, and the bytes expected and found; those of writes behind are raised by the next call of any method.
    """

    def __init__(
        self, folder: Path, *, rank: int, aio: AioConfig, pin: bool, buffer_count: int, buffer_nbytes: int
    ) -> None:
        """``folder`` is made if it is missing; the files lie in a folder of this process below it.

        Host memory is at most ``buffer_count`` × ``buffer_nbytes`` (rounded up to pages), taken as buffers are needed.
        ``pin``: page-lock it for the accelerator.

        Raises AioError: the folder cannot be made or written (the text names the setting). ValueError: no buffers.
        """
        if buffer_count < 1 or buffer_nbytes < 1:
            raise ValueError(
                f"NvmeStore: expected buffer_count and buffer_nbytes >= 1, found {buffer_count} and {buffer_nbytes}"
            )
        if aio.use_gds:
            logger.warning("aio.use_gds has no effect: files are read into host memory (GPUDirect is not available)")
        self.buffer_nbytes = round_up(buffer_nbytes)
        self._folder = SwapFolder(Path(folder), rank, "zero_optimization.offload_optimizer.nvme_path")
        self._file = AioFile(self._folder.path / f"rank{rank}.swap", write=True, create=True)
        self._engine = AioEngine(
            aio.block_size,
            aio.queue_depth,
            aio.intra_op_parallelism,
            single_submit=aio.single_submit,
            overlap_events=aio.overlap_events,
        )
        self._entries: dict[str, _Entry] = {}
        self._end = 0
        self._buffers = [_Buffer(pin) for _ in range(buffer_count)]
        self._at: dict[str, _Buffer] = {}  # buffers that are not free, by key
        self._writes: dict[str, Transfer] = {}  # under way, oldest first; the buffer may be promised to a read already
        self._failed: list[AioError] = []
        self._finalizer = weakref.finalize(self, _close, self._engine, self._file, self._folder, os.getpid())

    # ---- what callers ask

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self._file.path)

    @property
    def nbytes(self) -> int:
        """Bytes of the file that are given to keys."""
        return self._end

    @property
    def buffer_count(self) -> int:
        """Buffers there are at most."""
        return len(self._buffers)

    @property
    def host_nbytes(self) -> int:
        """Host memory that the buffers have taken."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    @property
    def engine_name(self) -> str:
        """How the file is accessed: uring, threads or python."""
        return self._engine.name

    @property
    def direct(self) -> bool:
        """Whether transfers go past the page cache."""
        return self._file.direct >= 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def create(self, key: str, numel: int, dtype: torch.dtype, initial: torch.Tensor | None = None) -> None:
        """Make room in the file for a key, and start writing ``initial`` (any shape of numel elements, device and
        strides; converted to dtype) there. Without it the key is zeros, of which nothing is written before `commit`.

        Raises AioError: ENOSPC, with bytes needed and free, and nothing has changed. ValueError: a key that exists, a
        size no buffer holds, an initial tensor of another size, a quantized dtype.
        """
        self._raise_failures()
        if not isinstance(dtype, torch.dtype) or dtype in _UNSUPPORTED:
            raise ValueError(f"{key!r}: expected a dtype with plain elements (such as torch.float32), found {dtype!r}")
        entry = _Entry(key, int(numel), dtype, self._end)
        self._check_new(entry, initial)
        length = round_up(entry.nbytes)
        if length:
            self._file.reserve(entry.offset, length, extend=True)
        self._end += length
        self._entries[key] = entry
        if initial is not None and numel:
            buffer = self._free_buffer(entry)
            self._take(buffer, entry, _State.HELD)
            buffer.tensor(self.buffer_nbytes).view(initial.shape).copy_(initial.detach())
            self.commit(key)

    def prefetch(self, key: str) -> None:
        """Start reading a key into a buffer, if the key is in none. If all are taken the read follows the oldest write
        in its buffer; if none is being written either, nothing happens."""
        self._raise_failures()
        entry = self._entry(key)
        if key in self._at or entry.failure is not None:
            return
        self._reap()
        buffer = next((buffer for buffer in self._buffers if buffer.state is _State.FREE), None)
        if buffer is not None:
            self._start_reading(buffer, entry)
            return
        writing = next((found for found in self._writes if found in self._at), None)
        if writing is not None and entry.written:
            self._start_reading(self._at.pop(writing), entry, after=self._writes[writing])

    def fetch(self, key: str) -> torch.Tensor:
        """The values of a key, in a buffer that is the caller's until `commit` or `drop`.  # 1D (numel,), host

        Waits for the read, and for a buffer when all are being written. Raises AioError; RuntimeError when the caller
        holds all buffers (states the buffer_count needed) or this key.
        """
        self._raise_failures()
        entry = self._entry(key)
        buffer = self._at.get(key)
        if buffer is not None and buffer.state is _State.HELD:
            raise RuntimeError(f"{key!r} was fetched already; commit or drop it before the next fetch")
        if buffer is not None and buffer.state is _State.WRITING:
            self._end_write(key)  # the values stay in the buffer
            self._raise_failures()
        if entry.failure is not None:
            raise entry.failure
        if buffer is None:
            buffer = self._free_buffer(entry)
            self._start_reading(buffer, entry)
        if buffer.state is _State.READING:
            self._end_read(buffer)
            self._raise_failures()
        buffer.state = _State.HELD
        return buffer.tensor(self.buffer_nbytes)

    def commit(self, key: str) -> None:
        """Start writing the fetched buffer back; it returns to the pool when that is done."""
        buffer = self._held(key, "commit")
        entry = buffer.entry
        assert entry is not None
        entry.written = True
        if not entry.nbytes:
            self._free(buffer)
            return
        pages = buffer.pages(entry, self.buffer_nbytes)
        self._writes[key] = self._engine.start(True, self._file, pages, entry.offset)
        buffer.state = _State.WRITING
        self._raise_failures()

    def commit_all(self, keys: Sequence[str]) -> None:
        """:meth:`commit` of each; an error of one, or of an earlier write, is raised when none is held any more."""
        problems: list[OSError] = []
        for key in keys:
            try:
                self.commit(key)
            except OSError as problem:
                problems.append(problem)
        self.let_go(keys)
        if problems:
            raise problems[0]

    def let_go(self, keys: Sequence[str]) -> None:
        """Give back, unwritten, the buffers of those keys that the caller holds. Raises nothing."""
        for key in keys:
            buffer = self._at.get(key)
            if buffer is not None and buffer.state is _State.HELD:
                self._free(buffer)

    def drop(self, key: str) -> None:
        """Give the fetched buffer back unwritten: the file keeps what it has."""
        self._free(self._held(key, "drop"))
        self._raise_failures()

    def mapped(self, key: str) -> torch.Tensor:
        """The values of a key where they lie in the file, by way of the page cache; valid as long as it is held.

        For readers and writers between `flush` and the next `fetch`: the system keeps as much of it in memory as is
        free, reads the rest when it is touched, and shows what has been committed since.  # 1D (numel,), host
        """
        entry = self._entry(key)
        if not entry.nbytes:
            return torch.empty(0, dtype=entry.dtype)
        entry.written = True
        with open(self._file.path, "r+b") as file:
            view = mmap.mmap(file.fileno(), round_up(entry.nbytes), offset=entry.offset)
        return torch.frombuffer(view, dtype=entry.dtype, count=entry.numel)

    def flush(self) -> None:
        """All writes are done. Raises AioError: the first that failed since the last call."""
        for key in list(self._writes):
            self._end_write(key)
            self._free_if_ready(key)
        self._raise_failures()

    def close(self) -> None:
        """Remove the file with all keys; buffers the caller holds become invalid. A second call does nothing."""
        self._finalizer()
        for buffer in self._buffers:
            buffer.state, buffer.entry, buffer.transfer = _State.FREE, None, None
            buffer.memory.release()
        self._at.clear()
        self._writes.clear()
        self._entries.clear()

    # ---- checks

    def _entry(self, key: str) -> _Entry:
        if not self._finalizer.alive:
            raise RuntimeError(f"the store is closed; {key!r} is gone with its file")
        try:
            return self._entries[key]
        except KeyError:
            raise KeyError(f"no key {key!r} in {self._file.path}; `create` makes one") from None

    def _check_new(self, entry: _Entry, initial: torch.Tensor | None) -> None:
        if not self._finalizer.alive:
            raise RuntimeError(f"the store is closed; {entry.key!r} cannot be created")
        if entry.key in self._entries:
            raise ValueError(f"key {entry.key!r} exists already; each is created once")
        if entry.numel < 0:
            raise ValueError(f"{entry.key!r}: expected numel >= 0, found {entry.numel}")
        if round_up(entry.nbytes) > self.buffer_nbytes:
            raise ValueError(
                f"{entry.key!r}: {entry.numel:,} elements of {entry.dtype} are {round_up(entry.nbytes):,} bytes in "
                f"pages, a buffer has {self.buffer_nbytes:,}; raise the buffer size to at least "
                f"{round_up(entry.nbytes):,} bytes ({round_up(entry.nbytes) // entry.dtype.itemsize:,} elements), or "
                f"make the parts smaller (zero_optimization.sub_group_size)"
            )
        if initial is not None and initial.numel() != entry.numel:
            raise ValueError(f"{entry.key!r}: expected {entry.numel} initial elements, found {initial.numel()}")

    def _held(self, key: str, what: str) -> _Buffer:
        self._entry(key)
        buffer = self._at.get(key)
        if buffer is None or buffer.state is not _State.HELD:
            raise RuntimeError(f"{what} of {key!r}, which is not fetched")
        return buffer

    def _raise_failures(self) -> None:
        if self._failed:
            failures, self._failed = self._failed, []
            raise failures[0]

    # ---- buffers

    def _take(self, buffer: _Buffer, entry: _Entry, state: _State) -> None:
        buffer.state, buffer.entry = state, entry
        self._at[entry.key] = buffer

    def _free(self, buffer: _Buffer) -> None:
        assert buffer.entry is not None
        del self._at[buffer.entry.key]
        buffer.state, buffer.entry, buffer.transfer = _State.FREE, None, None

    def _start_reading(self, buffer: _Buffer, entry: _Entry, after: Transfer | None = None) -> None:
        """``after``: a write out of this buffer's memory."""
        if entry.key in self._writes:  # out of a buffer that has another key now
            self._end_write(entry.key)
            self._raise_failures()
        self._take(buffer, entry, _State.READY)
        if not entry.written or not entry.nbytes:
            buffer.tensor(self.buffer_nbytes).zero_()
            return
        pages = buffer.pages(entry, self.buffer_nbytes)
        buffer.transfer = self._engine.start(False, self._file, pages, entry.offset, after)
        buffer.state = _State.READING

    def _end_read(self, buffer: _Buffer) -> None:
        """Wait; the buffer is then READY, or free when reading failed."""
        assert buffer.transfer is not None
        assert buffer.entry is not None
        try:
            buffer.transfer.wait()
        except AioError as problem:
            self._failed.append(_about(buffer.entry, problem))
            self._free(buffer)
            return
        buffer.state, buffer.transfer = _State.READY, None

    def _end_write(self, key: str) -> None:
        """Wait; the key's buffer, if it has one still, is then READY, or free when writing failed: the key is lost."""
        transfer, buffer = self._writes.pop(key), self._at.get(key)
        try:
            transfer.wait()
        except AioError as problem:
            entry = self._entries[key]
            entry.failure = _about(entry, problem)
            self._failed.append(entry.failure)
            if buffer is not None:
                self._free(buffer)
            return
        if buffer is not None:
            buffer.state = _State.READY

    def _free_if_ready(self, key: str) -> _Buffer | None:
        buffer = self._at.get(key)
        if buffer is None or buffer.state is not _State.READY:
            return None
        self._free(buffer)
        return buffer

    def _reap(self) -> None:
        """Buffers whose write is over are free again."""
        for key in [key for key, transfer in self._writes.items() if transfer.done()]:
            self._end_write(key)
            self._free_if_ready(key)

    def _free_buffer(self, wanted: _Entry) -> _Buffer:
        """A free buffer: waits for a write, else gives up what was read ahead."""
        self._reap()
        while not any(buffer.state is _State.FREE for buffer in self._buffers):
            if self._writes:
                key = next(iter(self._writes))
                self._end_write(key)
                self._free_if_ready(key)
            elif not self._forgo_read_ahead():
                self._raise_no_buffer(wanted)
        self._raise_failures()
        return next(buffer for buffer in self._buffers if buffer.state is _State.FREE)

    def _forgo_read_ahead(self) -> bool:
        """Free a buffer that was read ahead, or is being read; False when there is none."""
        for state in (_State.READY, _State.READING):
            for buffer in self._buffers:
                if buffer.state is not state:
                    continue
                if state is _State.READING:
                    self._end_read(buffer)
                if buffer.entry is not None:
                    self._free(buffer)
                return True
        return False

    def _raise_no_buffer(self, wanted: _Entry) -> NoReturn:
        held = ", ".join(repr(key) for key in self._at)
        raise RuntimeError(
            f"no buffer for {wanted.key!r}: all {len(self._buffers)} are held ({held[:200]}); commit or drop one, or "
            f"set buffer_count to at least {len(self._buffers) + 1}"
        )


def _about(entry: _Entry, problem: AioError) -> AioError:
    return AioError(problem.errno, f"{entry.key!r}: {problem.strerror}", problem.filename)


def _close(engine: AioEngine, file: AioFile, folder: SwapFolder, process: int) -> None:
    engine.close()
    if os.getpid() == process:
        file.close()
        folder.close()
