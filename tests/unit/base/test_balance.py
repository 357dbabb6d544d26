"""Cuts of a row of weights. The tables are part of the format of pipeline checkpoints."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.runtime.utils import partition_balanced, partition_uniform, prefix_sum_inc


@pytest.mark.parametrize(
    ("items", "parts", "bounds"),
    ((10, 3, [0, 4, 7, 10]), (2, 4, [0, 1, 2, 2, 2]), (0, 2, [0, 0, 0]), (9, 3, [0, 3, 6, 9]), (5, 1, [0, 5])),
)
def test_uniform(items: int, parts: int, bounds: list[int]) -> None:
    assert partition_uniform(items, parts) == bounds


def test_uniform_needs_a_part() -> None:
    with pytest.raises(ValueError, match="`num_parts` must be at least 1, found 0"):
        partition_uniform(3, 0)


@pytest.mark.parametrize(
    ("weights", "parts", "bounds"),
    (
        ([1, 2, 1], 2, [0, 2, 3]),
        ([1] * 10, 4, [0, 3, 6, 8, 10]),
        ([5, 1, 1, 1, 5], 3, [0, 1, 4, 5]),
        ([0, 1, 3, 2, 2, 1, 2], 4, [0, 3, 4, 6, 7]),
        ([3, 1, 1, 1, 0, 3], 2, [0, 3, 6]),
        ([7, 0, 0, 1, 2, 0, 1, 1], 4, [0, 3, 6, 7, 8]),
        ([0, 0, 3, 2, 2], 4, [0, 2, 3, 4, 5]),
        ([], 2, [0, 0, 0]),
        ([4, 4], 3, [0, 1, 2, 2]),
    ),
)
def test_balanced(weights: list[int], parts: int, bounds: list[int]) -> None:
    assert partition_balanced(weights, parts) == bounds


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(1, 5))
def test_balanced_covers_in_order_without_empty_parts(weights: list[int], parts: int) -> None:
    bounds = partition_balanced(weights, parts)
    assert bounds[0] == 0
    assert bounds[-1] == len(weights)
    assert len(bounds) == parts + 1
    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    assert min(sizes) >= (1 if len(weights) >= parts else 0)


def test_prefix_sums() -> None:
    weights = [1, 2, 3]
    assert prefix_sum_inc(weights) == [1, 3, 6]
    assert weights == [1, 2, 3]
