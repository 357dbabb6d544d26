"""The public collectives: every function against its definition, its log, its errors; starting up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm.init import init_distributed


def mine(*shape: int) -> torch.Tensor:
    """Different on each rank, exact in every dtype used here."""
    numel = int(torch.tensor(shape).prod())
    return torch.arange(numel, dtype=torch.float32).view(shape) + 100.0 * dist.get_rank()


def of(rank: int, *shape: int) -> torch.Tensor:
    return mine(*shape) + 100.0 * (rank - dist.get_rank())


def reductions() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(of(r, 2, 3) for r in range(size))
    tensor = mine(2, 3)
    assert dist.all_reduce(tensor) is None
    assert torch.equal(tensor, total)
    tensor = mine(2, 3)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    assert torch.equal(tensor, total / size)
    tensor = mine(2, 3)
    handle = dist.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, async_op=True)
    handle.wait()
    assert handle.is_completed()
    assert torch.equal(tensor, of(size - 1, 2, 3))
    pair = [mine(2), mine(3)]
    dist.all_reduce_coalesced(pair, op=dist.ReduceOp.AVG)
    assert torch.equal(pair[1], sum(of(r, 3) for r in range(size)) / size)
    tensor = mine(2, 3)
    dist.inference_all_reduce(tensor)
    assert torch.equal(tensor, total)
    tensor = mine(2, 3)
    dist.reduce(tensor, 1, op=dist.ReduceOp.AVG)
    if rank == 1:
        assert torch.equal(tensor, total / size)
    with pytest.raises(TypeError, match=r"ReduceOp, found 'sum'"):
        dist.all_reduce(tensor, op="sum")


def scatters() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = sum(of(r, size, 2) for r in range(size))
    for function in (dist.reduce_scatter_tensor, dist.reduce_scatter_fn):
        output = torch.empty(1, 2)
        function(output, mine(size, 2))
        assert torch.equal(output[0], whole[rank])
    output = torch.empty(2)
    dist.reduce_scatter(output, list(mine(size, 2)), op=dist.ReduceOp.AVG)
    assert torch.equal(output, whole[rank] / size)
    output = torch.empty(2)
    dist.reduce_scatter_tensor(output, mine(size * 2), op=dist.ReduceOp.MAX)
    assert torch.equal(output, of(size - 1, size * 2)[rank * 2 : rank * 2 + 2])
    integers = torch.empty(2, dtype=torch.int64)
    dist.reduce_scatter_tensor(integers, torch.full((size * 2,), 2**60 + rank))
    assert integers.tolist() == [size * 2**60 + sum(range(size))] * 2  # not by way of floats
    strided = torch.zeros(2, 2)
    dist.reduce_scatter(strided[:, 0], list(mine(size, 2)))
    assert torch.equal(strided, torch.stack([whole[rank], torch.zeros(2)], dim=1))
    with pytest.raises(ValueError, match=rf"needs {size} tensors of the output's shape \(2,\)"):
        dist.reduce_scatter(torch.empty(2), [torch.empty(2)] * (size + 1))


def gathers() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(parts, mine(2, 3))
    assert all(torch.equal(part, of(r, 2, 3)) for r, part in enumerate(parts))
    whole = torch.empty(size * 2, 3)
    for function in (dist.all_gather_into_tensor, dist.allgather_fn):
        whole.zero_()
        function(whole, mine(2, 3))
        assert torch.equal(whole, torch.cat([of(r, 2, 3) for r in range(size)]))
    outputs = [torch.empty(size * 2), torch.empty(size, 3)]
    handle = dist.all_gather_coalesced(outputs, [mine(2), mine(1, 3)], async_op=True)
    handle.wait()
    assert torch.equal(outputs[0], torch.cat([of(r, 2) for r in range(size)]))
    assert torch.equal(outputs[1], torch.cat([of(r, 1, 3) for r in range(size)]))
    received = [torch.empty(2) for _ in range(size)] if rank == 1 else None
    dist.gather(mine(2), received, dst=1)
    if received is not None:
        assert torch.equal(torch.stack(received), torch.stack([of(r, 2) for r in range(size)]))
    piece = torch.empty(2)
    dist.scatter(piece, list(mine(size, 2)) if rank == 0 else None, src=0)
    assert torch.equal(piece, of(0, size, 2)[rank])
    tensor = mine(4)
    dist.broadcast(tensor, src=size - 1)
    assert torch.equal(tensor, of(size - 1, 4))


def exchanges() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    output = torch.empty(size, 2)
    dist.all_to_all_single(output, mine(size, 2))
    assert torch.equal(output, torch.stack([of(r, size, 2)[rank] for r in range(size)]))
    # Rank r sends r + 1 rows to everybody.
    output = torch.empty(sum(range(1, size + 1)), 2)
    sent = mine((rank + 1) * size, 2)
    dist.all_to_all_single(output, sent, list(range(1, size + 1)), [rank + 1] * size)
    right = torch.cat([of(r, (r + 1) * size, 2)[rank * (r + 1) : (rank + 1) * (r + 1)] for r in range(size)])
    assert torch.equal(output, right)
    parts = [torch.empty(2, r + 1) for r in range(size)]
    dist.all_to_all(parts, [mine(2, rank + 1) + r for r in range(size)])
    assert all(torch.equal(part, of(r, 2, r + 1) + rank) for r, part in enumerate(parts))


def transfers() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    tensor = torch.empty(3)
    handles = [dist.isend(mine(3), following), dist.irecv(tensor, previous)]
    for handle in handles:
        handle.wait()
    assert torch.equal(tensor, of(previous, 3))
    if rank == 0:
        dist.send(mine(2), 1)
    elif rank == 1:
        tensor = torch.empty(2)
        assert dist.recv(tensor) == 0  # from anybody: the sender is told
        assert torch.equal(tensor, of(0, 2))
    tensor = torch.empty(3)
    batch = [
        dist.P2POp(dist.isend, mine(3), following),
        torch.distributed.P2POp(torch.distributed.irecv, tensor, previous),
    ]
    for handle in dist.batch_isend_irecv(batch):
        handle.wait()
    assert torch.equal(tensor, of(previous, 3))
    with pytest.raises(ValueError, match="isend or irecv"):
        dist.P2POp(dist.broadcast, tensor, following)


def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "pad": "x" * (10 * rank)})
    assert [entry["rank"] for entry in found] == list(range(size))
    entries = [1, "two"] if rank == 1 else [None, None]
    dist.broadcast_object_list(entries, src=1)
    assert entries == [1, "two"]
    dist.monitored_barrier(timeout=timedelta(seconds=20))


def outside_a_group() -> None:
    rank = dist.get_rank()
    group = dist.new_group([0])
    results = [
        dist.all_reduce(torch.ones(1), group=group),
        dist.barrier(group=group),
        dist.all_gather_into_tensor(torch.ones(1), torch.ones(1), group=group),
        dist.reduce_scatter_tensor(torch.ones(1), torch.ones(1), group=group),
    ]
    assert results == [None] * 4
    assert dist.get_rank(group) == (0 if rank == 0 else -1)
    if rank == 0:
        assert dist.get_all_ranks_from_group(group) == [0]
        assert dist.get_global_rank(group, 0) == 0
    assert dist.get_world_group() is torch.distributed.group.WORLD
    assert dist.get_backend() == "gloo"


def shapes_strides_and_dtypes() -> None:
    """What ranks may do differently, and what gloo does not take: the same results by either transport."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):  # the first calls of a group go by gloo
        for dtype in (torch.float32, torch.int64, torch.bool):
            scalar = torch.zeros((), dtype=dtype)
            dist.reduce_scatter(scalar, [torch.ones((), dtype=dtype)] * size)
            assert scalar == torch.tensor(size).to(dtype)
            # One rank has strided tensors, the others dense ones.
            wide = torch.zeros(2, 2, dtype=dtype)
            output = wide[:, 0] if rank == 0 else wide[0]
            whole = torch.ones(2 * size, 2, dtype=dtype)[:, 0] if rank == 0 else torch.ones(2 * size, dtype=dtype)
            dist.reduce_scatter_tensor(output, whole)
            assert output.tolist() == [torch.tensor(size).to(dtype).item()] * 2
            everything = torch.zeros(size * 2, 2, dtype=dtype)
            gathered = everything[:, 0] if rank == 0 else torch.zeros(size * 2, dtype=dtype)
            dist.all_gather_into_tensor(gathered, output)
            assert bool((gathered == output[0]).all())
        numbers = torch.full((2,), 1j * rank)
        gathered = torch.zeros(2 * size, dtype=numbers.dtype)
        dist.all_gather_into_tensor(gathered, numbers.conj())
        assert gathered[::2].tolist() == [-1j * r for r in range(size)]
    with pytest.raises(ValueError, match=rf"must have {size} \(ranks\) x 3 elements"):
        dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(3 * size + 1))
    with pytest.raises(ValueError, match=rf"must have {size} \(ranks\) x 3 elements of torch.float32"):
        dist.all_gather_into_tensor(torch.zeros(3 * size, dtype=torch.float64), torch.zeros(3))


def handles() -> None:
    """A result is in place after `wait`, after a poll that says so, and when the future is there."""
    size = dist.get_world_size()
    finish: list[Callable[[Any], object]] = [lambda h: h.wait(), poll, lambda h: h.get_future().wait()]
    for way in finish * 2:
        wide, output, integers = torch.ones(4, 2), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
        ones = torch.ones(2 * size)
        for handle in (
            dist.all_reduce(wide[:, 0], op=dist.ReduceOp.AVG, async_op=True),
            dist.all_reduce(wide[:, 1], async_op=True),
            dist.reduce_scatter_tensor(output, ones, async_op=True),
            dist.reduce_scatter_tensor(integers, ones.long(), async_op=True),
        ):
            way(handle)
        assert wide.tolist() == [[1.0, size]] * 4
        assert output.tolist() == integers.tolist() == [size] * 2
    assert dist.all_reduce(torch.ones(2), async_op=True).wait(timeout=timedelta(seconds=60)) is True


def poll(handle: Any) -> None:
    end = time.monotonic() + 30
    while not handle.is_completed():
        assert time.monotonic() < end


def refused_on_all_ranks() -> None:
    """What every rank is refused does not look like ranks that diverge, whoever goes on first."""
    for length in range(1, 30):
        with pytest.raises(ValueError, match="complex"):
            dist.all_reduce(torch.ones(3, dtype=torch.complex64), op=dist.ReduceOp.MAX)
        tensor = torch.ones(length)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        dist.broadcast(tensor, 0)


def over_gloo() -> None:
    with patch.dict(os.environ, DS_SHM="0"):
        shapes_strides_and_dtypes()
        handles()


PARTS = (
    reductions, scatters, gathers, exchanges, transfers, objects, outside_a_group, shapes_strides_and_dtypes, handles,
    refused_on_all_ranks, over_gloo,
)  # fmt: skip


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_functions_do_what_their_names_say(pool: Any, part: Callable[[], None], world: int) -> None:
    pool.run(world, part)


def refused_by_the_backend() -> tuple[float, str]:
    start = time.monotonic()
    with pytest.raises(dist.CollectiveError) as caught:
        dist.reduce_scatter_tensor(torch.ones(1), torch.ones(dist.get_world_size()), op=dist.ReduceOp.BXOR)
    return time.monotonic() - start, str(caught.value)


def test_what_the_backend_refuses_is_told_at_once(pool: Any) -> None:
    for seconds, text in pool.run(2, refused_by_the_backend):
        assert seconds < 20  # not the limit of the group, 30 minutes
        assert "Cannot use ReduceOp.BXOR" in text


def late_rank() -> dict[str, Any]:
    dist.configure(enabled=True, prof_all=True)
    try:
        for _ in range(4):
            if dist.get_rank() == 1:
                time.sleep(0.05)
            dist.all_reduce(torch.ones(1000))
        dist.all_gather_into_tensor(torch.empty(200), torch.ones(100), log_name="weights")
        return dist.log_summary(show_straggler=True)
    finally:
        dist.configure(enabled=False)
        dist.reset_log()


def test_the_log_returns_counts_sizes_times_and_the_late_rank(pool: Any) -> None:
    on_time, late = pool.run(2, late_rank)
    record = on_time["summary"]["all_reduce"][4000]
    assert record["count"] == 4
    assert record["msg_size_bytes"] == 4000
    assert record["avg_latency_ms"] > 30  # it waited 50 ms for the other, each time
    assert on_time["summary"]["weights"][400]["count"] == 1
    waited = on_time["straggler_analysis"]["all_reduce"][4000]
    assert waited["late_rank"] == 1
    assert waited["avg_straggler_ms"] > 30
    assert late["straggler_analysis"]["all_reduce"][4000]["late_rank"] == 1
    assert late["straggler_analysis"]["all_reduce"][4000]["avg_straggler_ms"] < 30


def log_by_config() -> tuple[list[str], int]:
    section = SimpleNamespace(enabled=True, prof_all=False, prof_ops=["broadcast"], verbose=False, debug=True)
    dist.configure(SimpleNamespace(comms_config=SimpleNamespace(comms_logger_enabled=True, comms_logger=section)))
    try:
        dist.broadcast(torch.ones(2), 0)
        dist.barrier()
        dist.all_reduce(torch.ones(2), prof=True)
        return dist.get_logged_comm_ops(), dist.get_comm_operation_count()
    finally:
        dist.configure(enabled=False, debug=False, prof_all=True, prof_ops=[])
        dist.reset_log()


def test_the_log_records_what_the_config_names_and_who_called(pool: Any) -> None:
    names, count = pool.run(2, log_by_config)[0]
    assert names == ["broadcast | [Caller Func: log_by_config]", "all_reduce | [Caller Func: log_by_config]"]
    assert count == 2


@patch.dict(os.environ)
def start_alone() -> tuple[int, int, float]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"call deepspeed\.init_distributed"):
        dist.get_rank()
    with pytest.raises(RuntimeError, match="dist_init_required=False"):
        deepspeed.init_distributed(dist_init_required=False)
    deepspeed.init_distributed()
    deepspeed.init_distributed()  # no-op
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert "RANK" not in os.environ
    return dist.get_rank(), dist.get_world_size(), tensor.sum().item()


def test_a_process_without_launcher_is_a_world_of_one(pool: Any) -> None:
    assert pool.run(1, start_alone, create_group=False) == [(0, 1, 2.0)]


@patch.dict(os.environ)
def start_by_arguments(path: str) -> tuple[int, int]:
    rank, size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
    init_distributed("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    dist.barrier()
    return dist.get_rank(), dist.get_world_size()


def test_rank_and_size_can_be_arguments(pool: Any, tmp_path: Any) -> None:
    assert pool.run(2, start_by_arguments, str(tmp_path / "meet"), create_group=False) == [(0, 2), (1, 2)]


@patch.dict(os.environ)
def start_by_open_mpi() -> tuple[int, str]:
    rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    os.environ.pop("LOCAL_RANK")
    for name, value in (("RANK", rank), ("SIZE", size), ("LOCAL_RANK", rank), ("LOCAL_SIZE", size)):
        os.environ[f"OMPI_COMM_WORLD_{name}"] = value
    deepspeed.init_distributed("gloo")
    dist.barrier()
    return dist.get_rank(), os.environ["LOCAL_RANK"]


def test_open_mpi_variables_start_a_world_and_set_what_clients_read(pool: Any) -> None:
    assert pool.run(2, start_by_open_mpi, create_group=False) == [(0, "0"), (1, "1")]


@patch.dict(os.environ)
def start_where_nobody_answers() -> str:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "1"
    os.environ["WORLD_SIZE"] = "2"
    with pytest.raises(RuntimeError) as caught:
        deepspeed.init_distributed("gloo", timeout=timedelta(seconds=1))
    return str(caught.value)


def test_ranks_that_cannot_meet_say_where_they_waited(pool: Any) -> None:
    (text,) = pool.run(1, start_where_nobody_answers, create_group=False)
    assert "rank 1 of 2 could not meet the other ranks at 127.0.0.1:" in text
    assert "MASTER_PORT" in text


@patch.dict(os.environ)
def start_again_after_a_failure() -> int:
    if dist.get_local_rank() == 0:
        with patch.dict(os.environ, RANK="1", LOCAL_RANK="1", MASTER_PORT="1"), pytest.raises(RuntimeError):
            deepspeed.init_distributed("gloo", timeout=timedelta(seconds=1))
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=30))
    dist.barrier()
    return dist.get_rank()


def test_a_failed_start_can_be_repeated(pool: Any) -> None:
    assert pool.run(2, start_again_after_a_failure, create_group=False) == [0, 1]


@patch.dict(os.environ)
def wrong_arguments() -> None:
    with pytest.raises(ValueError, match="rank=1 and world_size=-1: give both or neither"):
        init_distributed("gloo", rank=1)
    with pytest.raises(ValueError, match="rank=2 must be below world_size=2"):
        init_distributed("gloo", rank=2, world_size=2)
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    with pytest.raises(ValueError, match="needs this process's place"):
        init_distributed("gloo", init_method="tcp://127.0.0.1:1")


def test_incomplete_arguments_are_refused(pool: Any) -> None:
    pool.run(1, wrong_arguments, create_group=False)


def refused_alone() -> float:
    """A group of one refuses a call; the ranks' other groups go on."""
    rank = dist.get_rank()
    alone = [dist.new_group([number]) for number in range(dist.get_world_size())][rank]
    if rank == 0:
        with pytest.raises((dist.CollectiveError, RuntimeError)):
            torch_dist_refusal(alone)
    tensor = torch.ones(4)
    for _ in range(4):
        dist.all_reduce(tensor)
    return float(tensor[0])


def torch_dist_refusal(group: Any) -> None:
    from deepspeed.comm import watch
    from deepspeed.comm.group_facts import facts_of
    from deepspeed.comm.pending import Pending, WaitMode

    call = Pending((), None, facts_of(group), "all_reduce", "", 0, WaitMode.SLICES)
    raise watch.failure(call, RuntimeError("refused"), 1.0)


def test_a_failure_in_a_group_of_one_is_told_to_nobody(pool: Any) -> None:
    assert set(pool.run(2, refused_alone)) == {16.0}
