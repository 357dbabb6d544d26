"""What stage 3 holds beyond the shards where blocks are released after use: gradients are sent in parts, or in the
memory of their block, and no bucket stays. Numbers are those of stage 2, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.comm.group_facts import all_facts
from deepspeed.runtime.zero import bucket
from deepspeed.runtime.zero.bucket import Workspace
from tests.distributed.test_stage3_use import DIM, Lora, batch, mean_square, run, same, start
from tests.harness.width import product

HIDDEN = 24


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(DIM, HIDDEN)]
    for _ in range(3):
        layers += [nn.Tanh(), nn.Linear(HIDDEN, HIDDEN, bias=False)]
    return nn.Sequential(*layers, nn.LayerNorm(HIDDEN))


@contextmanager
def lent() -> Iterator[list[bool]]:
    """For every buffer a workspace hands out: whether its memory was lent."""
    found: list[bool] = []
    take = Workspace.take

    def spy(self: Workspace, *args: Any) -> torch.Tensor:
        addresses = {buffer.data_ptr() for buffer in self._lent}
        buffer = take(self, *args)
        found.append(buffer.data_ptr() in addresses)
        return buffer

    with mock.patch.object(Workspace, "take", spy):
        yield found


def staged_bytes() -> int:
    return sum(buffer.nbytes for facts in all_facts() for free in facts._free.values() for buffer in free)


def sizes_of_a_step(overlap: bool) -> tuple[list[bool], int, int, int]:
    """(which buffers were lent, bytes of the workspace, bytes of staging after it, elements gathered after it)"""
    for facts in all_facts():
        facts.release_buffers()
    zero = {"stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    zero.update(overlap_comm=overlap, reduce_bucket_size=HIDDEN * HIDDEN)
    top = {"zero_optimization": {"stage": 3, **zero}, "bf16": {"enabled": True}}
    engine = start(deep(), 3, **top)
    with lent() as found:
        for step in range(2):
            engine.backward(engine(batch(step).bfloat16()).float().pow(2).mean())
            gathered = engine.sharded_module.gatherer.live_numel
            staged = staged_bytes()
            engine.step()
    workspace = engine.optimizer.model_state_bytes()["workspace"]
    engine.destroy()
    return found, workspace, staged, gathered


def test_a_bucket_lies_in_the_memory_of_its_block(pool: Any) -> None:
    for found, workspace, _, gathered in pool.run(2, sizes_of_a_step, True):
        assert sum(found) >= 0.5 * len(found) > 0  # the others are of blocks whose weights backward does not need
        assert workspace == gathered == 0


def test_a_bucket_in_parts_needs_a_part_of_the_memory(pool: Any) -> None:
    with_parts = pool.run(2, in_small_parts, sizes_of_a_step, False)
    for found, workspace, staged, gathered in with_parts:
        assert len(found) >= 2 * 3 * bucket._PARTS
        assert not any(found)
        nbytes = HIDDEN * HIDDEN * 2  # of a bucket
        assert 0 < workspace <= nbytes / bucket._PARTS + 64
        assert staged <= workspace
        assert gathered == 0


def in_small_parts(body: Any, *args: Any, **kwargs: Any) -> Any:
    """``body`` with buckets as small as a test's cut into parts."""
    with mock.patch.object(bucket, "_MIN_PART", 16):
        return body(*args, **kwargs)


def same_as_stage_2(make: Any, overlap: bool, top: dict[str, Any]) -> None:
    zero = {"stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    released = {"stage": 3, **zero, "overlap_comm": overlap}
    same(run(make, mean_square, 2, **top), run(make, mean_square, 3, **top, zero_optimization=released))
    assert dist.get_world_size() > 1


@pytest.mark.parametrize(
    ("world", "make", "overlap", "accumulation"),
    product((2, 3, 4), (deep, Lora), (False, True), (1, 2), daily=lambda world, make, overlap, n: world == 4 - n),
)
def test_bits_do_not_depend_on_how_gradients_travel(
    pool: Any, world: int, make: Any, overlap: bool, accumulation: int
) -> None:
    top = {"gradient_accumulation_steps": accumulation, "prescale_gradients": world == 4}
    pool.run(world, in_small_parts, same_as_stage_2, make, overlap, top)
