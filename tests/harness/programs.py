"""Programs of users on ranks, from their first line to the end of the process, without the seconds that imports take.

Owns: running a text as the main program of a fresh process forked from the pool's server, and the end of that process
in the order of the interpreter: the exception hook, threads, exit handlers. Does not own: the warm ranks (`pool.py`).
Invariant: nothing of a program outlives `run_programs`. Modules are imported already (`preload.py`), so a test of
imports, of the interpreter's options or of the launcher starts an interpreter of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.pool import WorkerPool, _free_port

_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Ended:
    """How one program ended: its exit code (a signal's number is negative), standard output and error."""

    code: int | None
    output: str
    errors: str


def run_programs(
    pool: WorkerPool,
    source: str,
    *arguments: str,
    ranks: int = 1,
    name: str = "program.py",
    environment: Mapping[str, str] | None = None,
    timeout: float = _TIMEOUT_S,
) -> list[Ended]:
    """Run `source`, which tracebacks call `name`, on `ranks` ranks with torchrun's variables; wait for all of them.

    A program that has not ended after `timeout` seconds is killed, which its exit code says.
    """
    port = str(_free_port())
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), **(environment or {})}
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            variables = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = pool.fork(_main, source, name, arguments, variables, f"{folder}/{rank}", sys.path)
            started.append(process)
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in started:
            process.kill()
            process.join()
        found = [
            Ended(process.exitcode, *(_read(f"{folder}/{rank}.{stream}") for stream in ("out", "err")))
            for rank, process in enumerate(started)
        ]
        for process in started:
            process.close()
    return found


def _read(path: str) -> str:
    return Path(path).read_text(errors="replace") if os.path.exists(path) else ""


def _main(
    source: str, name: str, arguments: Sequence[str], variables: dict[str, str], files: str, path: Sequence[str]
) -> None:
    """Body of the forked process; never returns."""
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = list(path)
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{files}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.argv = [name, *arguments]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    os._exit(_run(compile(source, name, "exec"), vars(module)))


def _run(code: types.CodeType, namespace: dict[str, Any]) -> int:
    """Exit code after the interpreter's order of things at the end of a program."""
    ended = 0
    try:
        exec(code, namespace)
    except SystemExit as error:
        ended = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        ended = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):
            stream.flush()
    return ended
