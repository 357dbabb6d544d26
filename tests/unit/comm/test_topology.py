"""Topology classes and expert rank lists: the numbers that existing launch scripts and checkpoints rely on."""

from __future__ import annotations

import pytest

from deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from deepspeed.utils import groups


def test_ranks_and_coordinates() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert topology.world_size() == 8
    assert topology.get_rank(pipe=1, data=0, model=1) == 5
    coordinates = topology.get_coord(5)
    assert (coordinates.pipe, coordinates.data, coordinates.model) == (1, 0, 1)
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_axis_comm_lists("nothing") == []
    assert topology.get_axis_list("data", 1) == [2, 3, 6, 7]
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_dim("model") == 2
    assert topology.get_dim("nothing") == 0
    assert str(PipeDataParallelTopology(1, 2)) == ("{ProcessCoord(pipe=0, data=0): 0, ProcessCoord(pipe=0, data=1): 1}")


def test_short_text_of_a_rank() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    assert topology.get_rank_repr(1) == "model_01"
    assert topology.get_rank_repr(1, omit_axes=[]) == "pipe_00-data_00-model_01"
    assert topology.get_rank_repr(2, omit_axes=["data"], inner_sep="", outer_sep=".") == "pipe01.model00"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""


def test_a_missing_axis_is_an_error() -> None:
    with pytest.raises(ValueError, match="lack the axes \\['b'\\]"):
        ProcessTopology(["a", "b"], [2, 2]).get_rank(a=1)


EXPERT_LISTS = {
    # (world, tp, ep, pp, data before expert): (expert groups, expert-data groups), as 0.19.8 gives them
    (8, 1, 2, 1, False): ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]),
    (8, 1, 2, 1, True): ([[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    (8, 2, 2, 1, False): ([[0, 2], [4, 6], [1, 3], [5, 7]], [[0, 4], [2, 6], [1, 5], [3, 7]]),
    (8, 2, 2, 1, True): ([[0, 4], [2, 6], [1, 5], [3, 7]], [[0, 2], [4, 6], [1, 3], [5, 7]]),
    (8, 2, 4, 1, False): ([[0, 2, 4, 6], [1, 3, 5, 7]], [[0], [2], [4], [6], [1], [3], [5], [7]]),
    (8, 1, 2, 2, True): ([[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]),
    (16, 2, 2, 2, False): (
        [[0, 2], [4, 6], [1, 3], [5, 7], [8, 10], [12, 14], [9, 11], [13, 15]],
        [[0, 4], [2, 6], [1, 5], [3, 7], [8, 12], [10, 14], [9, 13], [11, 15]],
    ),
}


@pytest.mark.parametrize("arguments", list(EXPERT_LISTS))
def test_expert_rank_lists(arguments: tuple[int, int, int, int, bool]) -> None:
    assert groups._get_expert_parallel_ranks(*arguments) == EXPERT_LISTS[arguments]


def test_a_world_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(AssertionError, match="4 is not divisible by 3"):
        groups._get_expert_parallel_ranks(4, 1, 3)
