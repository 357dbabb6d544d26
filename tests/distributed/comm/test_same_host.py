"""Shared memory between ranks: who gets it, that all agree, and what happens when a rank is late, dies or forks."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm import collectives, same_host, shm_channel
from deepspeed.comm.group_facts import facts_of
from deepspeed.native.build import NativeUnavailable
from tests.harness.programs import run_programs

LIMIT_S = 2.0


def meet(group: Any = None) -> str:
    """After the calls beside which the ranks meet: what carries the group's tensors."""
    for _ in range(3):
        collectives.barrier(group)
    return same_host.describe(group)


def start_with_limit() -> int:
    dist.barrier()
    dist.destroy_process_group()
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=LIMIT_S))
    meet()
    return dist.get_rank()


def caught(call: Callable[[], object]) -> tuple[float, str]:
    begin = time.monotonic()
    try:
        call()
    except dist.CollectiveError as error:
        return time.monotonic() - begin, str(error)
    return time.monotonic() - begin, "no error"


def groups_of_any_size() -> list[str]:
    rank = dist.get_rank()
    groups = [None, dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([2])]
    found = []
    for group in groups:
        if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
            continue
        found.append(meet(group))
        tensor = torch.tensor([1.0 + rank])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(1.0 + member for member in dist.get_all_ranks_from_group(group))
    assert open_descriptors() == 0
    return found


def open_descriptors() -> int:
    """Of the memory that ranks share: none once they have met."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{descriptor}"):
            count += "deepspeed-transport" in os.readlink(f"/proc/self/fd/{descriptor}")
    return count


def test_groups_of_one_host_use_shared_memory(pool: Any) -> None:
    shared, alone = "shared memory", "nothing: the group has one rank"
    first, second, third = pool.run(3, groups_of_any_size)
    assert (first, second, third) == ([shared] * 2, [shared] * 3, [shared] * 2 + [alone])


def unwilling(reason: str) -> tuple[str, float]:
    """One rank of two does not take part, for this reason."""
    changes: dict[str, Any] = {}
    odd = dist.get_rank() == 1
    if odd and reason == "host":
        changes = {"host_identity": lambda: b"another machine."}
    elif odd and reason == "compiler":
        changes = {"shm_channel": type("without", (), {"library": staticmethod(no_library)})}
    refusing = {"DS_SHM": "0"} if odd and not changes else {}
    with patch.multiple(same_host, __name__=same_host.__name__, **changes), patch.dict(os.environ, refusing):
        carrier = meet()
        tensor = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(tensor)
    return carrier, tensor.item()


def no_library() -> None:
    raise NativeUnavailable("no C++ compiler found")


@pytest.mark.parametrize(
    ("reason", "text"), (("host", "on several hosts"), ("compiler", "no C++ compiler"), ("variable", "DS_SHM=0 is set"))
)
def test_one_rank_that_cannot_is_enough_for_all_to_use_gloo(pool: Any, reason: str, text: str) -> None:
    (first, sum_0), (second, sum_1) = pool.run(2, unwilling, reason)
    assert sum_0 == sum_1 == 3
    assert first.startswith("gloo, because ")
    assert text in second
    assert ("several hosts" if reason == "host" else "rank 1 does not use it") in first


def no_descriptor_left(fact: str) -> str:
    """A rank that cannot even look up what it says of itself sends its card all the same."""
    failing = patch.object(same_host, fact, side_effect=OSError(24, "Too many open files"))
    with failing if dist.get_rank() == 1 else contextlib.nullcontext():
        found = meet()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    return found


@pytest.mark.parametrize("fact", ("_version", "host_identity", "_start_time"))
def test_a_rank_without_descriptors_does_not_leave_the_others_waiting(pool: Any, fact: str) -> None:
    one, two = pool.run(2, no_descriptor_left, fact)
    assert one == "gloo, because rank 1 does not use it"
    assert "Too many open files" in two


def begin_again(calls: int, folder: Path) -> None:
    """Through the store of the environment's port, which is a new one only where nothing holds the last.

    Rank 0 has the store and ends it first: whoever came before would join the old one, with any code.
    """
    hosts_store = os.environ["RANK"] == "0"
    gc.disable()
    try:
        for number in range(3):
            deepspeed.init_distributed("gloo", timeout=timedelta(seconds=10))
            for _ in range(calls):
                dist.all_reduce(torch.ones(2))
            dist.barrier()
            dist.destroy_process_group()
            ended = folder / str(number)
            if hosts_store:
                ended.touch()
            while not ended.exists():
                time.sleep(0.001)
    finally:
        gc.enable()


@pytest.mark.parametrize("calls", (0, 1, 4))
def test_a_group_that_ends_in_any_step_of_the_meeting_keeps_no_store(pool: Any, calls: int, tmp_path: Path) -> None:
    pool.run(2, begin_again, calls, tmp_path, create_group=False)


def memory_that_cannot_be_opened() -> str:
    if dist.get_rank() == 0:
        real = shm_channel.library()

        class Failing:
            def __getattr__(self, name: str) -> Any:
                return (lambda *args: 13) if name == "ds_shm_attach" else getattr(real, name)

        with patch.object(shm_channel, "library", Failing):
            return meet()
    return meet()


def test_a_rank_that_cannot_map_the_others_makes_all_use_gloo(pool: Any) -> None:
    first, second = pool.run(2, memory_that_cannot_be_opened)
    assert first == "gloo, because the memory of rank 1 cannot be opened here"
    assert second == "gloo, because rank 0 cannot open the memory of another"


def late_rank(done: str) -> tuple[float, str]:
    rank = start_with_limit()
    if rank == 1:
        while not Path(done).exists():
            time.sleep(0.02)
        return caught(dist.barrier)
    told = caught(lambda: collectives.all_reduce(torch.ones(5), None, what="the norm"))
    Path(done).touch()
    return told


def test_a_rank_that_does_not_come_is_named_at_the_limit(pool: Any, tmp_path: Path) -> None:
    (seconds, text), (_, late) = pool.run(2, late_rank, str(tmp_path / "done"))
    assert LIMIT_S - 0.5 < seconds < LIMIT_S + 4
    assert text.startswith("rank 0: all_reduce (call 4 of the default group, 2 ranks, 20 B) of the norm: not finished ")
    assert "nothing has come from rank 1" in text
    assert "(late_rank)" in text  # where it was meanwhile
    assert late.startswith("rank 1: barrier (call 4 ")


def diverge() -> tuple[float, str]:
    rank = start_with_limit()
    return caught(lambda: collectives.all_reduce(torch.ones(8 if rank else 12), None))


def test_ranks_that_diverge_are_told_at_once(pool: Any) -> None:
    for rank, (seconds, text) in enumerate(pool.run(2, diverge)):
        assert f"rank {1 - rank} has started " in text
        assert seconds < LIMIT_S


def wait_orders() -> list[float]:
    """Several groups, calls of all sizes, each rank waits in its own order, while others only compute."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 1])
    groups = [None, pair] if rank < 2 else [None]
    for group in groups:
        meet(group)
    tensors, handles = [], []
    for numel in (3, 6_000_001, 40_000, 5):
        for group in groups:
            tensors.append(torch.full((numel,), 1.0 + rank))
            handles.append(dist.all_reduce(tensors[-1], group=group, async_op=True))
    if rank == 1:
        time.sleep(0.3)
    for handle in reversed(handles) if rank else handles:
        handle.wait()
    dist.barrier()
    whole, two = size * (size + 1) / 2, 3.0
    right = [two if rank < 2 and place % 2 else whole for place in range(len(tensors))]
    return [float((tensor != value).sum()) for tensor, value in zip(tensors, right, strict=True)]


def test_calls_under_way_may_be_waited_for_in_any_order(pool: Any) -> None:
    assert not any(wrong for found in pool.run(4, wait_orders) for wrong in found)


def strided_and_odd() -> None:
    rank = dist.get_rank()
    meet()
    wide = torch.zeros(4, 6)
    wide[:, ::2] = rank + 1.0
    dist.all_reduce(wide[:, ::2])
    assert torch.equal(wide[:, ::2], torch.full((4, 3), 3.0))
    assert not wide[:, 1::2].any()
    dist.broadcast(wide.t()[2], 1)
    flags = torch.tensor([rank == 0, False])
    found = [torch.zeros(2, dtype=torch.bool) for _ in range(2)]
    dist.all_gather(found, flags)
    assert [entry.tolist() for entry in found] == [[True, False], [False, False]]
    numbers = torch.zeros(2, dtype=torch.complex64)
    dist.broadcast(numbers, 0)
    handle = dist.all_reduce(torch.ones(3), async_op=True)
    assert handle.get_future().wait()[0].tolist() == [2.0] * 3
    assert handle.result()[0].tolist() == [2.0] * 3
    handle.wait()
    piece = torch.empty(2)
    dist.scatter(piece, [torch.ones(2), torch.zeros(2)] if rank == 0 else None, src=0)  # by gloo, between the others
    assert piece.tolist() == [1.0 - rank] * 2


def test_strides_other_dtypes_and_calls_by_gloo_between(pool: Any) -> None:
    pool.run(2, strided_and_odd)


def short_way() -> list[float]:
    """Blocking sums next to the general forms of the same call, on ranks that differ in it and come late."""
    rank, size = dist.get_rank(), dist.get_world_size()
    meet()
    facts = facts_of(None)
    before, found = facts.calls, []
    for number in range(60):
        tensor = torch.full((3, number % 5), float(rank + number))
        if number % 20 == 3 and rank == 0:
            time.sleep(0.01)  # longer than the first look of the others
        if (number + rank) % 3 == 0:
            handle = dist.all_reduce(tensor, async_op=True)
            handle.wait()
        elif (number + rank) % 3 == 1:
            assert dist.all_reduce(tensor.t() if number % 2 else tensor) is None  # strides: the general way
        else:
            assert dist.all_reduce(tensor) is None
        if tensor.numel():
            found.append(float(tensor.mean()))
            assert found[-1] == sum(range(size)) + size * number
    assert facts.calls - before == 60
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        tensor = torch.ones(5, dtype=dtype)
        dist.all_reduce(tensor)
        assert tensor.double().eq(1.0 if dtype is torch.bool else size).all()
    return found


@pytest.mark.parametrize("world", (2, 3))
def test_the_short_way_and_the_general_one_meet(pool: Any, world: int) -> None:
    assert len({tuple(found) for found in pool.run(world, short_way)}) == 1


def averages() -> list[list[float]]:
    rank = dist.get_rank()
    meet()
    large = torch.full((3, 2), 60_000.0, dtype=torch.float16).t()  # the sum of two is beyond fp16
    # The sum lies between two bf16 numbers, and a third of the nearer one is rounded to another mean.
    odd = torch.full((5,), 253.0 if rank == 0 else 5.0).bfloat16()
    whole = torch.full((4,), 1.0 + rank)
    handle = dist.all_reduce(odd, op=dist.ReduceOp.AVG, async_op=True)
    for tensor in (large, whole):
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    handle.wait()
    return [tensor.flatten().unique().tolist() for tensor in (large, odd, whole)]


def test_averages_of_16_bits_are_rounded_once(pool: Any) -> None:
    mean = [torch.tensor((253.0 + 2 * 5.0) / 3).bfloat16().item()]
    assert pool.run(3, averages) == [[[60_000.0], mean, [2.0]]] * 3


def nothing_at_all() -> int:
    """Empty tensors by every call, waited for at once by some ranks and later by others; the next call is right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    meet()
    facts, empty = facts_of(None), torch.ones(3, 0)
    before = facts.calls
    calls: list[Callable[[bool], Any]] = [
        lambda later: dist.all_reduce(empty, async_op=later),
        lambda later: dist.all_reduce(empty, op=dist.ReduceOp.MAX, async_op=later),
        lambda later: dist.broadcast(empty, 0, async_op=later),
        lambda later: dist.all_gather([torch.ones(3, 0) for _ in range(size)], empty, async_op=later),
        lambda later: dist.all_gather_into_tensor(torch.ones(3 * size, 0), empty, async_op=later),
        lambda later: dist.reduce_scatter_tensor(torch.ones(0), torch.ones(0), async_op=later),
        lambda later: dist.reduce_scatter_tensor(torch.ones(0).int(), torch.ones(0).int(), async_op=later),
        lambda later: dist.all_to_all_single(torch.ones(0), torch.ones(0), async_op=later),
    ]
    for number, call in enumerate(calls):
        handle = call((number + rank) % 2 == 0)
        if handle is not None:
            handle.wait()
        tensor = torch.full((5,), float(rank))
        dist.all_reduce(tensor)
        assert tensor.eq(sum(range(size))).all(), number
    return facts.calls - before


@pytest.mark.parametrize("world", (2, 3))
def test_empty_tensors_leave_the_group_in_order(pool: Any, world: int) -> None:
    assert set(pool.run(world, nothing_at_all)) == {16}


def historical_names() -> None:
    from deepspeed.ops.op_builder import ShareMemCommBuilder

    meet()
    rank, size = dist.get_rank(), dist.get_world_size()
    loaded = ShareMemCommBuilder().load()
    assert loaded.initialize(size, rank) is None
    with pytest.raises(RuntimeError, match=f"rank {rank} of 7, but this process is rank {rank} of {size}"):
        loaded.initialize(7, rank)
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        tensor = torch.full((2, 3), rank + 1, dtype=dtype)
        assert torch.ops.deepspeed.inference_all_reduce(tensor).eq(3).all()
        assert tensor.eq(rank + 1).all()
        assert torch.ops.deepspeed.inference_all_reduce_(tensor) is tensor
        assert tensor.eq(3).all()


def test_the_op_of_historical_name_sums_over_the_ranks(pool: Any) -> None:
    pool.run(2, historical_names)


def forked() -> tuple[int, float]:
    meet()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1000))  # what the parents do next is another call
        except RuntimeError as error:
            os._exit(7 if "was forked from one that is in it" in str(error) else 8)
        finally:
            os._exit(9)
    _, status = os.waitpid(child, 0)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return os.waitstatus_to_exitcode(status), tensor.item()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_refused_and_disturbs_nobody(pool: Any) -> None:
    assert pool.run(2, forked) == [(7, 2.0)] * 2


PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch
import deepspeed
from deepspeed import comm as dist
from deepspeed.comm import same_host

deepspeed.init_distributed("gloo", timeout=timedelta(seconds=60))
for _ in range(3):
    dist.all_reduce(torch.ones(3_000_000))
assert same_host.describe() == "shared memory"
if dist.get_rank() == 1:
    dist.all_reduce(torch.ones(30_000_000), async_op=True)
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
try:
    dist.all_reduce(torch.ones(30_000_000))
except dist.CollectiveError as error:
    print(f"after {time.monotonic() - begin:.1f} s: {error}")
"""


def test_a_killed_rank_is_noticed_and_nothing_is_left_behind(pool: Any) -> None:
    before = set(os.listdir("/dev/shm"))
    first, killed = run_programs(pool, PROGRAM, ranks=2)
    said = first.output
    assert killed.code == -signal.SIGKILL
    assert "another rank closed its connection" in said
    assert "the process of rank 1 has ended" in said
    assert float(said.split("after ")[1].split(" s")[0]) < 20
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "transport" in name}
