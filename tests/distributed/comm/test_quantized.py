"""Packed collectives on gloo: values, bits, bytes, error feedback, failures, on one and on two levels of groups."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm import collectives, quantized
from deepspeed.comm.blockwise import INT4, INT8, Packing, dequantize, quantize
from deepspeed.comm.group_facts import facts_of
from deepspeed.comm.holders import holders
from deepspeed.comm.levels import Levels, TwoHops
from deepspeed.comm.mesh import ParallelMesh
from deepspeed.comm.quantized import LocoState


def contribution(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(dtype)


def groups_of(inner: int) -> Any:
    """One group for inner=0, else two levels."""
    return ParallelMesh.build().levels(inner) if inner else None


def through_the_wire(values: torch.Tensor, packing: Packing) -> torch.Tensor:
    packed = torch.empty(packing.nbytes(values.numel()), dtype=torch.uint8)
    quantize(packed, values, packing)
    result = torch.empty(values.numel())
    dequantize(result, packed, packing)
    return result


def gather_cases(inner: int) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = groups_of(inner)
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (1, 7, 256, 3001):
            pieces = [contribution(r, numel, dtype) for r in range(size)]
            right = torch.cat([through_the_wire(piece, INT8) if size > 1 else piece for piece in pieces]).to(dtype)
            output = torch.zeros(size * numel, dtype=dtype)
            source = pieces[rank].clone()
            pending = quantized.all_gather(output, source, groups, async_op=True, what="weights")
            source.fill_(99)  # free to change, once sent
            pending.wait()
            pending.wait()
            if not torch.equal(output, right):
                wrong.append(f"{dtype} k={numel}")
            own = output[rank * numel : (rank + 1) * numel]
            own.copy_(pieces[rank])
            quantized.all_gather(output, own, groups)
            if not torch.equal(output, right):
                wrong.append(f"in place {dtype} k={numel}")
            wide = torch.zeros(size * numel)
            quantized.all_gather(wide, pieces[rank], groups)
            if not torch.equal(wide.to(dtype), right):
                wrong.append(f"into fp32 {dtype} k={numel}")
    return wrong


@pytest.mark.parametrize(("world", "inner"), ((1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (4, 0), (4, 2)))
def test_all_gather_gives_every_rank_the_same_bits(pool: Any, world: int, inner: int) -> None:
    assert pool.run(world, gather_cases, inner) == [[]] * world


def expected_shard(numel: int, dtype: torch.dtype, size: int, inner: int, rank: int) -> torch.Tensor:
    """The sum that `rank` keeps, hop by hop, in plain torch."""
    inner = inner or 1
    outer, place, node = size // inner, rank % inner, rank // inner

    def summed(values: list[torch.Tensor], own: int) -> torch.Tensor:
        sent = [value if r == own else through_the_wire(value, INT4) for r, value in enumerate(values)]
        total = sent[0]
        for value in sent[1:]:
            total = total + value
        return total

    def piece(source: int) -> torch.Tensor:
        return contribution(source, size * numel, dtype).float()[rank * numel : (rank + 1) * numel]

    per_node = [summed([piece(n * inner + i) for i in range(inner)], place) for n in range(outer)]
    return summed(per_node, node)


def reduce_cases(inner: int) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = groups_of(inner)
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for numel in (1, 7, 256, 3001):
            total = expected_shard(numel, dtype, size, inner, rank)
            start = contribution(9, numel, dtype)
            cases: dict[str, tuple[dict[str, Any], torch.Tensor]] = {
                "sum": ({"average": False}, total),
                "average": ({"average": True}, total * (1.0 / size)),
                "scale": ({"average": True, "scale": 0.3}, total * (0.3 / size)),
                "accumulate": ({"average": False, "accumulate": True}, total + start.float()),
            }
            for name, (options, right) in cases.items():
                output = start.clone()
                full = contribution(rank, size * numel, dtype)
                pending = quantized.reduce_scatter(output, full, groups, async_op=True, what="bucket", **options)
                if isinstance(pending, TwoHops) and name != "sum":
                    pending.advance()
                    pending.advance()
                pending.wait()
                pending.wait()
                if not pending.is_completed():
                    wrong.append(f"{name}: not completed")
                if not torch.equal(output, right.to(dtype)):
                    wrong.append(f"{name} {dtype} k={numel}")
                if not torch.equal(full, contribution(rank, size * numel, dtype)):
                    wrong.append(f"{name} {dtype}: input changed")
            full = contribution(rank, size * numel, dtype)
            own = full[rank * numel : (rank + 1) * numel]
            quantized.reduce_scatter(own, full, groups, average=True)
            if not torch.equal(own, (total * (1.0 / size)).to(dtype)):
                wrong.append(f"alias {dtype} k={numel}")
    return wrong


@pytest.mark.parametrize(("world", "inner"), ((1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (4, 0), (4, 2)))
def test_reduce_scatter_sums_each_hop_in_rank_order(pool: Any, world: int, inner: int) -> None:
    assert pool.run(world, reduce_cases, inner) == [[]] * world


def bytes_by_group(numel: int) -> dict[str, int]:
    mesh = ParallelMesh.build()
    levels = mesh.levels(2)
    full, shard = torch.ones(4 * numel), torch.ones(numel)
    sent = {}

    def count(name: str, call: Any) -> None:
        groups = {"inner": levels.inner, "outer": levels.outer, "all": None}
        before = {key: facts_of(group).bytes_sent for key, group in groups.items()}
        call()
        for key, group in groups.items():
            sent[f"{name} {key}"] = facts_of(group).bytes_sent - before[key]

    count("gather flat", lambda: quantized.all_gather(full, shard, None))
    count("gather", lambda: quantized.all_gather(full, shard, levels))
    count("reduce flat", lambda: quantized.reduce_scatter(shard, full, None, average=True))
    count("reduce", lambda: quantized.reduce_scatter(shard, full, levels, average=True))
    return sent


@pytest.mark.parametrize("numel", (1024, 1001))
def test_bytes_follow_the_formula(pool: Any, numel: int) -> None:
    small, large = INT4.nbytes(numel), INT8.nbytes(numel)
    right = {"gather flat": (0, 0, 3 * large), "gather": (2 * large, large, 0)}
    right |= {"reduce flat": (0, 0, 3 * small), "reduce": (2 * small, small, 0)}
    for sent in pool.run(4, bytes_by_group, numel):
        for name, (inner, outer, flat) in right.items():
            assert (sent[f"{name} inner"], sent[f"{name} outer"], sent[f"{name} all"]) == (inner, outer, flat), name


def feedback(inner: int) -> tuple[float, float, float, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = groups_of(inner)
    numel, rounds = 700, 40
    full = contribution(rank, size * numel)
    exact = torch.empty(numel)
    collectives.reduce_scatter(exact, full, None, average=True)
    sums = {"plain": torch.zeros(numel), "loco": torch.zeros(numel)}
    loco = LocoState(err_beta=0.5, reset_T=1000)
    for _ in range(rounds):
        for name, state in (("plain", None), ("loco", loco)):
            quantized.reduce_scatter(sums[name], full, groups, average=True, accumulate=True, loco=state)
    errors = [(sums[name] / rounds - exact).abs().max().item() for name in ("plain", "loco")]
    with pytest.raises(ValueError, match="one state serves one bucket"):
        quantized.reduce_scatter(exact[:1], full[:size], groups, average=True, loco=loco)
    return errors[0], errors[1], loco.calls, loco.nbytes


@pytest.mark.parametrize(("world", "inner", "peers"), ((2, 0, 1), (4, 0, 3), (4, 2, 3)))
def test_error_feedback_makes_the_mean_of_many_steps_exact(pool: Any, world: int, inner: int, peers: int) -> None:
    for plain, loco, calls, nbytes in pool.run(world, feedback, inner):
        assert loco < plain / 5
        assert calls == 41
        # Two levels of 2 x 2: one peer inside with two pieces, one between with one.
        assert nbytes == peers * 700 * 4


def resets() -> list[float]:
    loco = LocoState(err_beta=0.0, reset_T=2)
    shard, full = torch.empty(300), contribution(dist.get_rank(), 600)
    seen = []
    for _ in range(4):
        quantized.reduce_scatter(shard, full, None, average=False, loco=loco)
        seen.append(shard.clone())
    half = LocoState(err_beta=0.0, reset_T=2)
    half.load_state_dict(loco.state_dict())
    again = [torch.empty(300), torch.empty(300)]
    for state, output in zip((loco, half), again, strict=True):
        state.rescale(2.0)
        quantized.reduce_scatter(output, full, None, average=False, loco=state)
    pairs = ((seen[2], seen[0]), (seen[1], seen[0]), (again[0], again[1]))
    return [(one - other).abs().sum().item() for one, other in pairs]


def test_error_feedback_starts_again_after_its_time_and_resumes(pool: Any) -> None:
    for same, different, resumed in pool.run(2, resets):
        assert same == 0
        assert different > 0
        assert resumed == 0


def overflow(inner: int) -> tuple[int, bool, bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    numel = 1000
    groups = groups_of(inner)
    loco = LocoState()
    full = contribution(rank, size * numel, torch.float16)
    if rank == size - 1:
        full[300] = math.inf  # in the piece of rank 0
    shard = torch.empty(numel)
    quantized.reduce_scatter(shard, full, groups, average=True, loco=loco)
    strange = int((~shard.isfinite()).sum())
    full[300] = 0
    quantized.reduce_scatter(shard, full, groups, average=True, loco=loco)
    gathered = torch.empty(size * numel)
    shard[0] = math.nan
    quantized.all_gather(gathered, shard, groups)
    lost = gathered.view(size, numel)[:, :256].isnan().all() and gathered.view(size, numel)[:, 256:].isfinite().all()
    return strange, bool(shard[1:].isfinite().all()), bool(lost)


@pytest.mark.parametrize(("world", "inner"), ((2, 0), (4, 2)))
def test_an_overflow_is_seen_and_forgotten(pool: Any, world: int, inner: int) -> None:
    results = pool.run(world, overflow, inner)
    assert [strange for strange, _, _ in results] == [256] + [0] * (world - 1)
    assert all(finite and lost for _, finite, lost in results)


def nothing_kept() -> tuple[int, int]:
    levels = ParallelMesh.build().levels(2)
    full, shard = torch.ones(4 * 999), torch.ones(999)
    kept = []
    for _ in range(2):
        for _ in range(3):
            quantized.reduce_scatter(shard, full, levels, average=True)
            quantized.all_gather(full, shard, levels)
        kept.append(collectives.release_buffers(levels.inner) + collectives.release_buffers(levels.outer))
    return kept[0], kept[1]


def holders_while_the_handle_lives(inner: int) -> list[tuple[int, int]]:
    """Holders of the memory of input and output, before and after."""
    group = groups_of(inner)
    size = dist.get_world_size()
    full, shard = torch.ones(size * 999), torch.ones(999)
    found = []
    for collective, tensors in ((quantized.reduce_scatter, (shard, full)), (quantized.all_gather, (full, shard))):
        before = [holders(tensor) for tensor in tensors]
        options = {"average": True} if collective is quantized.reduce_scatter else {}
        pending = collective(*tensors, group, async_op=True, **options)  # type: ignore[operator]
        pending.wait()
        found += zip(before, [holders(tensor) for tensor in tensors], strict=True)
        assert pending.is_completed()
    return found


@pytest.mark.parametrize(("world", "inner"), ((2, 0), (4, 2)))
def test_a_handle_that_was_waited_for_holds_none_of_the_tensors(pool: Any, world: int, inner: int) -> None:
    """Who reuses a gradient's memory looks whether others hold it, and would wait for us."""
    for found in pool.run(world, holders_while_the_handle_lives, inner):
        assert all(after <= before for before, after in found), found


def test_staging_is_kept_once_and_can_be_released(pool: Any) -> None:
    for first, second in pool.run(4, nothing_kept):
        assert first == second
        # Two packed buffers per group, the larger size serving both collectives, and the sums between the hops.
        assert 0 < first <= 2 * 4 * INT8.nbytes(999) + 2 * INT4.nbytes(999) + 2 * 999 * 4


def divergence(name: str) -> str:
    shard, full = torch.ones(700), torch.ones(1400)
    key = 1 + dist.get_rank()  # buckets of one size that are not the same bucket
    try:
        if name == "reduce":
            quantized.reduce_scatter(shard, full, None, average=True, key=key, what="bucket 3")
        else:
            quantized.all_gather(full, shard, None, key=key, what="block 3")
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "kind", "what"), (("reduce", "all_to_all", "bucket 3"), ("gather", "all_gather", "block 3"))
)
def test_ranks_that_move_different_things_are_told(pool: Any, name: str, kind: str, what: str) -> None:
    texts = pool.run(2, divergence, name)
    assert any(f"has started {kind} of another size or source as the same call" in text for text in texts)
    assert all(kind in text and what in text for text in texts)


def wrong_arguments() -> list[str]:
    levels = ParallelMesh.build().levels(2)
    texts = []
    for call in (
        lambda: quantized.reduce_scatter(torch.empty(3), torch.empty(8), levels, average=True),
        lambda: quantized.all_gather(torch.empty(8), torch.empty(3), None),
        lambda: quantized.all_gather(torch.empty(8, dtype=torch.int64), torch.empty(2, dtype=torch.int64), levels),
        lambda: LocoState(err_beta=1.0),
        lambda: LocoState(reset_T=0),
        lambda: LocoState.from_config({"err_bta": 0.5}),
    ):
        with pytest.raises(ValueError, match=r"[a-zA-Z]") as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_wrong_arguments_say_what_is_wrong(pool: Any) -> None:
    shapes, sizes, dtype, beta, time, key = pool.run(4, wrong_arguments)[1]
    assert "4 (ranks) x 3" in shapes
    assert "4 (ranks) x 3" in sizes
    assert "int64" in dtype
    assert "err_beta=1.0" in beta
    assert "reset_T=0" in time
    assert "'err_bta'; known: err_beta, reset_T" in key


def test_levels_of_one_rank_need_no_group() -> None:
    output = torch.zeros(5)
    quantized.all_gather(output, torch.arange(5.0), Levels(None, None))
    assert output.tolist() == [0, 1, 2, 3, 4]
    quantized.reduce_scatter(output, torch.arange(5.0), Levels(None, None), average=True, accumulate=True)
    assert output.tolist() == [0, 2, 4, 6, 8]
