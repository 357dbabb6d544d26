"""A small process beside the launcher that ends the whole run if the launcher itself is killed.

The kernel kills the workers with their launcher (`processes.die_with_parent`), but not the workers' children. The
guardian holds the reading end of a pipe whose writing end only the launcher has: end of file without the closing word
means the launcher is gone, whatever the reason.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import TracebackType

from deepspeed.launcher.processes import kill_run

_DONE = b"done\n"


class Guardian:
    """Context manager of the launcher's side: `watch` each worker, leave the block when all have ended."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def __enter__(self) -> Guardian:
        reading, self._writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _guard(reading, self._run_id)  # never returns
        os.close(reading)
        return self

    def watch(self, leader: int) -> None:
        self._tell(b"%d\n" % leader)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._tell(_DONE)
        os.close(self._writing)
        os.waitpid(self._pid, 0)

    def _tell(self, line: bytes) -> None:
        # A broken pipe: somebody killed the guardian. The run goes on; only the care for grandchildren is lost.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._writing, line)


def _guard(reading: int, run_id: str) -> None:
    """Body of the guardian. Uses system calls only: it is a fork of a process that may have had threads."""
    try:
        os.setsid()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGUSR1,
                       signal.SIGUSR2):
            signal.signal(signum, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        # Copies of the launcher's other descriptors (its own end of this pipe among them) would keep them open.
        for descriptor in _open_descriptors():
            if descriptor > 2 and descriptor != reading:
                os.close(descriptor)
        received = b""
        while chunk := os.read(reading, 4096):
            received += chunk
        if not received.endswith(_DONE):
            kill_run(run_id, [int(line) for line in received.split(b"\n")[:-1]])
    finally:
        os._exit(0)


def _open_descriptors() -> list[int]:
    listing = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    numbers = [int(name) for name in os.listdir(listing)]
    return [number for number in numbers if _is_open(number)]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False  # the one that read the listing
    return True
