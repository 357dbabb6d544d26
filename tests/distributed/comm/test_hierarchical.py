"""Two-hop collectives on gloo: order, aliasing, every way a hop can be carried, bytes; and the groups they run on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm import collectives, hierarchical
from deepspeed.comm.group_facts import facts_of
from deepspeed.comm.levels import TwoHops
from deepspeed.comm.mesh import ParallelMesh
from deepspeed.utils import groups


def contribution(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(dtype)


def gather_cases(inner: int, largest: int) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    levels = ParallelMesh.build().levels(inner)
    wrong = []
    before, collectives.BROADCAST_GATHER_MAX_RANKS = collectives.BROADCAST_GATHER_MAX_RANKS, largest
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            for numel in (1, 7, 20_000):
                pieces = [contribution(r, numel).mul(50).to(dtype) for r in range(size)]
                right = torch.cat(pieces)
                output = torch.zeros(size * numel, dtype=dtype)
                pending = hierarchical.all_gather(output, pieces[rank].clone(), levels, async_op=True, what="x")
                if isinstance(pending, TwoHops) and numel == 7:
                    pending.advance()
                pending.wait()
                pending.wait()
                if not torch.equal(output, right):
                    wrong.append(f"{dtype} k={numel}")
                output = torch.zeros(size * numel, dtype=dtype)
                own = output[rank * numel : (rank + 1) * numel]
                own.copy_(pieces[rank])
                hierarchical.all_gather(output, own, levels)
                if not torch.equal(output, right):
                    wrong.append(f"in place {dtype} k={numel}")
    finally:
        collectives.BROADCAST_GATHER_MAX_RANKS = before
    return wrong


# largest=1: as backends gather that fill one run of memory at a time.
@pytest.mark.parametrize("largest", (8, 1))
@pytest.mark.parametrize(("world", "inner"), ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2)))
def test_all_gather_concatenates_in_the_order_of_the_ranks(pool: Any, world: int, inner: int, largest: int) -> None:
    assert pool.run(world, gather_cases, inner, largest) == [[]] * world


def bytes_and_order() -> tuple[int, int, int, bool]:
    levels = ParallelMesh.build().levels(2)
    output, own = torch.zeros(4 * 1000), torch.ones(1000)
    sent = [facts_of(group).bytes_sent for group in levels]
    pending = hierarchical.all_gather(output, own, levels, async_op=True)
    early = pending.is_completed()
    pending.wait()
    inside, between = (facts_of(group).bytes_sent - old for group, old in zip(levels, sent, strict=True))
    return inside, between, levels.rank, early


def test_a_piece_crosses_between_nodes_once(pool: Any) -> None:
    results = pool.run(4, bytes_and_order)
    assert [r[0] for r in results] == [8000] * 4
    assert [r[1] for r in results] == [4000] * 4
    assert [r[2] for r in results] == [0, 1, 2, 3]
    assert not any(r[3] for r in results)


def sharded_inside() -> list[str]:
    """The gradients of MiCS: summed inside in every micro-step, between at the end."""
    rank = dist.get_rank()
    levels = ParallelMesh.build().levels(2)
    numel, wrong = 501, []
    for dtype in (torch.float32, torch.bfloat16):
        shard = torch.zeros(numel)
        right = torch.zeros(4, numel)
        place = rank % 2
        for micro in range(2):
            full = [contribution(10 * micro + r, 2 * numel, dtype) for r in range(4)]
            collectives.reduce_scatter(shard, full[rank], levels.inner, average=True, accumulate=True)
            for node in range(2):
                pair = [full[2 * node + i].float()[place * numel : (place + 1) * numel] for i in range(2)]
                right[node] += (pair[0] + pair[1]) * 0.5
        pending = hierarchical.all_reduce_shard(shard, levels, average=True, async_op=True, what="shard")
        pending.wait()
        if not torch.equal(shard, (right[0] + right[1]) * 0.5):
            wrong.append(f"{dtype}")
    return wrong


def test_shards_are_summed_between_nodes_in_order(pool: Any) -> None:
    assert pool.run(4, sharded_inside) == [[]] * 4


def axes() -> dict[str, Any]:
    mesh = ParallelMesh.build()
    with pytest.raises(ValueError, match="no blocks of inner=None in zero; sizes in use: none; see add_zero_levels"):
        mesh.group("zero_inner")
    mesh.add_zero_levels(2)
    found: dict[str, Any] = {axis: mesh.ranks(axis) for axis in ("zero_inner", "zero_outer")}
    levels = mesh.levels(2)
    found["same"] = levels.inner is mesh.group("zero_inner") and levels.outer is mesh.group("zero_outer")
    found["has"] = mesh.has("zero_inner"), mesh.has("zero_inner", inner=4)
    mesh.add_zero_levels(4)
    found["of 4"] = mesh.size("zero_inner", inner=4), mesh.rank("zero_inner", inner=4), mesh.size("zero_outer", inner=4)
    found["world"] = mesh.group("zero_inner", inner=4) is dist.group.WORLD
    with pytest.raises(ValueError, match=r"has the sizes \(2, 4\): say which, as inner="):
        mesh.group("zero_outer")
    with pytest.raises(ValueError, match=r"inner=3 does not divide the 4 ranks .*dp 4 x sp 1\); 4 = 1 x 3 \+ 1"):
        mesh.levels(3)
    with pytest.raises(ValueError, match="blocks of 2 ranks cannot be cut into blocks of inner=4"):
        mesh.levels(4, within=2)
    within = mesh.levels(1, within=2)
    found["within"] = [dist.get_process_group_ranks(group) for group in within]
    return found


def test_blocks_of_zero_are_axes_of_the_mesh(pool: Any) -> None:
    results = pool.run(4, axes)
    assert [r["zero_inner"] for r in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [r["zero_outer"] for r in results] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert all(r["same"] and r["world"] and r["has"] == (True, False) for r in results)
    assert [r["of 4"] for r in results] == [(4, rank, 1) for rank in range(4)]
    assert [r["within"] for r in results] == [[[0], [0, 1]], [[1], [0, 1]], [[2], [2, 3]], [[3], [2, 3]]]


def historical_names() -> tuple[Any, ...]:
    before = groups._zero_param_parallel_is_initialized()
    with pytest.raises(ValueError, match=r"zero_hpz_partition_size=3 does not divide the 4 ranks"):
        groups._create_zero_param_parallel_group(3)
    groups._create_zero_param_parallel_group(2)
    group = groups._get_zero_param_intra_parallel_group()
    after = groups._zero_param_parallel_is_initialized()
    ranks = groups._get_zero_param_intra_parallel_group_ranks()
    size = groups._get_zero_param_intra_parallel_group_world_size()
    place = groups._get_zero_param_intra_parallel_rank_in_mygroup()
    return before, after, dist.get_process_group_ranks(group) == ranks, ranks, size, place


def test_historical_names_of_the_secondary_groups(pool: Any) -> None:
    for rank, found in enumerate(pool.run(4, historical_names)):
        block = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found == (False, True, True, block, 2, rank % 2)


def wrong_arguments() -> list[str]:
    levels = ParallelMesh.build().levels(2)
    texts = []
    for call in (
        lambda: hierarchical.all_gather(torch.empty(9), torch.empty(2), levels),
        lambda: hierarchical.all_gather(torch.empty(8), torch.empty(2, dtype=torch.bfloat16), levels),
    ):
        with pytest.raises(ValueError, match="all_gather: ") as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_wrong_arguments_say_what_is_wrong(pool: Any) -> None:
    shapes, dtypes = pool.run(4, wrong_arguments)[2]
    assert "4 (ranks) x 2" in shapes
    assert "bfloat16" in dtypes


def another_second_hop() -> str:
    levels = ParallelMesh.build().levels(2)
    output = torch.zeros(4)
    pending = hierarchical.all_gather(output, torch.ones(1), levels, async_op=True, what="block 7")
    assert isinstance(pending, TwoHops)
    if dist.get_rank() == 3:
        pending._start_second = lambda: collectives.all_reduce(output, levels.inner, what="norm", async_op=True)
    try:
        pending.wait()
    except RuntimeError as error:
        return str(error)
    return "finished"


def test_a_rank_that_starts_another_second_hop_is_named(pool: Any) -> None:
    texts = pool.run(4, another_second_hop)
    told = [text for text in texts if "as the same call" in text]
    assert told
    assert any("rank 3 has started all_reduce" in text or "rank 2 has started all_gather" in text for text in told)
