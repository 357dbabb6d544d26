"""Collectives whose `wait` does not block the host (nccl and its kin): which of them never ends?

Owns: a short memory of the last such works. Does not own: reporting (`watch.py`) and ending them (the backend's own
watchdog does that at the same limit). Asking a work whether it is done queries a device event, which must not happen
while a graph is being captured: we ask only when no collective has been started for a while, which is also the only
time when there is something to find.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from deepspeed.comm.activity import Waiter

# Seconds without a new collective before works are asked at all.
QUIET_S = 20.0
# Share of the group's limit after which a work counts as stuck: before the backend's watchdog ends the process.
STUCK_SHARE = 0.9

_recent: deque[tuple[float, float, Waiter, Any]] = deque(maxlen=64)


def note(waiter: Waiter, work: Any, limit_s: float) -> None:
    """Remember a work that has been handed to a device stream."""
    _recent.append((time.monotonic(), limit_s, waiter, work))


def find_stuck() -> Waiter | None:
    """The oldest remembered call that has run for nearly its limit, or None."""
    now = time.monotonic()
    if not _recent or now - _recent[-1][0] < QUIET_S:
        return None
    while _recent and _recent[0][3].is_completed():
        _recent.popleft()
    if _recent and now - _recent[0][0] > _recent[0][1] * STUCK_SHARE:
        return _recent[0][2]
    return None


def forget() -> None:
    """Drop all memory of works: their groups are gone."""
    _recent.clear()
