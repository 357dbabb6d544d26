"""Nothing waits for ever: what every rank is told when a collective cannot finish."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm import activity, collectives, watch
from tests.harness.programs import run_programs

LIMIT_S = 2.0


def start() -> int:
    """A group with a short limit; the group the pool has made brings the ranks together first."""
    dist.barrier()
    dist.destroy_process_group()
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=LIMIT_S))
    return dist.get_rank()


def caught(call: Any) -> str:
    try:
        call()
    except dist.CollectiveError as error:
        return str(error) if error.rank == dist.get_rank() else f"says it comes from rank {error.rank}"
    return "no error"


def different_collectives() -> str:
    rank = start()
    collectives.all_reduce(torch.ones(4), None)
    if rank == 0:
        full = torch.empty(16)
        return caught(
            lambda: collectives.all_gather(
                full, torch.ones(8), None, what="parameter 'layers.3.weight'\nUse equal steps."
            )
        )
    return caught(dist.barrier)


def test_ranks_in_different_collectives_each_learn_where_the_other_is(pool: Any) -> None:
    gatherer, waiter = pool.run(2, different_collectives)
    assert gatherer.startswith(
        "rank 0: all_gather (call 2 of the default group, 2 ranks, 64 B) of parameter 'layers.3.weight'"
    )
    assert "barrier (call 2 of the default group, 2 ranks), called at " in gatherer
    assert "test_watch.py" in gatherer
    assert gatherer.endswith("Use equal steps.")
    assert waiter.startswith("rank 1: barrier (call 2 of the default group, 2 ranks)")
    assert "all_gather (call 2 of the default group, 2 ranks, 64 B) of parameter 'layers.3.weight'" in waiter
    assert "init_distributed(timeout=...)" in waiter


def diverge(name: str) -> tuple[float, str]:
    rank = start()
    dist.barrier()
    begin = time.monotonic()
    numel = 8 if rank == 0 else 12
    calls: dict[str, Any] = {
        "sizes": lambda: collectives.all_reduce(torch.ones(numel), None),
        "kinds": lambda: (
            collectives.reduce_scatter(torch.empty(4), torch.ones(8), None, average=True)
            if rank == 0
            else collectives.all_gather(torch.empty(8), torch.ones(4), None)
        ),
        "keys": lambda: collectives.all_gather(torch.empty(8), torch.ones(4), None, key=rank),
        "sources": lambda: dist.broadcast(torch.ones(4), src=rank),
    }
    text = caught(calls[name])
    return time.monotonic() - begin, text


@pytest.mark.parametrize("name", ("sizes", "kinds", "keys", "sources"))
def test_ranks_that_diverge_are_told_at_once_and_no_data_is_mixed(pool: Any, name: str) -> None:
    for rank, (seconds, text) in enumerate(pool.run(2, diverge, name)):
        assert f"rank {1 - rank} has started " in text
        assert seconds < LIMIT_S  # nobody waited for the limit


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.02)


def one_rank_is_elsewhere(done: str) -> str:
    rank = start()
    if rank == 0:
        text = caught(dist.barrier)
        Path(done).touch()
        return text
    while not Path(done).exists():  # here, as the other rank is told
        time.sleep(0.02)
    return caught(lambda: dist.all_reduce(torch.ones(2)))


def test_a_rank_that_never_comes_is_found_at_its_line(pool: Any, tmp_path: Path) -> None:
    waiter, late = pool.run(2, one_rank_is_elsewhere, str(tmp_path / "done"))
    assert f"not finished within the limit of {LIMIT_S:g} s" in waiter
    assert "rank 1: is at " in waiter
    assert "(one_rank_is_elsewhere)" in waiter
    assert late.startswith("rank 1: all_reduce")


def third_rank_in_another_group(done: str) -> str:
    rank = start()
    pair, others = dist.new_group([0, 1]), dist.new_group([1, 2])
    if rank == 0:
        return caught(lambda: collectives.barrier(pair))
    if rank == 1:
        wait_for(done)
        return ""
    time.sleep(LIMIT_S - 0.5)  # its own limit passes long after rank 0's
    begin = time.monotonic()
    text = caught(lambda: collectives.all_reduce(torch.ones(1), others, what="the norm"))
    Path(done).touch()
    return f"{time.monotonic() - begin < LIMIT_S} {text}"


def test_one_failure_ends_the_waits_of_ranks_outside_its_group(pool: Any, tmp_path: Path) -> None:
    first, _, third = pool.run(3, third_rank_in_another_group, str(tmp_path / "done"))
    assert first.startswith("rank 0: barrier (call 1 of group '")
    assert "rank 2: waits in all_reduce" in first
    assert third.startswith("True rank 2: all_reduce")
    assert "given up, because rank 0 has reported a failure" in third
    assert "rank 0, which reported first: failed in barrier" in third


def group_that_one_rank_does_not_make(done: str) -> str:
    rank = start()
    if rank == 0:
        text = caught(lambda: dist.new_group([0, 1]))
        Path(done).touch()
        return text
    while not Path(done).exists():
        time.sleep(0.02)
    return ""


def test_making_a_group_is_bounded_too(pool: Any, tmp_path: Path) -> None:
    text = pool.run(2, group_that_one_rank_does_not_make, str(tmp_path / "done"))[0]
    assert text.startswith("rank 0: new_group (the default group, 2 ranks) of ranks 0-1: not finished within the limit")
    assert "(group_that_one_rank_does_not_make)" in text


def interrupted_by_signal(done: str) -> tuple[str, float]:
    rank = start()
    if rank == 0:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        begin = time.monotonic()
        try:
            dist.barrier()
        except KeyboardInterrupt:
            return "interrupted", time.monotonic() - begin
        finally:
            Path(done).touch()
            timer.join()
            signal.signal(signal.SIGINT, before)
    else:
        wait_for(done)
        return caught(dist.barrier)[:6], 0.0
    return "finished", 0.0


def test_ctrl_c_ends_a_wait_at_once(pool: Any, tmp_path: Path) -> None:
    (word, seconds), _ = pool.run(2, interrupted_by_signal, str(tmp_path / "done"))
    assert word == "interrupted"
    assert seconds < LIMIT_S


def threads_after_destroy() -> tuple[bool, bool]:
    start()
    dist.barrier()
    running = any(thread.name == "deepspeed-comm-watch" for thread in threading.enumerate())
    dist.barrier()
    dist.destroy_process_group()
    return running, any(thread.name == "deepspeed-comm-watch" for thread in threading.enumerate())


def test_the_watch_lives_as_long_as_the_group(pool: Any) -> None:
    assert pool.run(2, threads_after_destroy) == [(True, False)] * 2


def destroyed_by_torch() -> bool:
    start()
    dist.barrier()
    torch.distributed.destroy_process_group()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if not any(thread.name == "deepspeed-comm-watch" for thread in threading.enumerate()):
            return True
        time.sleep(0.02)
    return False


def test_the_watch_ends_when_torch_destroys_the_group(pool: Any) -> None:
    assert pool.run(2, destroyed_by_torch) == [True] * 2


def ends_after_a_collective_of_torch(done: str) -> str:
    """Rank 1's program ends as it does when torch's own call has timed out there; rank 0 is in a call of ours."""
    rank = start()
    dist.barrier()  # brings the watch up
    if rank == 0:
        time.sleep(1.2)  # more than two looks of rank 1's watch
        torch.distributed.barrier()
        text = caught(dist.barrier)
        Path(done).touch()
        return text
    torch.distributed.barrier()
    watch._say_goodbye()
    wait_for(done)
    return "ended"


def test_a_rank_that_ended_in_a_collective_of_torch_is_placed_there(pool: Any, tmp_path: Path) -> None:
    told, _ = pool.run(2, ends_after_a_collective_of_torch, str(tmp_path / "done"))
    assert "rank 1: its program has ended; shortly before, it was in torch.distributed.barrier, called at " in told
    assert "(ends_after_a_collective_of_torch)" in told


def looks_at_own_calls() -> str | None:
    """A collective of ours is in torch's too on the way to a backend; it has its own trace."""
    seen: list[str | None] = []
    rank = start()
    dist.barrier()
    if rank == 0:
        time.sleep(0.5)
    else:
        threading.Timer(0.25, lambda: seen.append(activity.torch_collective_place())).start()
    dist.barrier()
    return seen[0] if rank else None


def test_collectives_of_ours_are_not_taken_for_those_of_torch(pool: Any) -> None:
    assert pool.run(2, looks_at_own_calls) == [None, None]


SCRIPT = """
import sys
from datetime import timedelta
import deepspeed
from deepspeed import comm as dist
deepspeed.init_distributed("gloo", timeout=timedelta(seconds=30))
if dist.get_rank() == 1:
    raise ValueError("batch 7 is empty")
try:
    dist.barrier()
except dist.CollectiveError as error:
    print(error)
"""


def test_a_rank_that_died_of_an_exception_is_quoted(pool: Any) -> None:
    first, died = run_programs(pool, SCRIPT, ranks=2)
    assert "rank 1: its program ended with ValueError: batch 7 is empty" in first.output
    assert "another rank closed its connection" in first.output
    assert died.errors.rstrip().endswith("ValueError: batch 7 is empty")
    assert (first.code, died.code) == (0, 1)
