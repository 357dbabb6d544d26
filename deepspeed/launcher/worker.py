"""One worker process: how it is started, when it has ended, what remains of it.

Invariant: a worker is reaped only by `reap`, after its process group has been dealt with. Until then the kernel keeps
its number, so signalling its group can never hit a stranger.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from deepspeed.launcher.processes import die_with_parent

if TYPE_CHECKING:
    import resource


@dataclass(frozen=True)
class WorkerSpec:
    """What to start.

    name: what messages call it; place: where it runs, for them. log_path: file that gets its output, None to share the
    launcher's streams. cores: CPU cores it may run on, empty for all. stdin: "inherit" the launcher's, "empty", or
    "open": a pipe that stays open, and silent, as long as the launcher lives.
    """

    name: str
    place: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    log_path: str | None = None
    cores: tuple[int, ...] = ()
    stdin: Literal["inherit", "empty", "open"] = "inherit"


@dataclass(frozen=True)
class Ending:
    """How a worker ended: an exit code, or the signal that killed it (0: none)."""

    code: int
    signum: int
    seconds: float

    @property
    def failed(self) -> bool:
        return self.code != 0 or self.signum != 0

    @property
    def status(self) -> int:
        """Exit status as a shell gives it."""
        return 128 + self.signum if self.signum else self.code

    def describe(self) -> str:
        if self.signum:
            return f"was killed by {signal_name(self.signum)} (signal {self.signum})"
        return f"ended with exit code {self.code}"


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


_STDIN = {"inherit": None, "empty": subprocess.DEVNULL, "open": subprocess.PIPE}


class Worker:
    """A started worker. ``ending`` is None while it runs; ``peak_bytes`` is known after `reap`."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.ending: Ending | None = None
        self.peak_bytes = 0
        self._started_at = time.monotonic()
        output = None if spec.log_path is None else open(spec.log_path, "ab", buffering=0)  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                spec.argv,
                env=spec.environment,
                stdin=_STDIN[spec.stdin],
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_child_setup(spec.cores),
            )
        finally:
            if output is not None:
                output.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def look(self) -> bool:
        """Whether it has ended, without reaping it where the system can tell."""
        if self.ending is not None:
            return True
        if hasattr(os, "waitid"):
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if found is None:
                return False
            exited = found.si_code == os.CLD_EXITED
            self._set_ending(found.si_status if exited else 0, 0 if exited else found.si_status)
            return True
        return self._wait(os.WNOHANG)

    def reap(self) -> None:
        """Give its number back to the system and learn its peak memory."""
        if self._process.returncode is None:
            self._wait(0)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _wait(self, options: int) -> bool:
        pid, status, usage = os.wait4(self.pid, options)
        if pid == 0:
            return False
        killed = os.WIFSIGNALED(status)
        if self.ending is None:
            self._set_ending(0 if killed else os.WEXITSTATUS(status), os.WTERMSIG(status) if killed else 0)
        self.peak_bytes = peak_bytes(usage)
        # Popen did not see the wait, so it would take the process for a running one.
        self._process.returncode = -os.WTERMSIG(status) if killed else os.WEXITSTATUS(status)
        return True

    def _set_ending(self, code: int, signum: int) -> None:
        self.ending = Ending(code, signum, time.monotonic() - self._started_at)


def peak_bytes(usage: resource.struct_rusage) -> int:
    """Largest resident set, in bytes. Linux counts in KiB, macOS in bytes."""
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _child_setup(cores: Sequence[int]) -> Callable[[], None]:
    """What runs in the child between fork and exec. It must only make system calls."""
    launcher = os.getpid()

    def setup() -> None:
        die_with_parent()
        if os.getppid() != launcher:
            os._exit(1)  # the launcher ended before the kernel knew whom to tell
        if cores:
            os.sched_setaffinity(0, cores)

    return setup
