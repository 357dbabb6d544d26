"""Writing large files past the system's page cache: filled buffers go to the disk while the next one is filled.

Through the cache every byte is copied once more, and ``fsync`` then waits for all of them at once. Here whole pages go
straight to the disk; the end of the file, and headers that are filled in later, take the ordinary way.

Owns: buffers in flight, and that what is written twice ends up as written last. Does not own: opening, fsync and
renaming (``disk/durable.py``). Invariant: after :meth:`DirectFile.finish` the file holds exactly what was written; a
file system that cannot do this is written to through the cache, with the same result.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

PAGE = mmap.PAGESIZE
# Smaller files are written through the cache: what fsync waits for there is not their bytes.
_DIRECT_FROM_NBYTES = 4 << 20


@dataclass(frozen=True)
class Writing:
    """How files are written. ``direct``: past the page cache, with ``buffers`` parts of a buffer of ``nbytes``."""

    direct: bool = True
    nbytes: int = 16 << 20
    buffers: int = 2


PLAIN = Writing(direct=False)


def writing_of(config: Any) -> Writing:
    """What a ``checkpoint.writer`` section (or None) asks for."""
    if config is None:
        return Writing()
    buffers = (2 if config.io_buffer_double else 1) * config.io_multiplier
    return Writing(config.type != "PYTHON", config.io_buffer_size, buffers)


@contextlib.contextmanager
def writer(file: BinaryIO, expected_nbytes: int, how: Writing) -> Iterator[Any]:
    """Something to write ``file`` (just opened, empty) through: itself, or a :class:`DirectFile` for a large one."""
    flag = getattr(os, "O_DIRECT", 0)
    if not (how.direct and flag and expected_nbytes >= _DIRECT_FROM_NBYTES and _set_flag(file.fileno(), flag, True)):
        yield file
        return
    from deepspeed.utils.host_buffer import HostBuffer  # files of tools need neither it nor torch

    part = max(PAGE, min(how.nbytes, expected_nbytes) // how.buffers // PAGE * PAGE)
    room = HostBuffer(private=True).room(part * how.buffers).numpy()
    parts = [room[start : start + part] for start in range(0, part * how.buffers, part)]
    direct = DirectFile(file.fileno(), flag, parts)
    try:
        yield direct
        direct.finish()
    finally:
        direct.land()
        _set_flag(file.fileno(), flag, False)


def _set_flag(handle: int, flag: int, on: bool) -> bool:
    """Switch ``flag`` of an open file; False where its file system refuses."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
    except OSError:
        return False
    return True


class _Flight:
    """Work in a thread of its own. (Executors refuse work while the interpreter waits for its last threads.)"""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-part")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def land(self) -> BaseException | None:
        """Wait; what went wrong, or None."""
        self._thread.join()
        return self._error


class DirectFile:
    """The part of a binary file's interface that writers of archives use: ``write`` and ``seek``, also backwards."""

    def __init__(self, handle: int, flag: int, parts: list[Any]) -> None:
        self._handle, self._flag, self._parts = handle, flag, parts
        self._current = 0  # the part being filled
        self._start = 0  # file offset of its first byte
        self._filled = 0  # bytes in it
        self._position = 0
        self._flying: dict[int, _Flight] = {}
        self._patches: list[tuple[int, bytes]] = []  # written later into what has gone to the disk

    def seek(self, position: int) -> None:
        """Go back, or return to the end. Raises ValueError beyond it: files have no holes."""
        if position > self._start + self._filled:
            raise ValueError(f"seek to {position}, the file ends at {self._start + self._filled}")
        self._position = position

    def write(self, data: bytes | memoryview) -> int:
        """Append, or overwrite after :meth:`seek`. Raises OSError when an earlier part could not be written."""
        import numpy

        source = numpy.frombuffer(data, dtype=numpy.uint8)
        done = 0
        if self._position < self._start:
            done = min(len(source), self._start - self._position)
            self._patches.append((self._position, source[:done].tobytes()))
            self._position += done
        while done < len(source):
            part = self._parts[self._current]
            where = self._position - self._start
            count = min(len(source) - done, len(part) - where)
            part[where : where + count] = source[done : done + count]
            done += count
            self._position += count
            self._filled = max(self._filled, where + count)
            if self._filled == len(part):
                self._send()
        return len(source)

    def _send(self) -> None:
        """Write the full part out in the background and go on in the next one, once that is free."""
        part = self._parts[self._current]
        self._flying[self._current] = _Flight(partial(self._write_all, part.data, self._start))
        self._start += len(part)
        self._filled = 0
        self._current = (self._current + 1) % len(self._parts)
        flying = self._flying.pop(self._current, None)
        error = flying.land() if flying is not None else None
        if error is not None:
            raise error

    def land(self) -> BaseException | None:
        """Wait for all that is under way; the first thing that went wrong, or None."""
        errors = [flying.land() for flying in self._flying.values()]
        self._flying.clear()
        return next((error for error in errors if error is not None), None)

    def _write_all(self, data: memoryview, offset: int) -> None:
        while data:
            # Asked before the write: another part in flight may clear the flag, which both share, before this one is
            # told that it was refused.
            past_cache = _is_set(self._handle, self._flag)
            try:
                count = os.pwrite(self._handle, data, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not past_cache:
                    raise
                _set_flag(self._handle, self._flag, False)  # this file system wants another alignment: use the cache
                continue
            data, offset = data[count:], offset + count
            if len(data) % PAGE:  # a short write (a full disk, most likely) has left a piece no page fits
                _set_flag(self._handle, self._flag, False)

    def finish(self) -> None:
        """Everything is with the system. Raises OSError when some of it could not be written."""
        error = self.land()
        if error is not None:
            raise error
        _set_flag(self._handle, self._flag, False)
        self._write_all(self._parts[self._current].data[: self._filled], self._start)
        for offset, data in self._patches:
            self._write_all(memoryview(data), offset)


def _is_set(handle: int, flag: int) -> bool:
    return bool(fcntl.fcntl(handle, fcntl.F_GETFL) & flag)
