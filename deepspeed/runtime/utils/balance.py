"""Cut a row of weighted items into consecutive parts; pure arithmetic.

Pipeline stages are cut with these, and checkpoints are named by stage, so the cuts for given weights are part of the
file format: do not change a tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["partition_balanced", "partition_uniform", "prefix_sum_inc"]


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Inclusive prefix sums: [1, 2, 3] → [1, 3, 6]."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of ``num_parts`` parts of equal size; the first ``num_items % num_parts`` parts take one item more.

    Part i is ``bounds[i]:bounds[i + 1]``. (10, 3) → [0, 4, 7, 10].
    """
    if num_parts < 1:
        raise ValueError(f"partition_uniform: `num_parts` must be at least 1, found {num_parts}")
    size, longer = divmod(num_items, num_parts)
    return [part * size + min(part, longer) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds of ``num_parts`` consecutive non-empty parts with nearly equal sums of weights.

    A table over (number of items, number of parts) keeps the cut whose largest and smallest part differ least; among
    equals, the one whose last part is shortest. O(items² · parts). With no more items than parts: `partition_uniform`.

    [1, 2, 1], 2 → [0, 2, 3].
    """
    num_items = len(weights)
    if num_items <= num_parts:
        return partition_uniform(num_items, num_parts)
    sums = [0, *prefix_sum_inc(weights)]
    # best[items][parts] = (largest part, smallest part, items before the last part); None: impossible
    best: list[list[tuple[float, float, int] | None]] = [[None] * (num_parts + 1) for _ in range(num_items + 1)]
    best[0][0] = (0, math.inf, 0)
    for items in range(1, num_items + 1):
        for parts in range(1, min(items, num_parts) + 1):
            least_spread = math.inf
            for before in range(items):
                rest = best[before][parts - 1]
                if rest is None:
                    continue
                last = sums[items] - sums[before]
                largest, smallest = max(rest[0], last), min(rest[1], last)
                if largest - smallest <= least_spread:
                    least_spread = largest - smallest
                    best[items][parts] = (largest, smallest, before)
    bounds = [num_items]
    for parts in range(num_parts, 0, -1):
        entry = best[bounds[-1]][parts]
        assert entry is not None
        bounds.append(entry[2])
    return bounds[::-1]
