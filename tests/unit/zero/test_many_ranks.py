"""One rank of a very large world: torch's fake process group, so nothing is sent; memory and calls must not grow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepspeed.comm import collectives
from deepspeed.runtime.precision import PrecisionPolicy
from deepspeed.runtime.zero.optimizer import ZeroOptimizer
from deepspeed.runtime.zero.options import ZeroOptions
from deepspeed.runtime.zero.placement import Placement


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def optimizer_of(model: nn.Module, stage: int, rank: int, world: int, bucket: int) -> ZeroOptimizer:
    return ZeroOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        names={id(param): name for name, param in model.named_parameters()},
        placement=Placement.for_stage(stage, world),
        precision=PrecisionPolicy(),
        process_group=dist.group.WORLD,
        rank=rank,
        world=world,
        options=ZeroOptions(bucket_numel=bucket),
    )


@pytest.mark.parametrize("stage", (1, 2))
@pytest.mark.parametrize("world", (1_000, 16_384))
def test_a_rank_holds_its_share_and_sends_one_bucket_at_a_time(stage, world, monkeypatch):
    calls = {"reduce_scatter": 0, "all_gather": 0, "all_reduce": 0}
    for name in calls:
        original = getattr(collectives, name)

        def counted(*args, _name=name, _original=original, **kwargs):
            calls[_name] += 1
            return _original(*args, **kwargs)

        monkeypatch.setattr(collectives, name, counted)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    numel = sum(param.numel() for param in model.parameters())
    bucket = 1 << 18
    with fake_world(rank=world // 2, size=world):
        optimizer = optimizer_of(model, stage, world // 2, world, bucket)
        segments = sum(len(group.layout.segments) for group in optimizer.groups)
        assert segments == -(-optimizer.groups[0].layout.numel // (bucket // (16 * world) * (16 * world) or 16 * world))
        optimizer.backward(model(torch.ones(2, 256)).sum())
        assert calls["reduce_scatter"] == segments
        held = sum(piece.numel() for piece in optimizer.groups[0].grads)
        assert held * world <= numel + segments * 16 * world
        assert sum(bound.leaf.numel() for bound in optimizer.groups[0].fragments) <= numel // world + 16 * segments
        optimizer.destroy()
