"""Putting files on disk so that a crash at any moment leaves the old state or the new one.

Owns: writing aside, fsync, atomic replacement of files and folders, and clearing away what crashes left.
Does not own: what is written, or when a checkpoint counts as complete (``disk/manifest.py``, ``manager.py``).
Invariant: a visible name is only ever created or replaced by a rename of something complete and already on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from deepspeed.checkpoint import names
from deepspeed.checkpoint.disk import direct
from deepspeed.utils.torch_archive.archive import Written
from deepspeed.utils.torch_archive.packs import ArchiveFile

# A folder in transit whose owner cannot be asked is dead when nothing in it has changed for this long.
_STALE_AFTER_S = 6 * 3600
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def open_for_writing(path: Path) -> BinaryIO:
    """The one place files are opened for writing (a place for fault injection in tests)."""
    return open(path, "wb", buffering=1 << 20)


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """A file that appears at ``path`` only when the block ends without error, complete and on disk."""
    aside = path.with_name(names.partial_file(path.name))
    try:
        with open_for_writing(aside) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # a write that failed does not say where
            error.filename = str(path)
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` atomically."""
    with written_aside(path) as file:
        file.write(text.encode())


def write_torch(path: Path, content: ArchiveFile, how: direct.Writing = direct.PLAIN) -> Written:
    """Write ``content`` to ``path`` atomically; returns size and checksum, and checks the size on disk.

    Raises OSError.
    """
    with written_aside(path) as file, direct.writer(file, content.nbytes, how) as target:
        written = content.write(target)
    found = path.stat().st_size
    if found != written.nbytes:
        raise OSError(errno.EIO, f"{written.nbytes} bytes were written, the file has {found}", str(path))
    return written


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable. File systems that cannot sync a folder are left alone."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


# ---- folders -------------------------------------------------------------------------------------------------------


def new_token() -> str:
    """A name part for one save by this process; it says which process that is: host, number, start time, chance."""
    return f"{_host():08x}{os.getpid():08x}{_start_time(os.getpid()) or 0:012x}{os.urandom(2).hex()}"


def _host() -> int:
    return zlib.crc32(os.uname().nodename.encode())


def publish_folder(saved: Path, final: Path, token: str) -> None:
    """Make the complete folder ``saved`` visible as ``final``, replacing what stands there in one step.

    Files in the replaced folder that no save wrote are kept. Where the system cannot swap two names at once there is
    a moment without ``final``; :func:`recover` puts the old one back after a crash in it.
    """
    sync_folder(saved)
    old = None
    if not os.path.lexists(final):
        os.rename(saved, final)
    else:
        old = saved
        if not _exchange(saved, final):
            old = _hidden(final, names.Transit.REPLACED, token)
            os.rename(final, old)
            os.rename(saved, final)
    sync_folder(final.parent)
    if old is not None and old.is_symlink():
        old.unlink()  # the tag was a link to a folder elsewhere: what that holds is not ours to touch
    elif old is not None:
        _keep_foreign(old, final)
        delete_folder(old, final.name, token)


def delete_folder(folder: Path, name: str, token: str) -> None:
    """Delete ``folder`` (tag ``name``) so that no crash leaves a part of it under a name that counts.

    What cannot be deleted now is cleared by a later save.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    aside = _hidden(folder.with_name(name), names.Transit.DELETED, token)
    os.rename(folder, aside)
    sync_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def saving_folder(final: Path, token: str) -> Path:
    """Where the save with ``token`` collects the files of the tag folder ``final``."""
    return _hidden(final, names.Transit.SAVING, token)


def _hidden(final: Path, kind: names.Transit, token: str) -> Path:
    return final.with_name(str(names.HiddenName(final.name, kind, token)))


def _keep_foreign(old: Path, new: Path) -> None:
    for entry in old.iterdir():
        ours = names.is_checkpoint_file(entry.name) or names.is_partial_file(entry.name)
        ours = ours or entry.name == names.UNIVERSAL_STATES  # a tag saved over a universal folder is none
        if not ours and not (new / entry.name).exists():
            os.rename(entry, new / entry.name)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically where the system can."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False  # this file system cannot
    raise OSError(code, os.strerror(code), str(second))


# ---- after a crash -------------------------------------------------------------------------------------------------


def recover(final: Path, is_complete: Callable[[Path], bool]) -> bool:
    """Put back a complete tag that a crash left without its name. True when something was put back."""
    if final.exists() or not final.parent.is_dir():
        return False
    for entry in sorted(final.parent.iterdir()):
        hidden = names.parse_hidden(entry.name)
        replaced = hidden is not None and hidden.kind is names.Transit.REPLACED and hidden.name == final.name
        if replaced and is_complete(entry):
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(entry, final)
                sync_folder(final.parent)
                return True
    return False


def clear_leftovers(folder: Path, is_complete: Callable[[Path], bool]) -> list[str]:
    """Remove what saves that ended early left in ``folder``; returns the names removed.

    A replaced folder whose tag is missing is put back first, so nothing complete is ever lost here. Folders and files
    of processes that live, or may live on another host, are left alone.
    """
    removed = []
    for entry in sorted(folder.iterdir()):
        hidden = names.parse_hidden(entry.name)
        if hidden is not None and entry.is_dir() and not entry.is_symlink():
            if hidden.kind is names.Transit.REPLACED and recover(folder / hidden.name, is_complete):
                continue
            if hidden.kind is not names.Transit.SAVING or _owner_is_gone(hidden.token, entry):
                if hidden.kind is not names.Transit.DELETED and (folder / hidden.name).is_dir():
                    _keep_foreign(entry, folder / hidden.name)
                shutil.rmtree(entry, ignore_errors=True)
                removed.append(entry.name)
        elif names.is_partial_file(entry.name) and entry.is_file() and _untouched_for_long(entry):
            entry.unlink(missing_ok=True)
            removed.append(entry.name)
    return removed


def _owner_is_gone(token: str, folder: Path) -> bool:
    """Whether the process that made ``token`` has ended; guessed from the age of ``folder`` when it ran elsewhere."""
    if len(token) != len(new_token()) or int(token[:8], 16) != _host():
        return _untouched_for_long(folder)
    return _start_time(int(token[8:16], 16)) != int(token[16:28], 16)


def _untouched_for_long(path: Path) -> bool:
    """By the clock of the file system itself: the clocks of hosts may differ or jump."""
    probe = path.with_name(names.partial_file("clock"))
    try:
        newest = max(entry.stat().st_mtime for entry in [path, *path.rglob("*")])
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
    except OSError:
        return False
    return now - newest > _STALE_AFTER_S


def _start_time(pid: int) -> int | None:
    """Tells process ``pid`` from a later one with the same number (0 where that is unknown); None: there is none."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat", errors="replace") as stat:
        return int(stat.read().rsplit(")", 1)[1].split()[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
