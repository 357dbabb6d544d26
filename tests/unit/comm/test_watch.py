"""The watch's protocol with several ranks in one process, and the wording of its answers."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed.comm import activity, stream_waits
from deepspeed.comm.errors import CollectiveError
from deepspeed.comm.watch import Report, Watch, _build_error


@pytest.fixture
def watches(request: pytest.FixtureRequest) -> Any:
    size = request.param
    store = dist.HashStore()
    made = [Watch(store, rank, size) for rank in range(size)]
    yield made
    for watch in made:
        watch.stop()


@pytest.mark.parametrize("watches", (4,), indirect=True)
def test_all_ranks_get_the_report_of_the_first_failure(watches: list[Watch]) -> None:
    report = watches[2].tell_failure("failed in all_gather: out of time")
    assert report is not None
    assert report.rank == 2
    assert sum(line.count("test_watch.py") for line in report.lines) == 1  # three ranks at one place: one line
    assert report.lines[0].startswith("ranks 0-1, 3: is at ")
    end = time.monotonic() + 5
    others = (watches[0], watches[1], watches[3])
    while not all(watch.asked and watch.report for watch in others) and time.monotonic() < end:
        time.sleep(0.01)
    assert [watch.report for watch in others] == [report] * 3
    assert not watches[2].asked  # it raises its own error, not that of another rank


@pytest.mark.parametrize("watches", (3,), indirect=True)
def test_ranks_that_fail_together_share_one_report(watches: list[Watch]) -> None:
    reports: list[Any] = [None, None]
    threads = [
        threading.Thread(target=lambda i=i: reports.__setitem__(i, watches[i].tell_failure(f"failed, rank {i}")))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reports[0] == reports[1]
    other = 1 - reports[0].rank
    assert f"rank {other}: failed, rank {other}" in reports[0].lines


def test_a_rank_that_left_and_one_that_is_silent_are_told_apart() -> None:
    store = dist.HashStore()
    first, second = Watch(store, 0, 3), Watch(store, 1, 3)
    second.stop("its program ended with ValueError: bad batch")
    report = first.tell_failure("failed")
    first.stop()
    assert report is not None
    assert report.lines == (
        "rank 1: its program ended with ValueError: bad batch",
        f"rank 2: {activity.NO_ANSWER}",
    )


def test_ten_thousand_ranks_fit_in_a_few_lines() -> None:
    answers = dict.fromkeys(range(10_000), "waits in all_gather (call 7 of the default group, 10000 ranks)")
    answers[4711] = "is at train.py:31 (load)"
    del answers[17]
    lines = activity.summarise(answers, missing=[17])
    assert lines == [
        f"rank 17: {activity.NO_ANSWER}",
        "rank 4711: is at train.py:31 (load)",
        "ranks 0-16, 18-4710, 4712-9999: waits in all_gather (call 7 of the default group, 10000 ranks)",
    ]
    scattered = activity.summarise({rank: f"is at line {rank}" for rank in range(10_000)})
    assert len(scattered) == activity.MAX_LINES + 1
    assert scattered[-1] == f"{10_000 - activity.MAX_LINES} more ranks in {10_000 - activity.MAX_LINES} other places"


def test_place_of_the_main_thread_is_the_users_line() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: (time.sleep(0.1), found.append(activity.main_thread_place())))
    thread.start()
    event = threading.Event()
    event.wait(0.5)  # the innermost frame is inside the standard library
    thread.join()
    assert "test_watch.py" in found[0]
    assert "(test_place_of_the_main_thread_is_the_users_line), inside wait (threading.py)" in found[0]


class Work:
    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done


def test_device_collectives_count_as_stuck_only_near_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(stream_waits.time, "monotonic", lambda: now[0])
    first, second = Work(), Work()
    calls: Any = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    stream_waits.note(calls[0], first, limit_s=100.0)
    now[0] += 50
    stream_waits.note(calls[1], second, limit_s=100.0)
    now[0] += 10
    assert stream_waits.find_stuck() is None  # somebody still starts collectives: nobody asks
    now[0] += 31
    assert stream_waits.find_stuck() is calls[0]
    first.done = True
    assert stream_waits.find_stuck() is None  # the second has run for 41 of 100 seconds
    now[0] += 60
    assert stream_waits.find_stuck() is calls[1]
    stream_waits.forget()
    assert stream_waits.find_stuck() is None


def test_a_report_of_long_ago_is_dated() -> None:
    """A program that caught the first error and went on must not read it as news of the call that fails now."""
    facts = SimpleNamespace(name="default", size=2, rank=0)
    waiter = SimpleNamespace(
        name="all_reduce", nbytes=4, sequence=1644, facts=facts, describe_what=lambda: "", describe_advice=lambda: ""
    )
    lines = ("rank 1: failed in reduce_scatter (call 901)",)
    fresh = str(_build_error(waiter, 0, "given up", Report(1, "failed in reduce_scatter (call 901)", lines)))
    assert "were doing:" in fresh
    assert " ago" not in fresh
    old = Report(1, "failed in reduce_scatter (call 901)", lines, at=time.monotonic() - 60)
    text = str(_build_error(waiter, 0, "given up", old))
    assert "were doing at the failure 60 s ago:" in text
    assert "rank 1, which reported first 60 s ago: failed in reduce_scatter (call 901)" in text


def test_the_error_keeps_its_facts_across_processes() -> None:
    import pickle

    error = CollectiveError("text", rank=3, collective="barrier", what="the end", others="rank 0: gone")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.collective, copy.what, copy.others) == (
        "text",
        3,
        "barrier",
        "the end",
        "rank 0: gone",
    )
