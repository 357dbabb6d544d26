"""A folder for the files of one process, which the next process removes when this one could not.

`<nvme_path>/deepspeed_swap/<host>-<process>-rank<rank>-<random>/` holds the files and `owner.lock`, which its process
keeps locked. Whoever makes a folder first removes its neighbours whose lock nobody holds: their processes are dead.
On a file system without locks folders have none, and what a crash leaves there stays.

Owns: names, locks, removal (on `close`, at exit, after a crash by the next start). Does not own: the files.
Invariant: a folder is only removed by its own process or when that is dead; two processes never share one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import socket
import tempfile
import time
import weakref
from pathlib import Path

from deepspeed.ops.aio.errors import AioError
from deepspeed.utils.logging import logger

try:
    import fcntl
except ImportError:  # no such locks on this system: leftovers stay until somebody removes them
    fcntl = None  # type: ignore[assignment]

__all__ = ["BASE", "SwapFolder"]

BASE = "deepspeed_swap"
"""Name of the folder below `nvme_path` that holds those of all processes."""

_LOCK = "owner.lock"
_NEW = ".new-"  # a lock that has no folder yet
_ATTEMPTS = 100
_PAUSE_S = 0.02
_NETWORK = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "gpfs", "beegfs", "afs", "fuse.sshfs", "glusterfs",
)  # fmt: skip


class SwapFolder:
    """See the module docstring."""

    def __init__(self, root: Path, rank: int, key: str = "nvme_path") -> None:
        """Make a folder below ``root`` (made if it is missing); ``key`` is the setting that named it.

        Raises AioError: ``root`` cannot be made or written, or is a file.
        """
        base = Path(root) / BASE
        try:
            self.path, self._lock = _make(base, f"{socket.gethostname()}-{os.getpid()}-rank{rank}-")
        except OSError as problem:
            raise AioError(
                problem.errno,
                f"{key} {root} cannot be used: {problem.strerror}; choose a folder this user may write, such as "
                '"/local_nvme"',
                problem.filename or str(base),
            ) from problem
        _warn_of_network(str(base))
        self._remove = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def close(self) -> None:
        """Remove the folder with all that is in it. A second call does nothing."""
        self._remove()


def _make(base: Path, prefix: str) -> tuple[Path, int | None]:
    """A new folder and the descriptor that holds its lock. Raises OSError."""
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            base.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                base.chmod(0o1777)  # jobs of other users too
            _remove_leftovers(base)
            # Locked before it has its name in the folder: nobody sees a folder that is alive and not locked.
            handle, fresh = tempfile.mkstemp(prefix=_NEW, dir=base)
            locked = _lock(handle)
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            if locked:
                try:
                    os.rename(fresh, path / _LOCK)
                except FileNotFoundError:  # taken for a leftover before it was locked
                    os.close(handle)
                    path.rmdir()
                    raise
                return path, handle
            os.close(handle)
            os.unlink(fresh)
            return path, None
        except (FileNotFoundError, BlockingIOError, FileExistsError):  # another process has tidied up in this moment
            if not attempts_left or (base.exists() and not base.is_dir()):
                raise
            time.sleep(random.random() * _PAUSE_S)
    raise AssertionError("unreachable")


def _remove(path: Path, lock: int | None, process: int) -> None:
    if os.getpid() != process:  # a forked child: the files are its parent's
        return
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)
    with contextlib.suppress(OSError):  # not empty: others are there
        path.parent.rmdir()


def _lock(handle: int) -> bool:
    """Whether the file is locked now. Raises BlockingIOError when another process has locked it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return False
    return True


def _remove_leftovers(base: Path) -> None:
    """What dead processes have left."""
    for path in base.iterdir():
        lock = path if path.name.startswith(_NEW) else path / _LOCK
        try:
            handle = os.open(lock, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        except OSError:
            continue  # not one of ours, another user's, or gone
        try:
            if _lock(handle):
                if lock is path:
                    path.unlink(missing_ok=True)
                else:
                    shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # alive
        finally:
            os.close(handle)


def _warn_of_network(path: str) -> None:
    kind = _file_system(path)
    if kind in _NETWORK:
        _say_network(path, kind)


@functools.cache
def _say_network(path: str, kind: str) -> None:
    logger.warning(
        f"offload: {path} is on a network file system ({kind}): every step waits for the network; "
        f"set nvme_path to a folder on a local disk"
    )


def _file_system(path: str) -> str:
    """The kind of file system ``path`` is on, as the mount table calls it; empty where there is none."""
    real, best, kind = os.path.realpath(path), "", ""
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as table:
        for line in table:
            fields = line.split()
            if len(fields) < 3:
                continue
            mount = fields[1].replace("\\040", " ")
            inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, fields[2]
    return kind
