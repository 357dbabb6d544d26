"""A tensor cut over a group comes back whole, from this process or from a description sent to another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.runtime.utils import PartitionedTensor


def round_trip(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bool, bool, list[int], list[int]]:
    whole = torch.arange(math.prod(shape), dtype=dtype).view(shape)
    group = dist.group.WORLD
    part = PartitionedTensor(whole, group)
    again = PartitionedTensor.from_meta(part.to_meta(), part.data().clone(), group, device="cpu")
    return (
        torch.equal(part.full(), whole),
        torch.equal(again.full(device="cpu"), whole) and again.full_size() == list(shape),
        list(part.local_size()),
        part.to_meta().tolist(),
    )


@pytest.mark.parametrize(("shape", "sizes"), (((2, 5), [4, 3, 3]), ((2,), [1, 1, 0]), ((3, 1, 2), [2, 2, 2])))
@pytest.mark.world(3)
def test_round_trip(ranks: Any, shape: tuple[int, ...], sizes: list[int]) -> None:
    bounds = [0, sizes[0], sizes[0] + sizes[1], sum(sizes)]
    for dtype in (torch.float32, torch.bfloat16):
        for rank, (own, rebuilt, local, meta) in enumerate(ranks(round_trip, shape, dtype)):
            assert own
            assert rebuilt
            assert local == [sizes[rank]]
            assert meta == [len(shape), *shape, 3, rank, *bounds]


def own_bounds() -> tuple[list[int], bool]:
    whole = torch.arange(7.0)
    part = PartitionedTensor(whole, dist.group.WORLD, partition_meta=[0, 1, 7])
    return list(part.local_size()), torch.equal(part.full(), whole)


def test_bounds_of_the_caller(ranks: Any) -> None:
    assert ranks(own_bounds) == [([1], True), ([6], True)]


def wrong_part() -> str:
    part = PartitionedTensor(torch.arange(7.0), dist.group.WORLD)
    with pytest.raises(ValueError, match="from_meta") as caught:
        PartitionedTensor.from_meta(part.to_meta(), torch.zeros(9), dist.group.WORLD)
    return str(caught.value)


def test_part_of_the_wrong_size_is_refused(ranks: Any) -> None:
    texts = ranks(wrong_part)
    assert "rank 0 of 2 owns 4 elements of a tensor of shape [7], but the part given has 9" in texts[0]
    assert "rank 1 of 2 owns 3 elements" in texts[1]
