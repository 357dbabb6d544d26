"""The pool itself: values, first error, hangs, deaths, leaks, speed."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.harness.pool import LeakError, RemoteTraceback, WorkerDied, WorkerHung, WorkerPool, on_ranks


def _sum_of_ranks(offset: float) -> list[float]:
    tensor = torch.full((2,), offset + dist.get_rank())
    dist.all_reduce(tensor)
    return tensor.tolist()


def _fail_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        broken = 7
        raise KeyError(f"value {broken}")
    dist.barrier()


def _hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def _die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _leak(kind: str) -> None:
    if kind == "environment":
        os.environ["LEAKED_BY_TEST"] = "1"
    elif kind == "thread":
        threading.Thread(target=time.sleep, args=(30,), daemon=True, name="left-over").start()
    elif kind == "dtype":
        torch.set_default_dtype(torch.float64)
    elif kind == "patch":
        torch.empty = lambda *args, **kwargs: None
    elif kind == "files":
        _leak.held = [open(os.devnull) for _ in range(20)]  # noqa: SIM115
    elif kind == "hook":
        torch.nn.modules.module.register_module_forward_hook(lambda *args: None)


def _warn() -> None:
    warnings.warn("careless", UserWarning, stacklevel=1)


def _pid() -> int:
    return os.getpid()


def test_returns_values_in_rank_order(pool: WorkerPool) -> None:
    assert pool.run(3, _sum_of_ranks, 1.0) == [[6.0, 6.0]] * 3


def test_workers_are_reused(pool: WorkerPool) -> None:
    assert pool.run(2, _pid) == pool.run(2, _pid)


def test_first_error_is_raised_with_rank_and_remote_traceback(pool: WorkerPool) -> None:
    with pytest.raises(KeyError, match="value 7") as caught:
        pool.run(2, _fail_on_last_rank)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "rank 1 of 2 failed first" in str(cause)
    assert "_fail_on_last_rank" in str(cause)


def test_outcomes_of_all_ranks(pool: WorkerPool) -> None:
    first, second = pool.outcomes(2, _fail_alone)
    assert first.error is None
    assert first.value == 0
    assert isinstance(second.error, KeyError)


def _fail_alone() -> int:
    if dist.get_rank() == 1:
        raise KeyError("one")
    return 0


def test_hang_shows_the_stacks_of_all_ranks(pool: WorkerPool) -> None:
    pool.run(2, _pid)  # the limit is for the work, not for starting workers on a busy machine
    with pytest.raises(WorkerHung, match="no word from ranks") as caught:
        pool.run(2, _hang_on_rank_1, timeout=3.0)
    text = str(caught.value)
    assert "stack of rank 0" in text
    assert "barrier" in text
    assert "_hang_on_rank_1" in text
    assert pool.run(2, _sum_of_ranks, 0.0) == [[1.0, 1.0]] * 2


def test_dead_worker_is_named_and_replaced(pool: WorkerPool) -> None:
    with pytest.raises(WorkerDied, match="rank 1 was killed by SIGKILL"):
        pool.run(2, _die_on_rank_1)
    assert pool.run(2, _sum_of_ranks, 0.0) == [[1.0, 1.0]] * 2


def test_a_worker_that_dies_while_idle_is_replaced(pool: WorkerPool) -> None:
    (pid,) = pool.run(1, _pid)
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)  # for the system to take it away
    (other,) = pool.run(1, _pid)
    assert other != pid


@pytest.mark.parametrize(
    ("kind", "text"),
    (
        ("environment", "LEAKED_BY_TEST"),
        ("thread", "left-over"),
        ("dtype", "default dtype"),
        ("patch", "torch.empty is still patched"),
        ("files", "open files grew"),
        ("hook", "_global_forward_hooks grew"),
    ),
)
def test_leaks_fail_the_test_and_the_worker_is_replaced(pool: WorkerPool, kind: str, text: str) -> None:
    with pytest.raises(LeakError, match=text):
        pool.run(1, _leak, kind)
    assert pool.run(1, _sum_of_ranks, 0.5) == [[0.5, 0.5]]


def test_warnings_are_errors_inside_workers(pool: WorkerPool) -> None:
    with pytest.raises(UserWarning, match="careless"):
        pool.run(1, _warn)


def test_local_functions_are_refused_with_the_reason(pool: WorkerPool) -> None:
    with pytest.raises(TypeError, match="module level"):
        pool.run(1, lambda: None)


@on_ranks(1, 2)
def test_body_runs_inside_the_ranks(tmp_path) -> None:
    assert dist.is_initialized()
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    (tmp_path / f"rank{dist.get_rank()}").write_text("here")


@pytest.mark.world(3)
def test_world_marker(ranks) -> None:
    assert ranks(_sum_of_ranks, 0.0) == [[3.0, 3.0]] * 3


def test_two_rank_test_takes_milliseconds(pool: WorkerPool) -> None:
    pool.run(2, _sum_of_ranks, 0.0)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        pool.run(2, _sum_of_ranks, 0.0)
        times.append(time.perf_counter() - started)
    # About 0.03 s on an idle machine; the bound only says that nothing is spawned per test, which costs seconds.
    assert min(times) < 0.5
