"""The same-host transport by itself: groups whose ranks are threads of this process, against plain arithmetic."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from deepspeed.comm import same_host, shm_channel
from deepspeed.comm.rank_sum import sum_in_rank_order
from deepspeed.comm.shm_channel import Channel, reduction_code
from deepspeed.native.build import NativeUnavailable

try:
    library = shm_channel.library()
except NativeUnavailable as problem:
    pytest.skip(str(problem), allow_module_level=True)

SUM, PRODUCT, MIN, MAX, AND, OR, XOR = range(7)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
LANE_BYTES = 16 << 20  # larger tensors go around the ring


@contextlib.contextmanager
def group(size: int, timeout_s: float = 30.0) -> Iterator[list[Channel]]:
    handles = [library.ds_shm_open(rank, size, 77 + rank, 20) for rank in range(size)]
    for rank, handle in enumerate(handles):
        for peer, other in enumerate(handles):
            if peer != rank:
                descriptor = library.ds_shm_fd(other)
                assert library.ds_shm_attach(handle, peer, os.getpid(), 0, descriptor, 77 + peer) == 0
    for handle in handles:
        library.ds_shm_close_fd(handle)
    channels = [Channel(handle, rank, range(size), timeout_s) for rank, handle in enumerate(handles)]
    try:
        yield channels
    finally:
        for channel in channels:
            channel.close()


def on_all(channels: list[Channel], function: Callable[[Channel], Any]) -> list[Any]:
    """What `function` returns, or the error it raises, by rank."""
    results: list[Any] = [None] * len(channels)

    def run(channel: Channel) -> None:
        try:
            results[channel.rank] = function(channel)
        except (RuntimeError, AssertionError) as error:
            results[channel.rank] = error

    threads = [threading.Thread(target=run, args=(channel,)) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def code_of(dtype: torch.dtype, fold: int = SUM, result: torch.dtype | None = None, accumulate: bool = False) -> int:
    code = reduction_code(dtype, result or dtype, fold, accumulate)
    assert code is not None
    return code


def contribution(rank: int, numel: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """`shift`: elements by which the memory is off its allocation's alignment."""
    generator = torch.Generator().manual_seed(rank)
    if dtype in FLOATS:
        values = torch.randn(numel + shift, generator=generator, dtype=torch.float64).to(dtype)
    else:
        values = torch.randint(-90, 90, (numel + shift,), generator=generator).to(dtype)
    return values[shift:]


def rank_order(parts: list[torch.Tensor], result: torch.dtype, factor: float | None = None) -> torch.Tensor:
    if parts[0].dtype in INTEGERS:
        return sum(parts[1:], parts[0])
    output = torch.empty(parts[0].numel(), dtype=result)
    sum_in_rank_order(output, parts, scale=factor)
    return output


# Around the borders of vectors, blocks of the sum, chunks, and the step from one to two hops.
SIZES = (1, 7, 64, 2049, 20_001, 300_003)


@pytest.mark.parametrize("size", (2, 3, 8))
def test_all_reduce_gives_every_rank_the_sum_in_rank_order(size: int) -> None:
    with group(size) as channels:
        for dtype in (*FLOATS, *INTEGERS):
            for shift, numel in enumerate(SIZES if dtype in FLOATS else SIZES[:4]):
                parts = [contribution(rank, numel, dtype, shift) for rank in range(size)]
                right = rank_order(parts, dtype)

                def reduce(channel: Channel, parts: list[torch.Tensor] = parts) -> torch.Tensor:
                    mine = parts[channel.rank].clone()
                    channel.all_reduce(mine, code_of(mine.dtype)).wait()
                    return mine

                for found in on_all(channels, reduce):
                    assert torch.equal(found, right), (dtype, numel)


def test_all_reduce_knows_the_other_operations() -> None:
    reference: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        PRODUCT: torch.mul, MIN: torch.minimum, MAX: torch.maximum, AND: torch.bitwise_and, OR: torch.bitwise_or,
        XOR: torch.bitwise_xor,
    }  # fmt: skip
    with group(3) as channels:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
            for fold, function in reference.items():
                if fold >= AND and dtype in FLOATS:
                    assert reduction_code(dtype, dtype, fold, False) is None
                    continue
                if fold == PRODUCT and dtype is torch.bfloat16:
                    continue  # torch rounds in between
                parts = [contribution(rank, 999, dtype) for rank in range(3)]
                if dtype in FLOATS and fold in (MIN, MAX):
                    parts[1][5] = float("nan")
                right = function(function(parts[0], parts[1]), parts[2])

                def reduce(channel: Channel, parts: list[torch.Tensor] = parts, fold: int = fold) -> torch.Tensor:
                    mine = parts[channel.rank].clone()
                    channel.all_reduce(mine, code_of(mine.dtype, fold)).wait()
                    return mine

                for found in on_all(channels, reduce):
                    assert torch.equal(found.nan_to_num(7), right.nan_to_num(7)), (dtype, fold)


@pytest.mark.parametrize("size", (2, 3, 8))
def test_reduce_scatter_has_the_bits_of_the_sum_over_gloo(size: int) -> None:
    with group(size) as channels:
        for dtype, result in ((d, r) for d in FLOATS for r in (FLOATS if size == 2 else {d, torch.float32})):
            for shift, shard in enumerate((1, 7, 2049, 40_003) if size < 8 else (7, 5003)):
                parts = [contribution(rank, shard * size, dtype, shift) for rank in range(size)]
                pieces = [[part[r * shard : (r + 1) * shard] for part in parts] for r in range(size)]
                before = contribution(90, shard, result)

                def reduce(
                    channel: Channel,
                    parts: list[torch.Tensor] = parts,
                    before: torch.Tensor = before,
                ) -> tuple[torch.Tensor, torch.Tensor]:
                    whole = parts[channel.rank]
                    plain, added = torch.empty_like(before), before.clone()
                    works = [
                        channel.reduce_scatter(plain, whole, code_of(whole.dtype, SUM, before.dtype), 0.3),
                        channel.reduce_scatter(added, whole, code_of(whole.dtype, SUM, before.dtype, True)),
                    ]
                    for work in reversed(works):
                        work.wait()
                    return plain, added

                for rank, (plain, added) in enumerate(on_all(channels, reduce)):
                    assert torch.equal(plain, rank_order(pieces[rank], result, 0.3)), (dtype, result, shard)
                    right = before.clone()
                    sum_in_rank_order(right, pieces[rank], accumulate=True)
                    assert torch.equal(added, right), (dtype, result, shard)


def test_reduce_scatter_may_land_in_its_own_slice() -> None:
    with group(3) as channels:
        parts = [contribution(rank, 3 * 50_001, torch.float32) for rank in range(3)]

        def reduce(channel: Channel) -> torch.Tensor:
            whole = parts[channel.rank].clone()
            own = whole[channel.rank * 50_001 : (channel.rank + 1) * 50_001]
            channel.reduce_scatter(own, whole, code_of(torch.float32)).wait()
            return own

        for rank, found in enumerate(on_all(channels, reduce)):
            pieces = [part[rank * 50_001 : (rank + 1) * 50_001] for part in parts]
            assert torch.equal(found, rank_order(pieces, torch.float32))


@pytest.mark.parametrize("size", (2, 3, 8))
def test_bytes_arrive_as_they_were(size: int) -> None:
    with group(size) as channels:
        for numel in (0, 1, 13, 65_537, 300_001):
            sources = [contribution(rank, numel, torch.uint8, 1) for rank in range(size)]

            def move(channel: Channel, sources: list[torch.Tensor] = sources) -> tuple[torch.Tensor, ...]:
                rank, mine = channel.rank, sources[channel.rank]
                gathered = torch.zeros(size * len(mine), dtype=torch.uint8)
                rows = torch.zeros((size, len(mine) + 3), dtype=torch.uint8)
                sent = mine.clone()
                # Rank r sends a third of its bytes, and r more, to each other rank; nothing to itself.
                counts = [
                    [min(len(mine), len(mine) // 3 + s) if s != r else 0 for r in range(size)] for s in range(size)
                ]
                send, receive = counts[rank], [counts[s][rank] for s in range(size)]
                outgoing = torch.cat([mine[: send[r]] + r for r in range(size)])
                incoming = torch.zeros(sum(receive), dtype=torch.uint8)
                works = []
                if len(mine):
                    rows[rank, : len(mine)] = mine
                    works = [
                        channel.all_gather(gathered, mine),
                        channel.all_gather(rows, rows[rank, : len(mine)], len(mine) + 3),
                        channel.broadcast(sent, size - 1),
                    ]
                works += [channel.all_to_all(incoming, outgoing, receive, send), channel.barrier()]
                for work in works:
                    work.wait()
                right = torch.cat([sources[s][: receive[s]] + rank for s in range(size)])
                assert torch.equal(incoming, right)
                return gathered, rows[:, : len(mine)].flatten(), sent

            for found in on_all(channels, move):
                assert not isinstance(found, Exception), found
                gathered, rows, sent = found
                assert torch.equal(gathered, torch.cat(sources))
                assert torch.equal(rows, torch.cat(sources))
                assert torch.equal(sent, sources[-1])


def test_tensors_larger_than_the_ring_pass_through_it() -> None:
    numel = (LANE_BYTES + (LANE_BYTES >> 2)) // 4
    with group(2) as channels:
        parts = [torch.full((2 * numel,), float(rank + 1)) for rank in range(2)]

        def move(channel: Channel) -> tuple[float, float, float]:
            shard, gathered, whole = torch.empty(numel), torch.empty(2 * numel), parts[channel.rank].clone()
            first = channel.reduce_scatter(shard, parts[channel.rank], code_of(torch.float32))
            second = channel.all_gather(gathered, parts[channel.rank][:numel])
            third = channel.all_reduce(whole, code_of(torch.float32), 0.5)
            third.channel.background()
            for work in (third, first, second):
                work.wait()
            assert shard.min() == shard.max()
            assert whole.min() == whole.max()
            return float(shard[0]), float(whole[0]), float(gathered.double().sum())

        assert on_all(channels, move) == [(3.0, 1.5, 3.0 * numel)] * 2


@pytest.mark.parametrize("shift", (0, 1, 37))
def test_large_outputs_at_odd_addresses_hold_every_byte(shift: int) -> None:
    """They are written past the caches, in vectors: heads and tails are not."""
    nbytes = (4 << 20) + 1001
    with group(2) as channels:
        parts = [torch.randint(0, 255, (nbytes,), generator=torch.Generator().manual_seed(r)).byte() for r in range(2)]

        def move(channel: Channel) -> bool:
            gathered = torch.zeros(2 * nbytes + 100, dtype=torch.uint8)
            channel.all_gather(gathered[shift:], parts[channel.rank]).wait()
            spread = torch.zeros(9 << 20, dtype=torch.uint8)
            if channel.rank == 1:
                spread[shift : 2 * nbytes + shift] = torch.cat(parts)
            channel.broadcast(spread[shift : 2 * nbytes + shift], 1).wait()
            right = torch.cat(parts)
            beyond = gathered[:shift].any() or gathered[2 * nbytes + shift :].any()
            return bool(torch.equal(gathered[shift : 2 * nbytes + shift], right) and not beyond) and bool(
                torch.equal(spread[shift : 2 * nbytes + shift], right) and not spread[2 * nbytes + shift :].any()
            )

        assert on_all(channels, move) == [True, True]


def test_what_nobody_waits_for_goes_on_meanwhile() -> None:
    numel = 2 * LANE_BYTES // 4
    with group(2) as channels:
        parts = [torch.ones(numel) for _ in range(2)]
        busy = channels[1].all_reduce(parts[1], code_of(torch.float32))
        channels[1].background()  # and this rank does something else
        waiting = channels[0].all_reduce(parts[0], code_of(torch.float32))
        waiting.wait()
        assert float(parts[0].sum()) == 2 * numel
        end = time.monotonic() + 10
        while not library.ds_shm_finished(channels[1]._handle, 0) and time.monotonic() < end:
            time.sleep(0.001)
        assert busy.is_completed()
        assert float(parts[1].sum()) == 2 * numel


def test_a_handle_that_is_dropped_keeps_its_tensors_until_they_are_not_needed() -> None:
    with group(2) as channels:
        for _ in range(200):
            for channel in channels:
                channel.all_reduce(torch.ones(3), code_of(torch.float32))
        for channel in channels:
            assert len(channel._held) <= 200
        last = [channel.barrier() for channel in channels]
        for work in last:
            work.is_completed()
        for work in last:
            work.wait()
        for channel in channels:
            channel.all_reduce(torch.ones(3), code_of(torch.float32))
            assert len(channel._held) < 5


def failures(first: Callable[[Channel], Any], second: Callable[[Channel], Any]) -> list[str]:
    with group(2, timeout_s=0.5) as channels:
        return [str(found) for found in on_all(channels, lambda c: (first, second)[c.rank](c))]


def test_another_call_is_an_error_and_no_data_is_mixed() -> None:
    one, other = failures(
        lambda c: c.broadcast(torch.ones(4), 1).wait(),
        lambda c: c.broadcast(torch.ones(5), 1).wait(),
    )
    assert one == "rank 1 has started another collective, or one of another size, as the same call"
    assert other == "True"  # a source waits for nobody
    texts = failures(
        lambda c: c.all_gather(torch.empty(8), torch.ones(4)).wait(),
        lambda c: c.all_reduce(torch.ones(4), code_of(torch.float32)).wait(),
    )
    assert any("has started another collective" in text for text in texts)
    assert all("has started another" in text or "has given up" in text for text in texts)


def test_ranks_that_do_not_come_leave_or_give_up_end_the_wait_with_their_number() -> None:
    waiting, _ = failures(lambda c: c.barrier().wait(), lambda c: time.sleep(0.8))
    assert waiting == "timed out: nothing has come from rank 1"
    waiting, _ = failures(lambda c: c.barrier().wait(), lambda c: c.close())
    assert waiting == "connection closed: rank 1 has left the group"
    waiting, _ = failures(lambda c: c.barrier().wait(), lambda c: c.abandon())
    assert waiting == "connection closed: rank 1 has given up on this group"
    after, _ = failures(lambda c: (c.abandon(), c.barrier().wait()), lambda c: None)
    assert after == "this rank has given up on this group"


def test_a_block_that_is_not_the_one_that_was_told_is_refused() -> None:
    one, two = (library.ds_shm_open(rank, 2, rank, 0) for rank in range(2))
    try:
        assert library.ds_shm_attach(one, 1, os.getpid(), 0, library.ds_shm_fd(two), 99) != 0
        with open(os.devnull) as other:
            assert library.ds_shm_attach(one, 1, os.getpid(), 0, other.fileno(), 1) != 0
    finally:
        library.ds_shm_leave(one)
        library.ds_shm_leave(two)


def rank_that_is_killed(parent: int, start: int, descriptor: int, told: int) -> None:
    """Rank 1 in a process of its own: takes part twice, posts a part of a large tensor, dies."""
    handle = library.ds_shm_open(1, 2, 5, 20)
    assert library.ds_shm_attach(handle, 0, parent, start, descriptor, 4) == 0
    os.write(told, f"{library.ds_shm_fd(handle)} {same_host._start_time()}".encode())
    channel = Channel(handle, 1, range(2), 30.0)
    for _ in range(2):
        channel.all_reduce(torch.ones(70_000), code_of(torch.float32)).wait()
    channel.all_reduce(torch.ones(LANE_BYTES), code_of(torch.float32))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_killed_rank_is_named_and_its_memory_goes_with_it() -> None:
    before = memory_files()
    handle = library.ds_shm_open(0, 2, 4, 20)
    reading, telling = os.pipe()
    start_of_parent = same_host._start_time()
    child = os.fork()
    if child == 0:
        try:
            rank_that_is_killed(os.getppid(), start_of_parent, library.ds_shm_fd(handle), telling)
        finally:
            os._exit(1)
    try:
        descriptor, start = map(int, os.read(reading, 100).split())
        assert library.ds_shm_attach(handle, 1, child, start, descriptor, 5) == 0
        channel = Channel(handle, 0, range(2), 30.0)
        for _ in range(2):
            channel.all_reduce(torch.ones(70_000), code_of(torch.float32)).wait()
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="connection closed: the process of rank 1 has ended"):
            channel.all_reduce(torch.ones(LANE_BYTES), code_of(torch.float32)).wait()
        assert time.monotonic() - begin < 5  # although nobody has asked for its exit code yet
        channel.close()
    finally:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        os.close(reading)
        os.close(telling)
    assert memory_files() == before


def memory_files() -> int:
    """Mappings of blocks and names in /dev/shm."""
    with open("/proc/self/maps") as maps:
        mapped = sum("deepspeed-transport" in line for line in maps)
    return mapped + sum("transport" in name for name in os.listdir("/dev/shm"))
