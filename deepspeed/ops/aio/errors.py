"""What goes wrong with a file: which file, at which offset, how many bytes were asked for and how many were there."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

__all__ = ["AioError", "Ended", "SHORT", "no_space", "transfer_failed"]

SHORT = -1
"""Code of a transfer that met the end of the file (as in ``aio.h``)."""


@dataclass(frozen=True)
class Ended:
    """How a transfer ended; see ``ds_aio_result`` in ``aio.h``."""

    code: int
    offset: int
    expected: int
    found: int


class AioError(OSError):
    """A file could not be read, written or allocated. ``errno`` and ``filename`` are set as in any OSError."""


def transfer_failed(path: str, write: bool, ended: Ended) -> AioError:
    """The error of one transfer."""
    verb = "writing" if write else "reading"
    if ended.code == SHORT:
        number, why = errno.EIO, "the file ends there"
    else:
        number, why = ended.code, os.strerror(ended.code)
    where = f"{verb} stopped at offset {ended.offset}: expected {ended.expected} bytes, found {ended.found}"
    return AioError(number, f"{why}; {where}", path)


def no_space(path: str, needed: int, free: int | None) -> AioError:
    """A file system without room for ``needed`` more bytes."""
    there = "" if free is None else f", {free:,} are free"
    text = f"no room: {needed:,} bytes are needed{there}; free some or choose another folder"
    return AioError(errno.ENOSPC, text, path)
