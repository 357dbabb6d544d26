"""Groups with several ranks on each of several hosts: ranks are threads of this process, against plain arithmetic."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as torch_dist

from deepspeed.comm import across_hosts, relay, shm_channel
from deepspeed.comm.across_hosts import ONE_ON_EACH, HostLayout, HostsChannel, layout_of
from deepspeed.comm.relay import Relay
from deepspeed.comm.shm_channel import Channel, reduction_code
from deepspeed.native.build import NativeUnavailable

try:
    library = shm_channel.library()
except NativeUnavailable as problem:
    pytest.skip(str(problem), allow_module_level=True)

LIMIT_S = 30.0
SUM, PRODUCT, MIN, MAX = range(4)


def test_layouts() -> None:
    a, b, c = b"a", b"b", b"c"
    assert layout_of([a, a, b, b], 2) == HostLayout(hosts=2, local=2, host=1, place=0)
    assert layout_of([a] * 3, 1) == HostLayout(1, 3, 0, 1)
    assert layout_of([c, c, a, a, b, b], 5) == HostLayout(3, 2, 2, 1)
    assert layout_of([a, b], 0) == ONE_ON_EACH == "its ranks are on several hosts, one on each"
    assert layout_of([a, a, b], 0) == "its ranks are on several hosts, 1 and 2 on one"
    assert layout_of([a, b, a, b], 0) == "its ranks are on several hosts and not in their order"


class Everybody:
    """Stands for the group of all in calls that go by gloo alone."""

    def __init__(self, group: Any) -> None:
        self.broadcast = group.broadcast


def in_threads(count: int, function: Callable[[int], Any]) -> list[Any]:
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise min(errors, key=lambda error: "an earlier call" in str(error))
    return results


@contextlib.contextmanager
def cluster(hosts: int, local: int, limit_s: float = LIMIT_S) -> Iterator[list[HostsChannel]]:
    handles = [library.ds_shm_open(rank % local, local, 5 + rank, 20) for rank in range(hosts * local)]
    for rank, handle in enumerate(handles):
        first = rank // local * local
        for peer in range(first, first + local):
            if peer != rank:
                descriptor = library.ds_shm_fd(handles[peer])
                assert library.ds_shm_attach(handle, peer - first, os.getpid(), 0, descriptor, 5 + peer) == 0
    store = torch_dist.HashStore()

    def connect(rank: int) -> HostsChannel:
        host, place = divmod(rank, local)
        limit = timedelta(seconds=limit_s)
        peers = torch_dist.ProcessGroupGloo(torch_dist.PrefixStore(f"p{place}", store), host, hosts, limit)
        world = torch_dist.ProcessGroupGloo(torch_dist.PrefixStore("all", store), rank, hosts * local, limit)
        names = range(host * local, (host + 1) * local)
        near = Channel(handles[rank], place, list(names), limit_s)
        everybody = Everybody(world)
        channel = HostsChannel(HostLayout(hosts, local, host, place), near, peers, everybody, limit_s)
        kept.append(everybody)
        return channel

    kept: list[Any] = []
    channels = in_threads(hosts * local, connect)
    try:
        yield channels
    finally:
        for channel in channels:
            channel.close()


@pytest.fixture(params=((2, 2), (3, 2)), ids=("2 hosts", "3 hosts"))
def ranks(request: pytest.FixtureRequest) -> Iterator[list[HostsChannel]]:
    with cluster(*request.param) as channels:
        yield channels


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (100 * torch.randn(numel, generator=generator, dtype=torch.float64)).to(dtype)


def tree(parts: list[torch.Tensor], local: int) -> torch.Tensor:
    """The documented order of sums: ranks of a host, then hosts; in fp32 (fp64 and integers: in themselves)."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    hosts = []
    for first in range(0, len(parts), local):
        total = parts[first].to(wide)
        for part in parts[first + 1 : first + local]:
            total = total + part.to(wide)
        hosts.append(total)
    total = hosts[0]
    for host in hosts[1:]:
        total = total + host
    return total


def code_of(dtype: torch.dtype, fold: int = SUM, result: torch.dtype | None = None, accumulate: bool = False) -> int:
    code = reduction_code(dtype, result or dtype, fold, accumulate)
    assert code is not None
    return code


# From one element to several chunks with something left over, on either side of the sizes where the way changes.
NUMELS = (1, 70, 9_011)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int16)


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    small = {"SMALL_BYTES": 1 << 10, "CHUNK_BYTES": 16 << 10, "LEAST_BROADCAST_BYTES": 1 << 10}
    with patch.multiple(across_hosts, **small):
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
def test_reductions_have_the_bits_of_the_documented_order(
    ranks: list[HostsChannel], numel: int, dtype: torch.dtype
) -> None:
    world, local = len(ranks), ranks[0].layout.local
    given = [values(rank, numel * world, dtype) for rank in range(world)]
    total, factor = tree(given, local), None
    if dtype.is_floating_point:
        factor = 1.0 / world
        total = total * factor
    right = total.to(dtype)
    tops = torch.stack(given).amax(0)

    def body(rank: int) -> None:
        channel = ranks[rank]
        whole, top = given[rank].clone(), given[rank].clone()
        shard = torch.empty(numel, dtype=dtype)
        works = [
            channel.all_reduce(whole, code_of(dtype), factor),
            channel.all_reduce(top, code_of(dtype, MAX)),
            channel.reduce_scatter(shard, given[rank], code_of(dtype), factor),
        ]
        channel.background()
        for work in works if rank % 2 else works[::-1]:
            work.wait()
        own = slice(rank * numel, (rank + 1) * numel)
        assert torch.equal(whole, right)
        assert torch.equal(top, tops)
        assert torch.equal(shard, right[own])
        if dtype is torch.bfloat16:  # into fp32, on top of what is there, without a rounding between
            more = torch.ones(numel)
            channel.reduce_scatter(more, given[rank], code_of(dtype, SUM, torch.float32, True), factor).wait()
            assert torch.equal(more, total[own] + 1)

    in_threads(world, body)


@pytest.mark.parametrize("numel", NUMELS)
def test_moves(ranks: list[HostsChannel], numel: int) -> None:
    world, local = len(ranks), ranks[0].layout.local
    given = [values(rank, numel, torch.float32) for rank in range(world)]

    def body(rank: int) -> None:
        channel = ranks[rank]
        gathered = torch.empty(world * numel)
        channel.all_gather(gathered, given[rank]).wait()
        assert torch.equal(gathered, torch.cat(given))
        apart = torch.zeros(world, numel + 3)
        apart[rank, :numel] = given[rank]
        channel.all_gather(apart, apart[rank, :numel], 4 * (numel + 3)).wait()
        assert torch.equal(apart[:, :numel], torch.stack(given))
        assert not apart[:, numel:].any()
        for root in (0, local + 1, world - 1):
            copy = given[rank].clone()
            channel.broadcast(copy, root).wait()
            assert torch.equal(copy, given[root])
        channel.barrier().wait()

    in_threads(world, body)


def test_buffers_are_kept_and_can_be_freed(ranks: list[HostsChannel]) -> None:
    tensors = [torch.ones(4000) for _ in ranks]
    in_threads(len(ranks), lambda rank: ranks[rank].all_reduce(tensors[rank], code_of(torch.float32)).wait())
    assert ranks[0].release_buffers() > 0
    assert ranks[0].release_buffers() == 0


def test_a_rank_that_does_not_come_ends_the_waits_of_all() -> None:
    with cluster(2, 2, limit_s=1.0) as channels:
        problems: list[str] = [""] * 3

        def body(rank: int) -> None:
            tensor = torch.ones(10)
            first = channels[rank].all_reduce(tensor, code_of(torch.float32))
            second = channels[rank].all_reduce(tensor, code_of(torch.float32))
            with pytest.raises(RuntimeError) as raised:
                first.wait(timedelta(seconds=10))
            problems[rank] = str(raised.value)
            with pytest.raises(RuntimeError, match="an earlier call on this group has failed"):
                second.wait()
            with pytest.raises(RuntimeError, match="an earlier call on this group has failed"):
                channels[rank].barrier().wait()

        in_threads(3, body)
        assert "nothing has come from rank 3" in problems[2]
        assert all("imed out" in problem for problem in problems), problems


def test_a_wait_that_has_timed_out_may_be_repeated() -> None:
    with cluster(2, 2) as channels:
        come = threading.Event()

        def body(rank: int) -> float:
            if rank == 3:
                come.wait()
            tensor = torch.ones(10)
            work = channels[rank].all_reduce(tensor, code_of(torch.float32))
            if rank == 0:
                with pytest.raises(RuntimeError, match=r"^timed out after 0\.2 s"):
                    work.wait(timedelta(seconds=0.2))
                assert not work.is_completed()
                come.set()
            work.wait()
            return float(tensor.sum())

        assert in_threads(4, body) == [40.0] * 4


def test_who_polls_finds_what_the_thread_has_done() -> None:
    with cluster(2, 2) as channels:

        def body(rank: int) -> list[float]:
            tensor = torch.full((5,), float(rank))
            work = channels[rank].all_reduce(tensor, code_of(torch.float32))
            channels[rank].background()
            while not work.is_completed():
                pass
            return work.get_future().wait()[0].tolist()

        assert in_threads(4, body) == [[6.0] * 5] * 4
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("deepspeed-relay")]
    assert not left


def test_threads_end_with_the_program_and_waits_go_on() -> None:
    with cluster(2, 2) as channels:
        tensors = [torch.ones(3) for _ in channels]
        works = [c.all_reduce(t, code_of(torch.float32)) for c, t in zip(channels, tensors, strict=True)]
        for channel in channels[:3]:
            channel.background()
        relay._end_threads()
        assert not [thread for thread in threading.enumerate() if thread.name == "deepspeed-relay"]
        for channel in channels:
            channel.background()
        assert not [thread for thread in threading.enumerate() if thread.name == "deepspeed-relay"]
        assert in_threads(4, lambda rank: works[rank].wait() and float(tensors[rank].sum())) == [12.0] * 4


def test_inference_tensors_may_be_reduced_beside_the_program() -> None:
    with cluster(2, 2) as channels:

        def body(rank: int) -> float:
            with torch.inference_mode():
                tensor = torch.ones(3, dtype=torch.bfloat16)
                work = channels[rank].all_reduce(tensor, code_of(torch.bfloat16))
                channels[rank].background()
            work.wait()
            return float(tensor[0])

        assert in_threads(4, body) == [4.0] * 4


def test_a_failure_between_hops_is_told_once_and_ends_the_relay() -> None:
    failures: list[int] = []
    lonely = Relay(1.0, lambda: failures.append(1))

    def broken() -> Iterator[tuple[Any, ...]]:
        yield ()
        raise ValueError("no such dtype")

    first, second = lonely.start(broken(), ()), lonely.start(iter(()), ())
    with pytest.raises(RuntimeError, match="no such dtype"):
        first.wait()
    with pytest.raises(RuntimeError, match="an earlier call"):
        second.wait()
    assert failures == [1]
    lonely.close("done")
