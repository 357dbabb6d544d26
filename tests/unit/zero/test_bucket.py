"""A bucket sent in parts carries the elements of the whole one; what the workspace holds, lends and makes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.runtime.zero import bucket as module
from deepspeed.runtime.zero.bucket import Bucket, Workspace
from deepspeed.runtime.zero.layout import ShardLayout

CPU = torch.device("cpu")


def buckets_of(sizes: list[list[int]], world: int) -> tuple[list[Bucket], list[torch.Tensor]]:
    """The buckets of a group of 1D parameters cut into blocks, and a gradient per parameter."""
    blocks = [[(f"{i}.{j}", numel) for j, numel in enumerate(block)] for i, block in enumerate(sizes)]
    layout = ShardLayout.by_block(blocks, world, param_align=4, piece_align=4)
    shapes = [torch.Size([slot.numel]) for slot in layout.slots]
    group: Any = SimpleNamespace(
        layout=layout, order=range(len(shapes)), comm_dtype=torch.float32, shapes=shapes, world=world
    )
    return [Bucket(group, segment) for segment in layout.segments], [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("world", (2, 3, 4))
def test_parts_hold_the_elements_of_the_whole(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_PART", 16)
    draw = random.Random(world)
    sizes = [[draw.randint(1, 60) for _ in range(draw.randint(1, 5))] for _ in range(6)] + [[128 * world]]
    buckets, grads = buckets_of(sizes, world)
    for bucket in buckets:
        sources: list[torch.Tensor | None] = [grads[position] for position in bucket.positions]
        for absent in (None, 0):
            if absent is not None:
                sources[absent] = None
            whole = torch.full((bucket.segment.numel,), torch.nan)
            bucket.fill(whole, sources)
            pieces, done = whole.view(world, -1), 0
            for start, length in bucket.parts():
                part = torch.full((world * length,), torch.nan)
                bucket.fill_part(part, sources, start)
                assert start == done
                assert torch.equal(part.view(world, -1), pieces[:, start : start + length])
                done += length
            assert done == bucket.segment.piece_numel
    assert max(len(list(bucket.parts())) for bucket in buckets) == module._PARTS


def test_one_gradient_that_fills_its_bucket_is_its_buffer() -> None:
    buckets, grads = buckets_of([[64], [60], [32, 32]], 2)
    as_they_lie = [bucket.as_it_lies([grads[position] for position in bucket.positions]) for bucket in buckets]
    assert as_they_lie[0] is not None
    assert as_they_lie[0].data_ptr() == grads[0].data_ptr()
    assert as_they_lie[1:] == [None, None]  # padding; two gradients
    assert buckets[0].as_it_lies([None]) is None
    assert buckets[0].as_it_lies([grads[0].double()]) is None
    assert buckets[0].as_it_lies([torch.randn(128)[::2]]) is None


def test_a_workspace_is_made_when_it_is_asked_for() -> None:
    workspace = Workspace(1000, 2, CPU)
    assert workspace.nbytes == 0
    assert workspace.capacity(torch.float32) == 2 * 1024 // 4
    first, second = workspace.take(0, 250, torch.float32), workspace.take(1, 500, torch.bfloat16)
    assert workspace.nbytes == 2048
    assert workspace.owns(first)
    assert workspace.owns(second)
    assert workspace.whole(512, torch.float32).data_ptr() == first.data_ptr() == second.data_ptr() - 1024


def test_a_workspace_that_keeps_nothing_hands_out_what_was_lent() -> None:
    workspace = Workspace(1000, 2, CPU, kept=False, scratch=400)
    small, large = torch.zeros(10), torch.zeros(250)
    lent, address = [small, large], large.data_ptr()
    workspace.lend(lent)
    assert lent == []
    assert workspace.take(0, 500, torch.bfloat16).data_ptr() == address
    assert workspace.take(1, 500, torch.bfloat16).data_ptr() not in (address, small.data_ptr())
    workspace.lend([])
    assert workspace.take(0, 10, torch.float32).data_ptr() != small.data_ptr()
    assert workspace.capacity(torch.float32) == 100
    assert workspace.whole(100, torch.float32).numel() == 100
    assert workspace.nbytes == 0
