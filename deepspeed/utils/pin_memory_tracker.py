"""Running total of host memory that this package has page-locked."""

import threading

from deepspeed.utils.logging import logger

__all__ = ["pinned_memory_summary", "pinned_nbytes", "track_pinned_memory"]

_lock = threading.Lock()
_current = 0
_peak = 0


def track_pinned_memory(num_bytes: int) -> None:
    """Add ``num_bytes`` (negative when released) to the total."""
    global _current, _peak
    with _lock:
        _current += num_bytes
        _peak = max(_peak, _current)


def pinned_nbytes() -> tuple[int, int]:
    """(bytes locked now, largest such total of this process)."""
    with _lock:
        return _current, _peak


def pinned_memory_summary(tag: str = "") -> None:
    """Log the totals (level INFO)."""
    current, peak = pinned_nbytes()
    label = f" [{tag}]" if tag else ""
    logger.info("pinned host memory%s: %.2f MiB, peak %.2f MiB", label, current / 2**20, peak / 2**20)
