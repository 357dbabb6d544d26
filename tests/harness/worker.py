"""One worker process of the pool: takes a task, runs its rank, reports, cleans up, says what leaked.

Owns: everything that happens inside the worker process: process group, environment, captured output, stacks.
Does not own: scheduling, timeouts, killing (`pool.py`).
Invariant: after `Cleanup` is sent the process is as fresh as before the task, or the lines in `Cleanup` say why not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tests.harness import leaks

DUMP_SIGNAL = signal.SIGUSR1
_MAX_REPR = 200


@dataclass(frozen=True)
class Task:
    """One rank's part of a test."""

    number: int
    rank: int
    world_size: int
    call: bytes  # pickled (function, args, kwargs)
    store_path: str
    master_port: int
    create_group: bool
    hold_group_on_error: bool
    timeout_s: float
    warning_filters: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What the function did. `value` and `error` are pickled; `error_text` is the remote traceback."""

    number: int
    rank: int
    value: bytes | None
    error: bytes | None
    error_text: str
    output: str
    failed_at: float  # time.monotonic(), comparable between processes of one machine; 0 when it did not fail
    seconds: float


@dataclass(frozen=True)
class Cleanup:
    """Sent when the worker is ready for the next task."""

    number: int
    leaked: tuple[str, ...]


FINISH = "finish"


def rank_environment(task: Task) -> dict[str, str]:
    """The variables torchrun would set for this rank."""
    return {
        "RANK": str(task.rank),
        "LOCAL_RANK": str(task.rank),
        "WORLD_SIZE": str(task.world_size),
        "LOCAL_WORLD_SIZE": str(task.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(task.master_port),
    }


def main(connection: Connection, log_path: str, stack_path: str, sys_path: Sequence[str]) -> None:
    """Entry point of the process; returns when the pool closes the connection."""
    sys.path[:] = list(sys_path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's to handle
    torch.set_num_threads(1)
    log = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack_file = open(stack_path, "w")  # noqa: SIM115 - faulthandler keeps the descriptor for the whole process
    faulthandler.enable(stack_file)
    faulthandler.register(DUMP_SIGNAL, stack_file, all_threads=True)
    gc.collect()
    gc.freeze()  # the imported libraries are never garbage; collecting after each test then costs almost nothing
    while True:
        try:
            task = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        _handle(connection, task, log)


def _handle(connection: Connection, task: Task, log: int) -> None:
    start_of_output = os.lseek(log, 0, os.SEEK_END)
    try:
        call: Any = pickle.loads(task.call)  # imports the test's module: before the snapshot, imports are not leaks
        load_error = None
    except Exception as error:
        call, load_error = None, error
    environment, excepthook = dict(os.environ), sys.excepthook
    os.environ.update(rank_environment(task))
    before = leaks.take_snapshot()
    report = _run(task, call, load_error, log, start_of_output)
    del call
    if report.error is not None and not task.hold_group_on_error:
        _close_groups()  # closes the sockets, so that ranks waiting for this one fail at once instead of timing out
    connection.send(report)
    assert connection.recv() == FINISH
    _close_groups()
    leaked = leaks.settle(before)
    _restore(environment)
    sys.excepthook = excepthook  # torch wraps it once more in every init_process_group
    connection.send(Cleanup(task.number, tuple(leaked)))


def _run(task: Task, call: Any, load_error: Exception | None, log: int, start_of_output: int) -> Report:
    value = error_bytes = None
    error_text, failed_at, started = "", 0.0, time.monotonic()
    try:
        if load_error is not None:
            raise load_error
        random.seed(0)
        torch.manual_seed(0)
        function, args, kwargs = call
        with _warnings_as_configured(task.warning_filters):
            if task.create_group:
                _create_group(task)
            value = pickle.dumps(function(*args, **kwargs))
        del function, args, kwargs
    except BaseException as error:
        failed_at = time.monotonic()
        error_text = _describe(error)
        error_bytes = _pickle_error(error)
        traceback.clear_frames(error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    output = os.pread(log, 1 << 20, start_of_output).decode(errors="replace")
    return Report(
        task.number, task.rank, value, error_bytes, error_text, output, failed_at, time.monotonic() - started
    )


def _create_group(task: Task) -> None:
    store = dist.FileStore(task.store_path, task.world_size)
    dist.init_process_group(
        "gloo", store=store, rank=task.rank, world_size=task.world_size, timeout=timedelta(seconds=task.timeout_s)
    )


def _close_groups() -> None:
    """Destroy all groups and the package's own record of them, whoever made them."""
    gc.collect()
    mesh = sys.modules.get("deepspeed.comm.mesh")
    if mesh is not None:
        mesh.set_current_mesh(None)
    watch = sys.modules.get("deepspeed.comm.watch")
    if watch is not None:
        watch.stop()  # ends its thread, which a destroyed group would only ask to end
    if dist.is_initialized():
        dist.destroy_process_group()


def _restore(environment: dict[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


@contextlib.contextmanager
def _warnings_as_configured(filters: Sequence[str]) -> Iterator[None]:
    """The pytest `filterwarnings` list ("action:message:category") for code that runs in this process."""
    with warnings.catch_warnings():
        for line in filters:
            action, _, rest = line.partition(":")
            message, _, category = rest.rpartition(":") if ":" in rest else (rest, "", "")
            warnings.filterwarnings(action, message=message, category=_category(category))  # type: ignore[arg-type]
        yield


def _category(name: str) -> type[Warning]:
    if not name:
        return Warning
    module, _, attribute = name.rpartition(".")
    holder = __import__(module or "builtins", fromlist=[attribute])
    return getattr(holder, attribute)


def _describe(error: BaseException) -> str:
    """Traceback text, with the local variables of the frame that failed an assertion (pytest cannot rewrite here)."""
    text = "".join(traceback.format_exception(error))
    last: TracebackType | None = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if isinstance(error, AssertionError) and last is not None:
        text += "locals of the failing frame:\n"
        for name, value in last.tb_frame.f_locals.items():
            shown = repr(value)
            text += f"    {name} = {shown if len(shown) <= _MAX_REPR else shown[:_MAX_REPR] + '...'}\n"
    return text


def _pickle_error(error: BaseException) -> bytes:
    """The exception itself where it survives a round trip, else a RuntimeError of the same text."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
