"""Streams and events of a device that runs each operation when it is called: all work is already done."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["HostEvent", "HostStream"]


class HostEvent:
    """A point in time on the host."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return: there is nothing to wait for."""

    def query(self) -> bool:
        """True: the work before the mark is done."""
        return True

    def synchronize(self) -> None:
        """Return: there is nothing to wait for."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to ``end_event``; both must have been recorded."""
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("elapsed_time: both events must have been recorded")
        return (end_event._seconds - self._seconds) * 1000.0


class HostStream:
    """A queue that is always empty."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        """Return: there is nothing to wait for."""

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def wait_stream(self, stream: Any) -> None:
        """Return: there is nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Return: there is nothing to wait for."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Record ``event`` (a new one if None) and return it."""
        event = event or HostEvent()
        event.record(self)
        return event
