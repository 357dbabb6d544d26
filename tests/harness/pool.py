"""The warm pool: worker processes that live for the whole test session.

Owns: starting, using, killing and replacing workers; gathering what the ranks of one test return or raise.
Does not own: what happens inside a worker (`worker.py`), what it has imported (`preload.py`), what counts as a leak
(`leaks.py`).
Invariant: each test gets a process group of its own on workers that nobody else uses; a worker that hung, crashed or
leaked is never used again.

    def body(scale):                     # module level: sent by name
        t = torch.ones(2) * scale
        dist.all_reduce(t)
        return t.tolist()

    def test_sum(pool):
        assert pool.run(2, body, 3.0) == [[6.0, 6.0], [6.0, 6.0]]
"""

from __future__ import annotations

import atexit
import functools
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.harness import worker as worker_module
from tests.harness.worker import DUMP_SIGNAL, FINISH, Cleanup, Report, Task

DEFAULT_TIMEOUT_S = 120.0
# How long the other ranks may take to end after one has failed, before they count as hanging.
_GRACE_AFTER_FAILURE_S = 5.0
_CLEANUP_TIMEOUT_S = 30.0


class RemoteTraceback(Exception):
    """Cause of a re-raised exception: rank, remote traceback and what the ranks printed."""

    def __str__(self) -> str:
        return str(self.args[0])


class WorkerDied(RuntimeError):
    """A worker process ended before it reported."""


class WorkerHung(RuntimeError):
    """A rank neither returned nor raised within the timeout; the text holds the stacks of all ranks."""


class LeakError(AssertionError):
    """A test function left process-wide state behind."""


@dataclass(frozen=True)
class Outcome:
    """What one rank did: a value, or an exception with its remote traceback."""

    rank: int
    value: Any
    error: BaseException | None
    traceback: str
    output: str
    seconds: float


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    stack_path: Path
    log_path: Path

    def last_words(self) -> str:
        """The end of what it printed, which a process that aborts writes past Python."""
        return self.log_path.read_text(errors="replace")[-2000:] if self.log_path.exists() else ""

    def describe_exit(self) -> str:
        self.process.join(2)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class WorkerPool:
    """Up to `max_workers` processes, started when first needed."""

    def __init__(self, max_workers: int = 4, warning_filters: Sequence[str] = ("error",)) -> None:
        self._max_workers = max_workers
        self._warning_filters = tuple(warning_filters)
        self._folder = Path(tempfile.mkdtemp(prefix="pool-"))
        self._context = self._make_context()
        self._idle: list[_Worker] = []
        self._started = 0
        self._number = 0
        atexit.register(self.close)

    @staticmethod
    def _make_context() -> ForkServerContext | SpawnContext:
        """A server that has imported all once forks workers in milliseconds; spawn where that does not exist."""
        if sys.platform != "linux":
            return multiprocessing.get_context("spawn")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.harness.preload"])
        return context

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT_S,
        create_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on each rank of a fresh group; return the values in rank order.

        The first exception of any rank is raised here, with the remote traceback as its cause. `create_group=False`
        leaves the process group to the function (the torchrun variables are set either way).
        """
        outcomes, leaked = self._execute(world_size, function, args, kwargs, timeout, create_group, hold=False)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            first = failed[0]
            assert first.error is not None
            raise first.error from RemoteTraceback(_failure_text(outcomes, first))
        if leaked:
            raise LeakError("left behind by the test function:\n" + "\n".join(leaked))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT_S,
        create_group: bool = True,
        **kwargs: Any,
    ) -> list[Outcome]:
        """As `run`, for tests of failures: what each rank returned or raised, in rank order; nothing is raised.

        A rank that raises keeps its connections open until all are done, as in a job whose process lives on; so an
        exception of another rank is its own finding, not the closed socket of the first.
        """
        outcomes, leaked = self._execute(world_size, function, args, kwargs, timeout, create_group, hold=True)
        if leaked:
            raise LeakError("left behind by the test function:\n" + "\n".join(leaked))
        return sorted(outcomes, key=lambda outcome: outcome.rank)

    def fork(self, function: Callable[..., None], *args: Any) -> BaseProcess:
        """A started process that calls `function`, for what a worker cannot do: ending. The caller waits for it."""
        process = self._context.Process(target=function, args=args, daemon=True)
        process.start()
        return process

    # -- one run ---------------------------------------------------------------------------------------------------

    def _execute(
        self,
        world_size: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        create_group: bool,
        hold: bool,
    ) -> tuple[list[Outcome], list[str]]:
        """Outcomes, failed ones first in order of time then the rest in rank order, and lines of leaks."""
        call = _pickle_call(function, args, kwargs)
        workers = self._take(world_size)
        self._number += 1
        store_path = str(self._folder / f"store-{self._number}")
        port = _free_port()
        healthy = False
        try:
            for rank, worker in enumerate(workers):
                task = Task(
                    self._number, rank, world_size, call, store_path, port, create_group, hold, timeout,
                    self._warning_filters,
                )  # fmt: skip
                worker.connection.send(task)
            reports = self._gather(workers, timeout, hold)
            leaked = self._finish(workers)
            healthy = True
        finally:
            self._give_back(workers, keep=healthy)
            Path(store_path).unlink(missing_ok=True)
        outcomes = [_outcome(reports[rank]) for rank in range(world_size)]
        failed_at = {rank: report.failed_at for rank, report in reports.items() if report.error is not None}
        order = sorted(failed_at, key=lambda rank: failed_at[rank])
        rest = [rank for rank in range(world_size) if rank not in failed_at]
        return [outcomes[rank] for rank in order + rest], leaked

    def _gather(self, workers: list[_Worker], timeout: float, hold: bool) -> dict[int, Report]:
        """One report per rank, or an exception that shows every rank's stack."""
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + timeout
        while len(reports) < len(workers):
            pending = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in reports}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending[connection]
                try:
                    report = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise WorkerDied(self._death_text(workers, rank, reports)) from None
                reports[rank] = report
                if report.error is not None and not hold:
                    deadline = min(deadline, time.monotonic() + _GRACE_AFTER_FAILURE_S)
            if not ready and time.monotonic() >= deadline:
                raise WorkerHung(self._hang_text(workers, reports, timeout))
        return reports

    def _finish(self, workers: list[_Worker]) -> list[str]:
        """Let all ranks tear down; lines of what they left behind."""
        leaked: list[str] = []
        for worker in workers:
            worker.connection.send(FINISH)
        for rank, worker in enumerate(workers):
            if not worker.connection.poll(_CLEANUP_TIMEOUT_S):
                raise WorkerHung(f"rank {rank} hangs while closing its groups\n{self._stacks(workers)}")
            try:
                cleanup = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                raise WorkerDied(f"rank {rank} {worker.describe_exit()} while closing its groups") from None
            assert isinstance(cleanup, Cleanup)
            leaked += [f"rank {rank}: {line}" for line in cleanup.leaked]
            if cleanup.leaked:
                self._kill(worker)
        return leaked

    # -- workers ---------------------------------------------------------------------------------------------------

    def _take(self, world_size: int) -> list[_Worker]:
        if world_size > self._max_workers:
            raise ValueError(f"world_size {world_size} is above the pool's {self._max_workers} workers")
        for worker in [worker for worker in self._idle if not worker.process.is_alive()]:
            # It reported a clean end and died afterwards, for instance in a thread of a library. Nobody waits for it.
            self._idle.remove(worker)
            print(f"an idle worker {worker.describe_exit()}; it is replaced", file=sys.stderr)
            worker.connection.close()
        while len(self._idle) < world_size:
            self._idle.append(self._start())
        taken, self._idle = self._idle[:world_size], self._idle[world_size:]
        return taken

    def _start(self) -> _Worker:
        self._started += 1
        here, there = self._context.Pipe()
        stack_path = self._folder / f"stacks-{self._started}"
        log_path = self._folder / f"log-{self._started}"
        process = self._context.Process(
            target=worker_module.main,
            args=(there, str(log_path), str(stack_path), sys.path),
            name=f"rank-worker-{self._started}",
            daemon=True,
        )
        process.start()
        there.close()
        return _Worker(process, here, stack_path, log_path)

    def _give_back(self, workers: list[_Worker], *, keep: bool) -> None:
        if not keep:
            for worker in workers:
                self._kill(worker)
        self._idle = [worker for worker in workers if worker.process.is_alive()] + self._idle

    @staticmethod
    def _kill(worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join()
        worker.connection.close()

    def close(self) -> None:
        """End all workers. Called at the end of the session; the pool cannot be used afterwards."""
        for worker in self._idle:
            self._kill(worker)
        self._idle = []
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)

    # -- texts -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _stacks(workers: list[_Worker]) -> str:
        """Python stacks of all living workers, also of those that wait inside a C++ collective."""
        marks = []
        for worker in workers:
            marks.append(worker.stack_path.stat().st_size if worker.stack_path.exists() else 0)
            if worker.process.is_alive() and worker.process.pid is not None:
                os.kill(worker.process.pid, DUMP_SIGNAL)
        time.sleep(0.3)  # the handler writes at once; the wait is for a loaded machine
        parts = []
        for rank, (worker, mark) in enumerate(zip(workers, marks, strict=True)):
            text = worker.stack_path.read_text(errors="replace")[mark:] if worker.stack_path.exists() else ""
            parts.append(f"--- stack of rank {rank} ---\n{text or '(no stack: the process is gone)'}")
        return "\n".join(parts)

    def _hang_text(self, workers: list[_Worker], reports: dict[int, Report], timeout: float) -> str:
        waiting = sorted(set(range(len(workers))) - set(reports))
        text = f"no word from ranks {waiting} within {timeout:g} s"
        failed = sorted((r for r in reports.values() if r.error is not None), key=lambda r: r.failed_at)
        if failed:
            text = (
                f"rank {failed[0].rank} failed and ranks {waiting} did not end within {_GRACE_AFTER_FAILURE_S:g} s\n"
                f"--- rank {failed[0].rank} ---\n{failed[0].error_text}"
            )
        return f"{text}\n{self._stacks(workers)}"

    @staticmethod
    def _death_text(workers: list[_Worker], rank: int, reports: dict[int, Report]) -> str:
        worker = workers[rank]
        stack = worker.stack_path.read_text(errors="replace") if worker.stack_path.exists() else ""
        errors = "".join(f"\n--- rank {r} ---\n{report.error_text}" for r, report in reports.items() if report.error)
        return f"rank {rank} {worker.describe_exit()}\n{worker.last_words()}\n{stack}{errors}"


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"cannot send {function!r} to the workers: it must be a function at module level and its arguments must "
            f"pickle ({error})"
        ) from error


def _outcome(report: Report) -> Outcome:
    value = None if report.value is None else pickle.loads(report.value)
    error = None if report.error is None else pickle.loads(report.error)
    return Outcome(report.rank, value, error, report.error_text, report.output, report.seconds)


def _failure_text(outcomes: list[Outcome], first: Outcome) -> str:
    parts = [f"\nrank {first.rank} of {len(outcomes)} failed first\n{first.traceback}"]
    others = [o for o in outcomes if o.error is not None and o is not first]
    parts += [f"then rank {o.rank}: {type(o.error).__name__}: {o.error}" for o in others]
    parts += [f"--- output of rank {o.rank} ---\n{o.output}" for o in outcomes if o.output]
    return "\n".join(parts)


class _Body:
    """The function under an `on_ranks` test, sent by the name of the test that hides it."""

    def __init__(self, module: str, qualname: str) -> None:
        self._module, self._qualname = module, qualname

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        holder: Any = sys.modules.get(self._module) or __import__(self._module, fromlist=["*"])
        for name in self._qualname.split("."):
            holder = getattr(holder, name)
        return holder.__wrapped__(*args, **kwargs)


def on_ranks(
    *world_sizes: int, timeout: float = DEFAULT_TIMEOUT_S, create_group: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a module-level test function inside each rank of a fresh group, once per world size.

        @on_ranks(1, 2)
        def test_all_reduce(tmp_path):     # fixtures and parameters are sent to the ranks, so they must pickle
            ...
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., None]:
        body = _Body(function.__module__, function.__qualname__)

        @functools.wraps(function)
        def test(pool: WorkerPool, world_size: int, **kwargs: Any) -> None:
            pool.run(world_size, body, timeout=timeout, create_group=create_group, **kwargs)

        own = inspect.signature(function).parameters.values()
        extra = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("pool", "world_size")
        ]
        test.__signature__ = inspect.Signature([*extra, *own])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return wrap
