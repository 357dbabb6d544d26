"""Sleeping until a child ends or a signal arrives, without polling.

Python delivers signals to handlers between bytecodes of the main thread; writing the signal's number into a pipe
instead (`signal.set_wakeup_fd`) gives one queue on which to wait for everything: SIGCHLD for ended children, the
others to be forwarded. Signals that were ignored when the launcher started (``nohup``, a background job) stay ignored.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

TERMINATING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_HANDLED = (*TERMINATING, *PASSED_ON, signal.SIGTSTP, signal.SIGCHLD)

# Signals can be handled in the main thread alone. A program that calls the launcher from another thread gets no
# forwarding, and child ends are noticed by looking this often (seconds).
_LOOK_INTERVAL = 0.05


class Wakeups:
    """Context manager that owns the handlers while the workers run and puts the old ones back afterwards."""

    def __init__(self, watch_stdin: bool = False) -> None:
        self._watched = [0] if watch_stdin else []
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        self._former: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Wakeups:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        if self._in_main_thread:
            self._former_descriptor = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            for signum in _HANDLED:
                if signum == signal.SIGCHLD or signal.getsignal(signum) is not signal.SIG_IGN:
                    self._former[signum] = signal.signal(signum, _only_wake_up)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._in_main_thread:
            for signum, handler in self._former.items():
                # None: a handler that was not set from Python and cannot be put back from here.
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(self._former_descriptor)
        os.close(self._reading)
        os.close(self._writing)

    def wait(self, seconds: float | None) -> list[int]:
        """Sleep until something happens, at most ``seconds`` (None: no limit). Returns the signals in order of arrival,
        SIGCHLD left out; the end of a watched standard input counts as SIGTERM."""
        if not self._in_main_thread:
            seconds = _LOOK_INTERVAL if seconds is None else min(seconds, _LOOK_INTERVAL)
        ready, _, _ = select.select([self._reading, *self._watched], [], [], seconds)
        signals: list[int] = []
        if self._reading in ready:
            signals += [signum for signum in os.read(self._reading, 4096) if signum != signal.SIGCHLD]
        if 0 in ready and not os.read(0, 4096):
            self._watched = []
            signals.append(signal.SIGTERM)
        return signals


def _only_wake_up(signum: int, frame: FrameType | None) -> None:
    """The number is in the pipe already."""
