"""`Pending`: the handle of a collective under way, whose `wait` never waits for ever.

Owns: the bounded wait and the facts of the call that an error text needs. Does not own: starting collectives
(`collectives.py`, `comm.py`) and finding out what the other ranks do (`watch.py`).
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar, TypeAlias

from deepspeed.comm import stream_waits, watch
from deepspeed.comm.activity import waiting
from deepspeed.comm.group_facts import GroupFacts, facts_of

# What a collective is for, for error texts: a text, or a function giving one (called only when it is needed).
What: TypeAlias = str | Callable[[], str]

# How long `wait` sleeps in the backend before it looks whether another rank has failed, in seconds.
SLICE = timedelta(seconds=0.5)
# A wait that raises before this has not timed out: the backend refuses, or has failed.
EARLY_S = 0.8 * SLICE.total_seconds()
# Beyond the group's own limit, after which a backend that should have raised is not waited for any more.
GRACE_S = 5.0


# Called with each call whose result is in place; None while nobody listens (see `logging.py`).
observer: Callable[[Pending], None] | None = None


class WaitMode(enum.Enum):
    """How `Pending.wait` waits for the backend."""

    SLICES = enum.auto()  # blocks the thread; may be cut into slices (gloo collectives)
    PLAIN = enum.auto()  # blocks the thread; a cut would break the connection (gloo send and receive)
    STREAM = enum.auto()  # only the device stream waits (nccl and its kin)


class Pending:
    """A collective under way. `wait()` finishes it; waiting again is a no-op."""

    __slots__ = ("_finish", "_works", "facts", "mode", "name", "nbytes", "sequence", "started", "what")

    # Whether all ranks of the group take part, so that their counts of calls stay equal.
    counts: ClassVar[bool] = True

    def __init__(
        self,
        works: tuple[Any, ...],
        finish: Callable[[], object] | None,
        facts: GroupFacts,
        name: str,
        what: What,
        nbytes: int,
        mode: WaitMode,
    ) -> None:
        self._works: tuple[Any, ...] | None = works
        self._finish = finish
        self.facts = facts
        self.name = name
        self.what = what
        self.nbytes = nbytes
        self.mode = mode
        if works and self.counts:  # else a composition of calls that count, and are logged, themselves
            facts.calls += 1
        self.sequence = facts.calls
        self.started = time.perf_counter() if observer is not None and works else 0.0
        if mode is WaitMode.STREAM:
            for work in works:
                stream_waits.note(self, work, facts.timeout_s)

    def wait(self) -> None:
        """Block until the result is in place (on CUDA: until the current stream is made to wait for it).

        Raises:
            CollectiveError: the backend failed, the group's time limit passed, or another rank reported a failure.
        """
        works = self._works
        if works is None:
            return
        self._works = None
        finish, self._finish = self._finish, None
        if works:
            waiting.append(self)
            try:
                for work in works:
                    _wait_bounded(work, self)
            finally:
                waiting.remove(self)
        if finish is not None:
            finish()
        if observer is not None and self.started:
            observer(self)

    def is_completed(self) -> bool:
        """Whether `wait` would return without blocking for other ranks."""
        return self._works is None or all(work.is_completed() for work in self._works)

    def limit_s(self) -> float:
        """How long `wait` waits for the other ranks at most, without the grace of the backend."""
        return self.facts.timeout_s

    def describe_what(self) -> str:
        """The text of `what`."""
        return self.what if isinstance(self.what, str) else self.what()


class Divergence(RuntimeError):
    """Cause of an error: another rank has started another collective."""


def announce(facts: GroupFacts, name: str, what: What, nbytes: int, size: int) -> None:
    """Say which collective is about to start, in the ledger; raise if another rank has started a different one.

    Args:
        size: what has to be equal on all ranks beside the name (see `Page.mark`).
    """
    if facts.page is None:
        return
    if facts.announced > facts.calls:  # the last one has raised before it had a handle: where all do, they count it
        facts.calls = facts.announced
        facts.page.mark_failed(facts.calls)
    facts.announced = facts.calls + 1
    other = facts.page.mark(facts.announced, name, size)
    if other is not None:
        call = Pending((), None, facts, name, what, nbytes, WaitMode.PLAIN)
        call.sequence = facts.calls + 1
        raise watch.failure(call, Divergence(other), facts.timeout_s)


@contextlib.contextmanager
def blocking(name: str, what: What) -> Iterator[None]:
    """Around a call of torch that waits for other ranks by itself: they are told of it, and its failure is explained.

    Raises:
        CollectiveError: the call raised a RuntimeError, as torch does when its time limit passes.
    """
    facts = facts_of(None)
    call = Pending((), None, facts, name, what, 0, WaitMode.PLAIN)
    call.sequence = 0  # not one of the counted calls
    waiting.append(call)
    try:
        yield
    except RuntimeError as cause:
        raise watch.failure(call, cause, facts.timeout_s) from cause
    finally:
        waiting.remove(call)


def _wait_bounded(work: Any, pending: Pending) -> None:
    """Wait in slices, so that another rank's failure, Ctrl-C and the time limit all end the wait."""
    facts, limit_s = pending.facts, pending.limit_s()
    if pending.mode is not WaitMode.SLICES:
        try:
            work.wait()
        except RuntimeError as cause:
            raise watch.failure(pending, cause, limit_s) from cause
        return
    deadline = 0.0
    while True:
        began = time.monotonic()
        try:
            work.wait(SLICE)
            return
        except RuntimeError as error:
            if work.is_completed():
                try:
                    work.wait()  # ended between the two calls: fine, or it raises the real cause
                    return
                except RuntimeError as cause:
                    raise watch.failure(pending, cause, limit_s) from cause
            now = time.monotonic()
            if now - began < EARLY_S:  # no slice has passed; some works that have failed do not say so
                raise watch.failure(pending, error, limit_s) from error
            other = facts.page.compare(pending.sequence) if facts.page is not None else None
            if other is not None:
                raise watch.failure(pending, Divergence(other), limit_s) from None
            if watch.aborted(facts.includes_rank_0):
                raise watch.failure(pending, None, limit_s) from None
            if deadline == 0.0:
                deadline = now + limit_s + min(GRACE_S, limit_s)
            elif now > deadline:
                raise watch.failure(pending, error, limit_s) from error


class Done(Pending):
    """A collective that needed no communication."""

    __slots__ = ()

    def __init__(self) -> None:
        self._works = None
        self._finish = None


DONE = Done()
