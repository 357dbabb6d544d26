"""`Relay`: operations of several hops, one after the other, moved on by whoever waits or by a thread beside training.

An operation is a generator. It starts the works of a hop and yields them; when they are over it goes on, adds up or
starts the next hop, and its end is the end of the operation:

    def double_hop():
        yield (local.reduce_scatter(...),)
        yield (peers.alltoall_base(...),)
        sum_in_rank_order(...)

Owns: the queue, the thread, `RelayWork`, the handle with the methods of torch's `Work`. Does not own: what travels
(`across_hosts.py`), bounded waits and error texts (`pending.py`, `watch.py`).
Invariants: operations run whole and in the order they were started, so all ranks that start the same ones start the
same hops in the same order; one thread at a time moves them; after a failure nothing of the queue is started any more.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeAlias

import torch

from deepspeed.comm.host_work import HostWork

__all__ = ["Hops", "Relay", "RelayWork"]

Hops: TypeAlias = "Iterator[tuple[Any, ...]]"

# The thread looks this often whether a hop is over. It never waits for one: whoever does then moves on by itself, and
# needs not be woken by the thread nor wait until that gets the interpreter's lock.
_LOOK_S = 0.001
# A shorter wait would be all rounding: works count in milliseconds.
_LEAST_S = 0.01
# A wait of a work that raises before this share of its limit has failed; later, it has timed out.
_EARLY = 0.8


class RelayWork(HostWork):
    """An operation under way."""

    __slots__ = ("_error", "_hops", "_inference", "_over", "_works", "channel", "outputs")

    def __init__(self, relay: Relay, hops: Hops, outputs: tuple[torch.Tensor, ...]) -> None:
        self.channel = relay
        self.outputs = outputs
        self._hops: Hops | None = hops
        self._works: list[Any] = []
        self._error: str | None = None
        self._over = False
        # Tensors made in inference mode may be written to there alone, whichever thread does it.
        self._inference = bool(outputs) and outputs[0].is_inference()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the result is in place; RuntimeError after `timeout`, or when a hop has failed."""
        if not self._over:
            limit_s = self.channel.timeout_s if timeout is None else timeout.total_seconds()
            if not self.channel.wait(self, limit_s):
                raise RuntimeError(f"timed out after {limit_s:g} s")
        if self._error is not None:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._over

    def move(self, limit_s: float) -> bool:
        """Go on for so long, with 0 without waiting; whether it is over. For `Relay`, one thread at a time."""
        end = time.monotonic() + limit_s
        try:
            while self._hops is not None:
                while self._works:
                    if not _arrives(self._works[0], max(end - time.monotonic(), _LEAST_S) if limit_s else 0.0):
                        return False
                    del self._works[0]
                with torch.inference_mode(self._inference), torch.no_grad():
                    self._works = list(next(self._hops))
        except StopIteration:
            self.end(None)
        except Exception as error:
            self.end(str(error) or repr(error))
        except BaseException:  # an interrupt inside the generator, which ends with it
            self.end("interrupted between two hops")
            raise
        return True

    def end(self, error: str | None) -> None:
        """It is over, with an error or without."""
        self._error, self._hops, self._works, self._over = error, None, [], True

    @property
    def failed(self) -> bool:
        """Whether it is over and `wait` raises."""
        return self._error is not None


def _arrives(work: Any, limit_s: float) -> bool:
    """Wait for one work of a hop, with 0 only look; False when the limit has passed. Raises what the work raises."""
    if not limit_s:
        if work.is_completed():
            work.wait()
            return True
        return False
    began = time.monotonic()
    try:
        work.wait(timedelta(seconds=limit_s))
        return True
    except RuntimeError:
        if work.is_completed():
            work.wait()  # ended between the two calls: fine, or it raises the real cause
            return True
        if time.monotonic() - began < _EARLY * limit_s:
            raise
        return False


_relays: weakref.WeakSet[Relay] = weakref.WeakSet()


def _end_threads() -> None:
    """A thread that the interpreter ends inside a call of torch takes the process with it."""
    for relay in list(_relays):
        relay.end_thread()


atexit.register(_end_threads)


class Relay:
    """The operations of one group; see the module. `on_failure` runs once, on the thread that meets the failure."""

    def __init__(self, timeout_s: float, on_failure: Callable[[], None]) -> None:
        self.timeout_s = timeout_s
        self._on_failure = on_failure
        self._changed = threading.Condition()  # guards all below; notified when any of it changes
        self._queue: deque[RelayWork] = deque()
        self._moving = False  # a thread is inside `_move_on`
        self._beside = False  # the thread is to go on with the queue
        self._closed = ""
        self._thread: threading.Thread | None = None
        self._ending = False  # of the program: no thread any more
        _relays.add(self)

    def start(self, hops: Hops, outputs: tuple[torch.Tensor, ...]) -> RelayWork:
        """Queue an operation. It begins with the next wait, or with :meth:`background`."""
        work = RelayWork(self, hops, outputs)
        with self._changed:
            if self._closed:
                work.end(self._closed)
            else:
                self._queue.append(work)
        return work

    def wait(self, work: RelayWork, limit_s: float) -> bool:
        """Wait for an operation and those before it; False when the limit has passed."""
        end = time.monotonic() + limit_s
        while not work.is_completed():
            left = end - time.monotonic()
            if left <= 0:
                return False
            with self._changed:
                if self._moving:
                    self._changed.wait(left)
                    continue
                self._moving = True
            self._move_on(end, work)
        return True

    def background(self) -> None:
        """Let what has been started go on while the program computes."""
        with self._changed:
            if not self._queue or self._beside or self._ending:
                return
            self._beside = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="deepspeed-relay", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, why: str) -> None:
        """Start nothing any more, end the thread, fail what is under way. Idempotent."""
        with self._changed:
            self._closed = self._closed or why
        self.end_thread()
        self._drop(why)

    def end_thread(self) -> None:
        """What is under way goes on in waits alone."""
        with self._changed:
            self._ending = True
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def forget(self, why: str) -> None:
        """In a forked child: the thread and the hops are the parent's."""
        self._changed = threading.Condition()
        self._thread, self._closed = None, why
        self._moving = self._beside = False
        self._drop(why)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._ending or self._beside):
                    self._changed.wait()
                if self._ending:
                    return
                free, self._moving = not self._moving, True
            if free:
                self._move_on(None, None)
            time.sleep(_LOOK_S)

    def _move_on(self, end: float | None, until: RelayWork | None) -> None:
        """Move the queue on until then (None: as far as it goes without waiting), or until one of it is over.

        The caller has set `_moving`.
        """
        try:
            while True:
                with self._changed:
                    if not self._queue:
                        self._beside = False
                        return
                    work = self._queue[0]
                if not work.move(0.0 if end is None else max(end - time.monotonic(), _LEAST_S)):
                    return
                with self._changed:
                    if self._queue and self._queue[0] is work:
                        self._queue.popleft()
                    self._changed.notify_all()
                if work.failed:
                    self._fail("an earlier call on this group has failed")
                if work is until:
                    return
        finally:
            with self._changed:
                self._moving = False
                self._changed.notify_all()

    def _fail(self, why: str) -> None:
        with self._changed:
            first, self._closed = not self._closed, self._closed or why
        self._drop(why)
        if first:
            self._on_failure()

    def _drop(self, why: str) -> None:
        with self._changed:
            for work in self._queue:
                work.end(why)
            self._queue.clear()
            self._beside = False
            self._changed.notify_all()
