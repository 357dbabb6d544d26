"""Saving beside training: one thread per rank writes what lies in a kept host buffer.

    save         weights are copied into the buffer -> a thread copies masters and states, which stand still until the
                 next update -> it writes, agrees with the other ranks' threads, renames -> done
    each step    the ranks agree, without waiting, on whether all threads are done; then a failure is raised by all

At most one save is under way. The ranks learn of its end at the same step: each boundary starts a small reduction on a
group of its own, and the next one reads the result.

Owns: the thread, the buffer, when a failure is raised. Does not own: what is written and in which order
(``publish.py``).
Invariant: the outcome is raised or returned once, by all ranks at the same call; what the thread copies changes only
after :meth:`BackgroundSaver.wait_for_copy`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.checkpoint.disk.publish import Gather
from deepspeed.comm.side_group import PendingMinimum, SideGroup
from deepspeed.runtime.callbacks import Callback
from deepspeed.utils.host_buffer import HostBuffer
from deepspeed.utils.logging import logger

# Ranks may finish writing this far apart.
_SLOWEST_RANK = timedelta(hours=1)
_NICENESS = 19


class BackgroundSaver(Callback):
    """See the module docstring. Made and closed by all ranks together."""

    name = "checkpoint_writer"

    def __init__(self, *, for_device: bool, expected_nbytes: Callable[[], int]) -> None:
        """``expected_nbytes``: what a save would copy, asked once when there is something to copy."""
        self._between_threads = SideGroup("checkpoint writer", _SLOWEST_RANK)
        self._between_steps = SideGroup("checkpoint writer, end of a save")
        self._buffer = HostBuffer(for_device=for_device)
        self._expected_nbytes: Callable[[], int] | None = expected_nbytes
        self._doing = ""
        self._thread: threading.Thread | None = None
        self._touching: threading.Thread | None = None
        self._asked: PendingMinimum | None = None
        self._error: Exception | None = None
        self._copied = threading.Event()
        self._copied.set()

    # ---- the save --------------------------------------------------------------------------------------------------

    def room(self, nbytes: int) -> torch.Tensor:
        """Where the next save copies to. The one before must be over.  # 1D uint8"""
        assert self._thread is None, "a save is under way in this buffer"
        if self._touching is not None:
            self._touching.join()
            self._touching = None
        self._expected_nbytes = None
        return self._buffer.room(nbytes)

    def start(self, doing: str, copy: Callable[[], None], work: Callable[[Gather, Exception | None], None]) -> None:
        """Run ``copy``, then ``work`` in the thread.

        ``work`` agrees with the other ranks by the ``gather`` it is given, also on why ``copy`` failed, if it did.
        """
        self._doing = doing
        self._copied.clear()
        self._thread = threading.Thread(target=self._run, args=(_beside_training(copy), work), name="checkpoint-writer")
        self._thread.start()

    def wait_for_copy(self) -> None:
        """Returns when the thread no longer reads the engine's tensors."""
        self._copied.wait()

    def _run(self, copy: Callable[[], None], work: Callable[[Gather, Exception | None], None]) -> None:
        failure: Exception | None = None
        try:
            copy()
        except Exception as error:  # of the device, say; the other ranks wait to hear of it
            failure = error
        self._copied.set()
        _step_back()
        try:
            work(self._between_threads.gather, failure)
        except Exception as error:  # whatever it was: training hears of it, at a step
            self._error = error
            logger.error(f"{self._doing}, in the background, failed: {error}")

    # ---- hearing of its end ----------------------------------------------------------------------------------------

    def on_step_begin(self, engine: Any) -> None:
        """A boundary: raise the failure of a save that has ended on all ranks; waits for nothing that is slow."""
        if self._thread is None:
            return
        if self._asked is not None:
            asked, self._asked = self._asked, None
            if asked.wait():
                self.wait()
                return
        self._asked = self._between_steps.start_minimum(int(not self._thread.is_alive()))

    def on_step_end(self, engine: Any, applied: bool) -> None:
        """After the first update there is state: make the buffer for it, so that the first save finds it touched."""
        if applied and self._expected_nbytes is not None:
            nbytes, self._expected_nbytes = self._expected_nbytes(), None
            self._touching = threading.Thread(target=self._touch, args=(nbytes,), name="checkpoint-buffer")
            self._touching.start()

    def _touch(self, nbytes: int) -> None:
        _step_back()
        with contextlib.suppress(OSError):  # no memory: the save itself will say so
            self._buffer.room(nbytes)

    def settle(self) -> None:
        """Wait until no thread writes. The outcome stays to be heard of."""
        for thread in (self._thread, self._touching):
            if thread is not None:
                thread.join()

    def wait(self, *, say: bool = False) -> None:
        """Wait for the save under way and raise its failure. All ranks call this at the same point."""
        if self._thread is None:
            return
        begun = time.monotonic()
        waits = self._thread.is_alive()
        self._thread.join()
        if say and waits:
            logger.warning(
                f"waited {time.monotonic() - begun:.2f} s for {self._doing}: one save at a time is written in the "
                "background; save less often, or to a faster disk"
            )
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.wait()
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, leave the groups, free the buffer; then raise the failure of the last save."""
        self.settle()
        try:
            self.wait()
        finally:
            self._between_threads.close()
            self._between_steps.close()
            self._buffer.release()


def _beside_training(copy: Callable[[], None]) -> Callable[[], None]:
    """``copy`` for another thread: on this thread's device, after what has been given to it, beside what follows."""
    accelerator = get_accelerator()
    device, before = accelerator.current_device(), accelerator.current_stream()
    queue = accelerator.Stream()
    queue.wait_stream(before)

    def on_own_queue() -> None:
        accelerator.set_device(device)  # threads begin on the first one
        with accelerator.stream(queue):
            copy()

    return on_own_queue


def _step_back() -> None:
    """This thread, and those it starts, run only where training leaves the processor idle."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
