"""Files as the engine wants them: one descriptor past the page cache, where there is such a thing, and one through it.

Owns: opening, making room ahead of a write (so that a full disk is found before a byte has changed), sizes.
Does not own: transfers (``engine.py``). Invariant: both descriptors are the same file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from collections.abc import Callable

from deepspeed.ops.aio.errors import AioError, no_space

__all__ = ["AioFile", "free_nbytes"]

_DIRECT = getattr(os, "O_DIRECT", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
# A file system answers so when it cannot allocate ahead.
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)


class AioFile:
    """One open file. ``direct`` is -1 where the file system does not know O_DIRECT."""

    def __init__(self, path: str | os.PathLike[str], *, write: bool = False, create: bool = False) -> None:
        """Raises AioError (missing, a folder, not permitted...), naming the file."""
        self.path = os.fspath(path)
        mode = (os.O_RDWR if write else os.O_RDONLY) | _CLOEXEC
        self.direct = -1
        try:
            self.plain = os.open(self.path, mode | (os.O_CREAT if create else 0), 0o600 if create else 0)
        except OSError as problem:
            verb = "written" if write else "read"
            raise AioError(problem.errno, f"cannot be {verb}: {problem.strerror}", self.path) from problem
        if not _DIRECT:
            return
        with contextlib.suppress(OSError):
            self.direct = os.open(self.path, mode | _DIRECT)
            # Only odd ends go through the cache: what lies behind them is not wanted.
            os.posix_fadvise(self.plain, 0, 0, os.POSIX_FADV_RANDOM)

    def nbytes(self) -> int:
        """Size of the file."""
        return os.fstat(self.plain).st_size

    def reserve(self, offset: int, nbytes: int, *, extend: bool = False) -> None:
        """Room on the disk for a range; the bytes that are there stay. ``extend``: the file is then at least as long.

        A file system that cannot allocate ahead is asked for its free space instead.

        Raises AioError (ENOSPC, with bytes needed and free).
        """
        facts = os.fstat(self.plain)
        end = offset + nbytes
        if facts.st_size >= end and facts.st_blocks * 512 >= facts.st_size:
            return  # every byte of the file has its place already
        code = _allocate_ahead(self.plain, offset, nbytes)
        missing = max(0, end - facts.st_blocks * 512)
        if code in _CANNOT_RESERVE:
            free = free_nbytes(self.path)
            code = errno.ENOSPC if free is not None and missing > free else 0
        if code:
            with contextlib.suppress(OSError):
                os.ftruncate(self.plain, facts.st_size)  # gives back what was allocated behind the end
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(self.path, missing, free_nbytes(self.path))
        if code:
            text = f"{os.strerror(code)}; {nbytes} bytes at offset {offset} cannot be reserved"
            raise AioError(code, text, self.path)
        if extend and facts.st_size < end:
            os.ftruncate(self.plain, end)

    def close(self) -> None:
        """Close both descriptors; a second call does nothing."""
        for handle in (self.direct, self.plain):
            if handle >= 0:
                os.close(handle)
        self.direct = self.plain = -1


def free_nbytes(path: str) -> int | None:
    """Bytes an ordinary user may still write where ``path`` is; None where the system does not tell."""
    try:
        facts = os.statvfs(path)
    except (OSError, AttributeError):
        return None
    return facts.f_bavail * facts.f_frsize


@functools.cache
def _libc_fallocate() -> Callable[..., int] | None:
    """``fallocate`` of the C library: the posix one writes zeros where the file system cannot allocate."""
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate64
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function


def _allocate_ahead(handle: int, offset: int, nbytes: int) -> int:
    """Room on the disk for a range of an open file, whose size stays. 0 or an errno."""
    function = _libc_fallocate()
    if function is None:
        return errno.ENOSYS
    while nbytes > 0 and function(handle, _KEEP_SIZE, offset, nbytes) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return code
    return 0
