"""Finding and signalling the processes of a run, workers' children included.

Every worker leads its own session, so its ordinary children can be signalled as one group. Children that left the group
(a nested launcher, a daemon) still carry the run's id in their environment, and are found by it where the system shows
environments (Linux).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable

from deepspeed.launcher.environment import RUN_ID_VARIABLE


def new_run_id(outer: str | None) -> str:
    """An id no other run has. A run started inside another one continues that one's id."""
    own = f"{os.getpid()}-{os.urandom(6).hex()}"
    return f"{outer}/{own}" if outer else own


def signal_group(leader: int, signum: int) -> None:
    """Signal every process of the group that ``leader`` leads. The leader must not have been reaped yet: until then its
    number cannot belong to anybody else."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signum)


def signal_process(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def processes_of_run(run_id: str, *, excluding: Iterable[int] = ()) -> list[int]:
    """Living processes that carry the run's id, or that of a run nested in it, in the environment they began with."""
    mark = f"{RUN_ID_VARIABLE}={run_id}".encode()
    nested = mark + b"/"
    skipped = {os.getpid(), *excluding}
    found = []
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for pid in pids:
        if pid in skipped:
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as text:
                # A zombie shows an empty environment, so only the living are found.
                entries = text.read().split(b"\0")
        except OSError:
            continue  # gone meanwhile, or another user's
        if any(entry == mark or entry.startswith(nested) for entry in entries):
            found.append(pid)
    return found


def kill_run(run_id: str, leaders: Iterable[int]) -> None:
    """End every process of the run at once, and those it starts meanwhile."""
    for leader in leaders:
        signal_group(leader, signal.SIGKILL)
    for _ in range(3):
        stragglers = processes_of_run(run_id)
        if not stragglers:
            break
        for pid in stragglers:
            signal_process(pid, signal.SIGKILL)


def die_with_parent() -> None:
    """Ask the kernel to kill the calling process when the thread that started it ends. Linux alone can."""
    if sys.platform == "linux":
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


if sys.platform == "linux":
    import ctypes

    _PR_SET_PDEATHSIG = 1
    # Looked up here, not between fork and exec, where importing or opening libraries is not safe.
    _PRCTL = ctypes.CDLL(None).prctl
