"""The emulated slow link of the benchmarks: what it charges, and that computation can hide it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.slow_link import SlowLink, crossing_bytes
from deepspeed.comm import collectives, pending, quantized
from deepspeed.comm.blockwise import INT4, INT8
from deepspeed.comm.mesh import ParallelMesh

INF = float("inf")


def test_prices() -> None:
    grid = [0, 0, 1, 1]
    assert crossing_bytes("all_gather", 1000, grid) == 250  # half leaves each node, over two ranks' shares
    assert crossing_bytes("reduce_scatter", 1000, [0, 1]) == 500
    assert crossing_bytes("all_reduce", 1000, grid) == 500
    assert crossing_bytes("all_to_all", 1000, grid) == 500
    assert crossing_bytes("all_gather", 1000, [3, 3, 3]) == 0
    assert crossing_bytes("barrier", 0, grid) == 0
    with pytest.raises(ValueError, match="'gossip' has no price; known: all_gather"):
        crossing_bytes("gossip", 10, grid)


def charged() -> tuple[float, float, float, bool]:
    levels = ParallelMesh.build().levels(2)
    full, shard = torch.ones(4 * 1000), torch.ones(1000)
    found = []
    for call in (
        lambda: collectives.all_gather(full, shard, None),
        lambda: quantized.all_gather(full, shard, levels),
        lambda: quantized.reduce_scatter(shard, full, levels, average=True),
    ):
        with SlowLink([0, 0, 1, 1], INF) as link:
            call()
        found.append(link.crossed_bytes)
    return found[0], found[1], found[2], pending.observer is None


def test_collectives_are_charged_for_what_leaves_the_node(pool: Any) -> None:
    for plain, packed, reduced, restored in pool.run(4, charged):
        assert plain == 4 * 4000 / 2 / 2
        assert packed == INT8.nbytes(1000)
        assert reduced == INT4.nbytes(1000)
        assert restored


def times() -> tuple[float, float]:
    full, shard = torch.ones(2 * 1000), torch.ones(1000)
    nodes = list(range(dist.get_world_size()))
    with SlowLink(nodes, 4000 / 0.3) as link:  # 4000 bytes leave each node
        collectives.all_gather(full, shard, None)
        alone = link.slept_s
        travelling = collectives.all_gather(full, shard, None, async_op=True)
        time.sleep(0.35)
        travelling.wait()
    return alone, link.slept_s - alone


def test_a_transfer_takes_its_time_unless_something_else_does(pool: Any) -> None:
    for alone, hidden in pool.run(2, times):
        assert 0.15 < alone <= 0.3
        assert hidden == 0
