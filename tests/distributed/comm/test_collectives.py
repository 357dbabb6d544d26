"""The training collectives on gloo and through shared memory: values, bits, aliasing, memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm import collectives
from deepspeed.comm.group_facts import facts_of

over_gloo = patch.dict(os.environ, DS_SHM="0")
# Ranks and what carries their tensors; shared memory needs two calls before it carries any.
WAYS = ((1, ""), (2, "0"), (2, ""), (3, "0"), (3, ""))


def carried(cases: Callable[[], list[str]], setting: str) -> list[str]:
    with patch.dict(os.environ, DS_SHM=setting):
        for _ in range(2):
            collectives.barrier()
        return cases()


def contribution(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def expected_sum(size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """fp32, rank order: what every reduction of ours must give to the last bit."""
    total = contribution(0, numel, dtype).float()
    for rank in range(1, size):
        total = total + contribution(rank, numel, dtype).float()
    return total


def reduce_scatter_cases() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for out_dtype in (dtype, torch.float32):
            for shard in (1, 7, 70_001):
                numel = shard * size
                mine = slice(rank * shard, (rank + 1) * shard)
                total = expected_sum(size, numel, dtype)[mine]
                start = contribution(9, shard, out_dtype)
                cases: dict[str, tuple[dict[str, Any], torch.Tensor]] = {
                    "sum": ({"average": False}, total),
                    "average": ({"average": True}, total * (1.0 / size)),
                    "scale": ({"average": True, "scale": 0.3}, total * (0.3 / size)),
                    "accumulate": ({"average": False, "accumulate": True}, total + start.float()),
                }
                for name, (options, right) in cases.items():
                    output = start.clone()
                    full = contribution(rank, numel, dtype)
                    pending = collectives.reduce_scatter(output, full, None, async_op=True, what="x", **options)
                    pending.wait()
                    pending.wait()
                    if not torch.equal(output, right.to(out_dtype)):
                        wrong.append(f"{name} {dtype} -> {out_dtype} k={shard}")
                    if not torch.equal(full, contribution(rank, numel, dtype)):
                        wrong.append(f"{name} {dtype}: input changed")
                if out_dtype is dtype:
                    full = contribution(rank, numel, dtype)
                    collectives.reduce_scatter(full[mine], full, None, average=True)
                    if not torch.equal(full[mine], (total * (1.0 / size)).to(dtype)):
                        wrong.append(f"alias {dtype} k={shard}")
    return wrong


@pytest.mark.parametrize(("world", "setting"), WAYS)
def test_reduce_scatter_sums_in_rank_order_in_fp32(pool: Any, world: int, setting: str) -> None:
    assert pool.run(world, carried, reduce_scatter_cases, setting) == [[]] * world


def gather_cases() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shard in (1, 5, 40_000):
            whole = torch.cat([contribution(r, shard, torch.float32).to(dtype) for r in range(size)])
            mine = slice(rank * shard, (rank + 1) * shard)
            output = torch.zeros(shard * size, dtype=dtype)
            pending = collectives.all_gather(output, whole[mine].clone(), None, async_op=True)
            pending.wait()
            if not torch.equal(output, whole):
                wrong.append(f"{dtype} k={shard}")
            output = torch.zeros(shard * size, dtype=dtype)
            output[mine] = whole[mine]
            collectives.all_gather(output, output[mine], None)
            if not torch.equal(output, whole):
                wrong.append(f"in place {dtype} k={shard}")
    return wrong


@pytest.mark.parametrize(("world", "setting"), WAYS)
def test_all_gather_concatenates_and_works_in_place(pool: Any, world: int, setting: str) -> None:
    assert pool.run(world, carried, gather_cases, setting) == [[]] * world


@over_gloo
def gather_by_ring() -> bool:
    collectives.BROADCAST_GATHER_MAX_RANKS = 2
    try:
        return gather_cases() == []
    finally:
        collectives.BROADCAST_GATHER_MAX_RANKS = 8


def test_all_gather_of_large_groups_uses_the_ring_and_agrees(pool: Any) -> None:
    assert pool.run(3, gather_by_ring) == [True] * 3


def all_reduce_cases() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for numel in (1, 2, 11, 12, 70_003):
        for dtype in (torch.float32, torch.bfloat16):
            for op, right in (
                ("sum", expected_sum(size, numel, dtype)),
                ("avg", expected_sum(size, numel, dtype) * (1.0 / size)),
            ):
                tensor = contribution(rank, numel, dtype)
                collectives.all_reduce(tensor, None, op=op, deterministic=True, async_op=True).wait()
                if not torch.equal(tensor, right.to(dtype)):
                    wrong.append(f"deterministic {op} {dtype} {numel}")
                tensor = contribution(rank, numel, dtype)
                collectives.all_reduce(tensor, None, op=op)
                # The backend's own order and 16-bit partial sums: a few ulp of the terms.
                tolerance = 1e-6 if dtype is torch.float32 else 0.05
                if not torch.allclose(tensor.float(), right, rtol=tolerance, atol=tolerance):
                    wrong.append(f"{op} {dtype} {numel}")
    largest = torch.tensor([float(rank), -float(rank)])
    collectives.all_reduce(largest, None, op="max")
    if largest.tolist() != [size - 1.0, 0.0]:
        wrong.append("max")
    return wrong


@pytest.mark.parametrize(("world", "setting"), WAYS)
def test_all_reduce_is_exact_when_deterministic(pool: Any, world: int, setting: str) -> None:
    assert pool.run(world, carried, all_reduce_cases, setting) == [[]] * world


def broadcast_and_exchange() -> tuple[list[float], list[float]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([1, 2])
    tensor = torch.tensor([float(rank)])
    if rank in (1, 2):
        collectives.broadcast(tensor, 1, pair)
    output = torch.empty(size)
    collectives.all_to_all(output, torch.arange(size) + 10.0 * rank, None)
    collectives.barrier()
    return tensor.tolist(), output.tolist()


def test_broadcast_counts_the_source_inside_the_group(pool: Any) -> None:
    results = pool.run(3, broadcast_and_exchange)
    assert [r[0] for r in results] == [[0.0], [2.0], [2.0]]
    assert [r[1] for r in results] == [[0.0, 10.0, 20.0], [1.0, 11.0, 21.0], [2.0, 12.0, 22.0]]


@over_gloo
def staging_bytes() -> tuple[int, int, int]:
    size = dist.get_world_size()
    full = torch.ones(1200 * size)
    shard = torch.empty(1200)
    for _ in range(5):
        collectives.reduce_scatter(shard, full, None, average=True)
    collectives.reduce_scatter(shard[:10], full[: 10 * size], None, average=True)
    sent = facts_of(None).bytes_sent
    return collectives.release_buffers(), full.nbytes, sent


@pytest.mark.parametrize(("world", "share"), ((2, 0.5), (3, 1.0)))
def test_reduce_scatter_stages_at_most_one_bucket_and_counts_its_bytes(pool: Any, world: int, share: float) -> None:
    for staged, bucket, sent in pool.run(world, staging_bytes):
        assert staged == share * bucket
        assert sent == (5 * 1200 + 10) * 4 * (world - 1)


def errors() -> list[str]:
    texts = []
    for call in (
        lambda: collectives.reduce_scatter(torch.empty(3), torch.empty(8), None, average=True),
        lambda: collectives.all_gather(torch.empty(8), torch.empty(4, dtype=torch.bfloat16), None),
        lambda: collectives.all_reduce(torch.empty(8), None, op="mean"),
        lambda: collectives.broadcast(torch.empty(8), 2, None),
    ):
        with pytest.raises(ValueError, match=": ") as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_wrong_arguments_say_what_is_wrong(pool: Any) -> None:
    shapes, dtypes, op, source = pool.run(2, errors)[0]
    assert "2 (ranks) x 3" in shapes
    assert "(8,)" in shapes
    assert "bfloat16" in dtypes
    assert "mean" in op
    assert "product" in op
    assert "source rank 2" in source
