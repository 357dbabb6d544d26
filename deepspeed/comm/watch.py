"""The watch: when one rank's collective fails, every rank learns it within seconds and says what all were doing.

Owns: one daemon thread per process and default group, and the protocol it speaks through the group's store.
Does not own: the waits (`pending.py`) and the wording of an activity (`activity.py`).
Invariant: only the thread touches the store, so a stuck store can delay a diagnosis and never the training.

Protocol, keys below `deepspeed/watch`:
  first      counter; the rank that makes it 1 collects the answers
  ask        set by that rank; every thread looks for it each `_poll_s` and then
  status/R   publishes what its rank was doing, and makes waits under way on its rank end (`aborted`)
  report     the collected answers, read by all
  read       counter of the ranks that have read it: the collector may be the host of the store and stays until then
  left/R     written when rank R destroys its groups or its program ends
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

from deepspeed.comm import activity, stream_waits
from deepspeed.comm.activity import Waiter
from deepspeed.comm.errors import CollectiveError
from deepspeed.comm.ledger import Ledger, Page, open_ledger
from deepspeed.utils.logging import logger

_PREFIX = "deepspeed/watch"
_POLL_S = 0.5
# One store answers all ranks: above this many requests a second we look less often.
_MAX_REQUESTS_PER_S = 4000
_COLLECT_S = 2.0
_STORE_TIMEOUT_S = 10.0
# A report older than this was not made for the call that fails now: the program caught the first error and went on.
_FRESH_S = 10.0

_ADVICE = (
    "All ranks of a group must start the same collectives in the same order. Usual causes: a branch, an early exit or "
    "a different number of steps on some ranks; a rank that failed first (its own message is the one to read). If the "
    "ranks are only slow, raise the limit: init_distributed(timeout=...) or DEEPSPEED_TIMEOUT (minutes)."
)


@dataclass(frozen=True)
class Report:
    """What the collecting rank found out. ``at``: when it came to be known here (monotonic seconds)."""

    rank: int
    headline: str
    lines: tuple[str, ...]
    at: float = field(default_factory=time.monotonic, compare=False)

    @property
    def age(self) -> str:
        """`` 40 s ago`` for a report that is about an earlier call; empty for a fresh one."""
        seconds = time.monotonic() - self.at
        return f" {seconds:.0f} s ago" if seconds > _FRESH_S else ""


class Watch:
    """The watch thread of one default process group."""

    def __init__(
        self, store: Any, rank: int, size: int, *, hosted_by_rank_0: bool = False, ledger: Ledger | None = None
    ) -> None:
        self.rank = rank
        self.ledger = ledger
        self.size = size
        self.report: Report | None = None
        self.asked = False  # some rank has failed: waits under way are given up
        self.store_lost = False
        self._hosted_by_rank_0 = hosted_by_rank_0
        self._store = store
        self._poll_s = max(_POLL_S, size / _MAX_REQUESTS_PER_S)
        self._answered = 0
        self._failed: str | None = None  # own failure, handed over by the thread that met it
        self._torch_call: tuple[float, str] | None = None  # when (monotonic s) and where one was last seen under way
        self._wake = threading.Event()
        self._stopping = False
        self._leave_reason: str | None = None
        self._reported = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deepspeed-comm-watch", daemon=True)
        self._thread.start()

    def stop(self, reason: str | None = None) -> None:
        """End the thread; `reason` is told to ranks that ask later. Idempotent, returns within seconds."""
        self.signal_stop(reason)
        if threading.current_thread() is not self._thread:
            self._thread.join(_COLLECT_S)

    def signal_stop(self, reason: str | None = None) -> None:
        """Ask the thread to end without waiting for it."""
        self._leave_reason = reason
        self._stopping = True
        self._wake.set()

    def tell_failure(self, own: str) -> Report | None:
        """Make the failure of this rank known; returns what is known about the others, or None."""
        if self._failed is None:
            self._failed = own
        self._wake.set()
        self._reported.wait(_COLLECT_S + 2 * self._poll_s + 2.0)
        return self.report

    def host_is_gone(self) -> bool:
        """Whether the process of rank 0 has ended, as far as this rank can see."""
        return self.store_lost and self._hosted_by_rank_0 and self.rank != 0

    def last_torch_call(self) -> str:
        """A clause about a collective of torch itself that was under way just now; empty where there was none.

        Its limit is often the same as ours: the rank in it then gives up first, and the others would only read that
        a program has ended.
        """
        if self._torch_call is None or time.monotonic() - self._torch_call[0] > _FRESH_S:
            return ""
        return f"; shortly before, it was in {self._torch_call[1]}"

    # The rest runs in the thread.

    def _look_for_torch_call(self) -> None:
        place = activity.torch_collective_place()
        if place is not None:
            self._torch_call = (time.monotonic(), place)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait(self._poll_s)
                self._wake.clear()
                if self._stopping:
                    break
                self._look_for_torch_call()
                if self.ledger is not None:
                    self.ledger.unlink_when_shared(_local_size(self.size))
                if self._reported.is_set():
                    continue
                stuck = stream_waits.find_stuck() if self._failed is None else None
                if stuck is not None:
                    self._failed = f"has waited too long for {activity.describe_call(stuck)} on its device"
                if self._failed is not None or self._check("ask"):
                    self._answer()
                if stuck is not None:
                    # No thread of the program can raise this: the device waits, and the backend will end the process.
                    logger.error(str(_build_error(stuck, self.rank, "stuck on the device", self.report)))
            if self._leave_reason is not None:
                self._set(f"left/{self.rank}", self._leave_reason)
        except RuntimeError:  # torch's store errors: the host of the store has gone
            self.store_lost = True
        finally:
            self._reported.set()
            self._store = None
            if self._stopping and self.ledger is not None:
                self.ledger.close()

    def _answer(self) -> None:
        own = self._failed if self._failed is not None else activity.own_activity()
        self._set(f"status/{self.rank}", own)
        is_first = self._failed is not None and self._store.add(f"{_PREFIX}/first", 1) == 1
        if is_first:
            self._set("ask", str(self.rank))
            self.report = self._collect(own)
            self._set("report", json.dumps([self.rank, own, list(self.report.lines)]))
            self._reported.set()
            self._stay_until_read()
            return
        self.asked = True
        deadline = time.monotonic() + _COLLECT_S + 2 * self._poll_s + 1.0
        while not self._check("report") and time.monotonic() < deadline and not self._stopping:
            time.sleep(0.02)
        if self._check("report"):
            rank, headline, lines = json.loads(self._get("report"))
            self.report = Report(rank, headline, tuple(lines))
            self._store.add(f"{_PREFIX}/read", 1)
        self._reported.set()

    def _collect(self, own: str) -> Report:
        answers: dict[int, str] = {}
        missing = [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + _COLLECT_S + self._poll_s
        while missing and time.monotonic() < deadline and not self._stopping:
            still_missing = []
            for rank in missing:
                if self._check(f"status/{rank}"):
                    answers[rank] = self._get(f"status/{rank}")
                    self._answered += 1
                elif self._check(f"left/{rank}"):
                    answers[rank] = self._get(f"left/{rank}")
                else:
                    still_missing.append(rank)
            missing = still_missing
            time.sleep(0.02)
        return Report(self.rank, own, tuple(activity.summarise(answers, missing)))

    def _stay_until_read(self) -> None:
        deadline = time.monotonic() + 1.0 + self._poll_s
        while time.monotonic() < deadline and self._store.add(f"{_PREFIX}/read", 0) < self._answered:
            time.sleep(0.02)

    def _check(self, key: str) -> bool:
        return bool(self._store.check([f"{_PREFIX}/{key}"]))

    def _get(self, key: str) -> str:
        return self._store.get(f"{_PREFIX}/{key}").decode(errors="replace")

    def _set(self, key: str, value: str) -> None:
        self._store.set(f"{_PREFIX}/{key}", value)


_watch: Watch | None = None
_watched_group: weakref.ref[Any] | None = None
_lock = threading.Lock()
# Set by `init.py`: the store of the default group lives in the process of rank 0.
rank_0_hosts_store = False


def ensure_started() -> None:
    """Start the watch of the current default group unless it runs already."""
    global _watch, _watched_group
    world = torch_dist.group.WORLD
    if world is None or (_watched_group is not None and _watched_group() is world):
        return
    with _lock:
        if _watched_group is not None and _watched_group() is world:
            return
        if _watch is not None:
            _watch.signal_stop()
        store = private_store(_STORE_TIMEOUT_S)
        if store is None:
            return
        rank, size = world.rank(), world.size()
        ledger = open_ledger(store, rank, size)
        _watch = Watch(store, rank, size, hosted_by_rank_0=rank_0_hosts_store, ledger=ledger)
        _watched_group = weakref.ref(world)
        # Users may destroy their groups through torch itself: the thread must not outlive them.
        weakref.finalize(world, _watch.signal_stop)
        atexit.unregister(_say_goodbye)
        atexit.register(_say_goodbye)


def stop(reason: str | None = None) -> None:
    """End the watch of the default group. Called by `destroy_process_group`."""
    global _watch, _watched_group
    with _lock:
        if _watch is not None:
            _watch.stop(reason)
        _watch = None
        _watched_group = None
    stream_waits.forget()


def ledger_page(group: Any, name: str, ranks: Sequence[int], position: int) -> Page | None:
    """This rank's ledger page of a group; None where there is no ledger."""
    if _watch is None or _watch.ledger is None:
        return None
    return _watch.ledger.page(group, name, ranks, position)


def aborted(includes_rank_0: Callable[[], bool]) -> bool:
    """Whether a wait should be given up: a rank has failed, or rank 0 has ended and takes part in the wait."""
    if _watch is None:
        return False
    return _watch.asked or (_watch.host_is_gone() and includes_rank_0())


def failure(waiter: Waiter, cause: BaseException | None, limit_s: float) -> CollectiveError:
    """The error to raise for a wait that failed (`cause`) or was given up (None). Tells the other ranks."""
    reason = _reason(cause, limit_s)
    if _watch is None or waiter.facts.size == 1:  # nobody waits for a group of one
        return _build_error(waiter, waiter.facts.rank, reason, None)
    call = activity.describe_call(waiter)
    own = f"failed in {call}, called at {activity.main_thread_place()}: {reason}"
    report = _watch.tell_failure(own[: activity.MAX_TEXT])
    if cause is None:
        first = "another rank" if report is None else f"rank {report.rank}"
        age = report.age if report is not None else ""
        reason = f"given up, because {first} has reported a failure{age}"
        if age:
            reason += "; after a failed collective the ranks are not known to be in step: begin a new process group"
        if report is None and _watch.host_is_gone():
            reason = "given up, because the process of rank 0 has ended"
    return _build_error(waiter, _watch.rank, reason, report)


def _build_error(waiter: Waiter, rank: int, reason: str, report: Report | None) -> CollectiveError:
    others: list[str] = []
    if waiter.facts.size == 1:
        others.append("no other rank is in this group")
    elif report is None:
        others.append("unknown: " + _why_unknown())
    else:
        if report.rank != rank:
            others.append(f"rank {report.rank}, which reported first{report.age}: {report.headline}")
        others += [line for line in report.lines if not line.startswith(f"rank {rank}: ")]
    text = f"rank {rank}: {activity.describe_call(waiter)}: {reason}.\nWhat the other ranks were doing:\n"
    if report is not None and report.age:
        text = text.replace("were doing:", f"were doing at the failure{report.age}:")
    text += "\n".join(f"  {line}" for line in others)
    text += "\n" + (activity.advice_of(waiter) or _ADVICE)
    return CollectiveError(
        text, rank=rank, collective=waiter.name, what=waiter.describe_what(), others="\n".join(others)
    )


def _reason(cause: BaseException | None, limit_s: float) -> str:
    if cause is None:
        return "given up"
    text = str(cause).strip()
    if text.startswith("[") and "]" in text:  # gloo puts its own source file first
        text = text.split("]", 1)[1].strip()
    text = text.split("\n", 1)[0].split(". ", 1)[0].rstrip(".")  # the rest is general advice
    if "timed out" in text.lower() or "timeout" in text.lower():
        return f"not finished within the limit of {limit_s:g} s ({text})"
    if "closed" in text.lower() or "reset" in text.lower():
        return f"another rank closed its connection: it has ended or given up ({text})"
    return text or type(cause).__name__


def _why_unknown() -> str:
    if _watch is None:
        return "no watch is running for the default process group"
    if _watch.store_lost:
        return "the store of the job does not answer; rank 0, which usually holds it, has probably ended"
    return "nobody answered in time"


def private_store(timeout_s: float) -> Any | None:
    """The store of the default group through a connection of our own, or None where no process could answer."""
    store = torch_dist.distributed_c10d._get_default_store()
    if torch_dist.get_backend() == "fake":
        return None
    base = store
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    # A file store counts its copies and deletes the file with the last one: share it. It has no blocking connection.
    if isinstance(base, torch_dist.TCPStore) and hasattr(store, "clone"):
        store = store.clone()
        with contextlib.suppress(RuntimeError):
            store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _local_size(world_size: int) -> int:
    """Ranks on this machine, as the launcher says; without a word from it, all."""
    text = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ""
    return int(text) if text.isdigit() else world_size


def _say_goodbye() -> None:
    if _watch is None:
        return
    error = getattr(sys, "last_value", None)
    if error is None:
        reason = "its program has ended"
    else:
        reason = f"its program ended with {type(error).__name__}: {error}"[: activity.MAX_TEXT]
    _watch.stop(reason + _watch.last_torch_call())
