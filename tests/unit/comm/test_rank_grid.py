"""RankGrid: every rank list of every shape up to 64 ranks, against a definition by brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from deepspeed.comm.rank_grid import RankGrid, split_line, unique

AXES = ("pp", "dp", "sp", "tp")


def shapes(limit: int) -> list[tuple[int, ...]]:
    """All (pp, dp, sp, tp) whose product is at most `limit`."""
    found = []
    for pp in range(1, limit + 1):
        for dp in range(1, limit // pp + 1):
            for sp in range(1, limit // (pp * dp) + 1):
                found += [(pp, dp, sp, tp) for tp in range(1, limit // (pp * dp * sp) + 1)]
    return found


def brute_force_lines(sizes: dict[str, int], axes: tuple[str, ...]) -> set[tuple[int, ...]]:
    """Groups by grouping all ranks on the coordinates that stay fixed."""
    by_fixed: dict[tuple[int, ...], list[int]] = {}
    for rank, at in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
        fixed = tuple(c for axis, c in zip(sizes, at, strict=True) if axis not in axes)
        by_fixed.setdefault(fixed, []).append(rank)
    return {tuple(ranks) for ranks in by_fixed.values()}


ALL_SHAPES = shapes(64)


@pytest.mark.parametrize("axes", (("pp",), ("dp",), ("sp",), ("tp",), ("dp", "sp"), ("pp", "tp"), AXES))
def test_groups_of_all_shapes_up_to_64_ranks(axes: tuple[str, ...]) -> None:
    assert len(ALL_SHAPES) > 1000
    for shape in ALL_SHAPES:
        sizes = dict(zip(AXES, shape, strict=True))
        grid = RankGrid(sizes)
        lines = grid.lines(axes)
        assert set(lines) == brute_force_lines(sizes, axes), shape
        assert sorted(itertools.chain(*lines)) == list(range(math.prod(shape)))
        assert all(len(line) == grid.size(axes) for line in lines)


def test_line_and_position_agree_for_every_rank_and_any_axis_order() -> None:
    for order in itertools.permutations(AXES):
        grid = RankGrid(dict(zip(order, (2, 3, 2, 2), strict=True)))
        for rank in range(grid.world_size):
            assert grid.rank(grid.coordinates(rank)) == rank
            for axes in ("pp", "dp", ("dp", "sp"), ("tp", "pp")):
                assert grid.line(axes, rank)[grid.position(axes, rank)] == rank
            line = grid.line("dp", rank)
            assert {b - a for a, b in itertools.pairwise(line)} <= {grid.stride("dp")}


def test_folded_lines_follow_the_order_of_the_axes_named() -> None:
    grid = RankGrid({"dp": 2, "sp": 3})
    assert grid.line(("dp", "sp"), 0) == (0, 1, 2, 3, 4, 5)
    assert grid.line(("sp", "dp"), 0) == (0, 3, 1, 4, 2, 5)


def test_split_keeps_the_numbering_and_fold_undoes_it() -> None:
    grid = RankGrid({"pp": 2, "dp": 8, "tp": 2})
    cut = grid.split("dp", {"edp": 2, "ep": 4})
    assert cut.axes == ("pp", "edp", "ep", "tp")
    assert cut.lines(("edp", "ep")) == grid.lines("dp")
    assert cut.fold(("edp", "ep"), "dp") == grid
    assert cut.line("ep", 0) == (0, 2, 4, 6)
    assert cut.line("edp", 0) == (0, 8)


def test_lines_in_a_given_order() -> None:
    grid = RankGrid({"edp": 2, "ep": 2, "tp": 2})
    assert grid.lines("ep") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.lines("ep", order=("tp", "edp")) == [(0, 2), (4, 6), (1, 3), (5, 7)]


def test_matching_ranks() -> None:
    grid = RankGrid({"pipe": 2, "data": 2, "model": 2})
    assert grid.matching(pipe=1) == [4, 5, 6, 7]
    assert grid.matching(pipe=0, model=1) == [1, 3]


def test_split_line_gives_the_block_and_the_peers() -> None:
    assert split_line((0, 2, 4, 6), 1, 2) == ((0, 2), (2, 6))
    assert split_line((0, 2, 4, 6), 3, 4) == ((0, 2, 4, 6), (6,))
    with pytest.raises(ValueError, match="blocks of 3"):
        split_line((0, 1, 2, 3), 0, 3)


def test_unique_keeps_first_appearance() -> None:
    assert unique([(0, 1), (2,), (0, 1)]) == [(0, 1), (2,)]


@pytest.mark.parametrize(
    ("call", "text"),
    (
        (lambda g: g.size("xp"), "unknown axis 'xp'; the axes are pp, dp"),
        (lambda g: g.rank({"pp": 0}), "lack the axes \\['dp'\\]"),
        (lambda g: g.rank({"pp": 0, "dp": 3}), "dp=3 is outside 0..2"),
        (lambda g: g.coordinates(6), "rank 6 is outside"),
        (lambda g: g.split("dp", {"a": 2, "b": 2}), "a 2 x b 2 = 4"),
        (lambda g: RankGrid({"dp": 0}), "axis 'dp' has size 0"),
        (lambda g: RankGrid({"a": 2, "b": 2, "c": 2}).fold(("a", "c"), "x"), "not neighbours"),
        (lambda g: g.lines("dp", order=("dp",)), "exactly the other axes"),
    ),
)
def test_errors_name_axis_and_value(call: Callable[[RankGrid], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(RankGrid({"pp": 2, "dp": 3}))
