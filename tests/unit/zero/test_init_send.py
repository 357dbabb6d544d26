"""How initial values are cut for sending: nothing is left out, and what is large is never copied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.runtime.zero.init_send import Values, runs_of_one_parameter
from deepspeed.runtime.zero.layout import ShardLayout
from deepspeed.runtime.zero.param_block import Place, contiguous_stride

MOST, LARGE = 400, 100


def placed(numels: list[int], world: int) -> tuple[list[Place], int]:
    layout = ShardLayout.by_block(
        [[(str(i), numel) for i, numel in enumerate(numels)]], world, param_align=8, piece_align=8
    )
    places, value = [], 1.0
    for numel, slot in zip(numels, layout.slots, strict=True):
        param = nn.Parameter(torch.arange(numel, dtype=torch.float32) + value)
        places.append(Place(param, "x", slot.start, param.shape, contiguous_stride(param.shape)))
        value += numel
    return places, layout.shard_numel


@pytest.mark.parametrize("world", (1, 2, 3, 8))
@pytest.mark.parametrize(
    "numels", ([5], [1000, 10], [3, 1000, 3], [20] * 40, [300, 300, 300], [16, 700, 16, 16, 90, 900], [0, 130])
)
def test_runs_fill_every_piece_and_large_ones_are_views(numels: list[int], world: int) -> None:
    places, piece = placed(numels, world)
    source = Values(places, torch.float32, torch.device("cpu"))
    right = torch.zeros(world * piece)
    for place in places:
        right[place.start : place.start + place.numel] = place.param.data
    runs = list(runs_of_one_parameter(places, piece, MOST, LARGE))
    assert [start for start, _ in runs] == [0, *torch.tensor([n for _, n in runs]).cumsum(0).tolist()][:-1]
    assert sum(numel for _, numel in runs) == piece
    memory = {place.param.untyped_storage().data_ptr() for place in places}
    for start, numel in runs:
        assert 0 < numel <= MOST
        for rank in range(world):
            at = rank * piece + start
            read = source.read(at, numel)
            assert torch.equal(read, right[at : at + numel])
            whole = any(place.start <= at and at + numel <= place.start + place.numel for place in places)
            assert whole == (read.untyped_storage().data_ptr() in memory)


def test_what_is_large_ends_where_parameters_do_and_what_is_small_goes_together() -> None:
    def runs(numels: list[int], world: int) -> list[tuple[int, int]]:
        places, piece = placed(numels, world)
        return list(runs_of_one_parameter(places, piece, MOST, LARGE))

    assert runs([600, 10], 2) == [(0, 288), (288, 24)]  # pieces of 312: the second rank's values end after 288 and 298
    assert runs([300, 20, 20, 300], 1) == [(0, 300), (300, 52), (352, 300), (652, 4)]
    assert runs([300, 20, 20, 300], 2) == [(0, 24), (24, 276), (300, 28)]
    assert runs([20] * 10, 1) == [(0, 240)]
    assert runs([20] * 40, 1) == [(0, 400), (400, 400), (800, 160)]
