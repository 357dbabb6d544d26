"""The order in which blocks are used, learned from the last window: what comes next, and when a block is used again.

A *window* is what lies between two optimizer steps. The trace of the last one is the forecast for this one. Pure
bookkeeping over block numbers: it decides about prefetching and keeping, never about correctness, so a run that leaves
the forecast (a branch, an early exit, another order) only loses the prefetch until it meets the forecast again.

Every rank that has used the same blocks in the same order makes the same forecast, so a prefetch is as collective as
the fetch it anticipates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_SEARCH = 64  # how far ahead a run that left the forecast looks for a place to rejoin
NEVER = 1 << 62


class FetchTrace:
    """``sizes[block]`` is the number of elements of a block."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.recorded: list[int] = []  # this window so far
        self.forecast: list[int] = []
        self.misses = 0  # times the forecast was wrong, over the whole run
        self._reuse: list[int] = []
        self._at = -1  # place of the last used block in the forecast; -1: left it
        self._start = True

    def use(self, block: int) -> None:
        """``block`` is used now."""
        self.recorded.append(block)
        if not self.forecast:
            return
        expected = 0 if self._start else self._at + 1
        known = self._start or self._at >= 0
        self._start = False
        if known and expected < len(self.forecast) and self.forecast[expected] == block:
            self._at = expected
            return
        self.misses += known
        low = max(expected, 0) if known else 0
        high = len(self.forecast) if not known else min(low + _SEARCH, len(self.forecast))
        self._at = next((i for i in range(low, high) if self.forecast[i] == block), -1)

    def upcoming(self) -> Iterator[int]:
        """Blocks that will be used after the current one, soonest first; empty when unknown."""
        if self._at >= 0:
            for place in range(self._at + 1, len(self.forecast)):
                yield self.forecast[place]

    def distance(self, block: int) -> int:
        """Elements used from now until ``block`` is used again; 0 when unknown, NEVER when not in this window."""
        if self._at < 0:
            return 0
        if self.forecast[self._at] == block:
            return self._reuse[self._at]
        passed = 0
        for other in self.forecast[self._at + 1 :]:
            if other == block:
                return passed
            passed += self.sizes[other]
        return NEVER

    def forget(self) -> None:
        """Nothing is known of the order any more."""
        self.recorded, self.forecast, self._reuse = [], [], []
        self._at, self._start = -1, True

    def end_window(self) -> None:
        """An optimizer step: what was recorded is the forecast of the next window."""
        if self.recorded:
            if self.recorded != self.forecast:
                self.forecast = self.recorded
                self._reuse = self._reuse_distances(self.forecast)
            self.recorded = []
        self._at, self._start = -1, True

    def _reuse_distances(self, order: Sequence[int]) -> list[int]:
        result = [NEVER] * len(order)
        seen: dict[int, int] = {}  # block -> elements between its next use and the end
        passed = 0
        for i in range(len(order) - 1, -1, -1):
            block = order[i]
            if block in seen:
                result[i] = passed - seen[block] - self.sizes[block]
            passed += self.sizes[block]
            seen[block] = passed - self.sizes[block]
        return result
