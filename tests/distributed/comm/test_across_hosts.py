"""A job on two hosts of two ranks: how ranks meet, that training takes the way by itself, what a failure says."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm import collectives, host_peers, same_host

BOTH = "shared memory in each of 2 hosts, gloo between them"


@contextlib.contextmanager
def hosts(*of_rank: int) -> Iterator[None]:
    """Ranks are where this says, for groups made inside."""
    identity = bytes([of_rank[dist.get_rank()]]) * 16
    with patch.object(same_host, "host_identity", lambda: identity):
        yield


def meet(group: Any = None) -> str:
    for _ in range(4):
        collectives.barrier(group)
    return same_host.describe(group)


def ways() -> dict[str, str]:
    found = {}
    layouts = {"even": (0, 0, 1, 1), "uneven": (0, 0, 0, 1), "mixed": (0, 1, 0, 1), "apart": (0, 1, 2, 3)}
    for name, where in layouts.items():
        with hosts(*where):
            group = dist.new_group([0, 1, 2, 3])
            found[name] = meet(group)
            total = torch.full((5,), 1.0 + dist.get_rank())
            dist.all_reduce(total, group=group)
            assert total.tolist() == [10.0] * 5
            dist.destroy_process_group(group)
    with hosts(0, 0, 1, 1), patch.dict(os.environ, {"DS_SHM": "0"} if dist.get_rank() == 3 else {}):
        group = dist.new_group([0, 1, 2, 3])
        found["unwilling"] = meet(group)
        dist.destroy_process_group(group)
    return found


def test_ranks_find_out_by_themselves(pool: Any) -> None:
    first, _, _, last = pool.run(4, ways)
    assert first == {
        "even": BOTH,
        "uneven": "gloo, because its ranks are on several hosts, 1 and 3 on one",
        "mixed": "gloo, because its ranks are on several hosts and not in their order",
        "apart": "gloo, because its ranks are on several hosts, one on each",
        "unwilling": "gloo, because rank 3 does not use it",
    }
    assert last == {**first, "unwilling": "gloo, because DS_SHM=0 is set"}


def unreachable() -> str:
    def no_route(self: Any, store: Any) -> None:
        self._problem = "no route"

    connect = no_route if dist.get_rank() == 2 else host_peers.PeersToBe._connect
    with hosts(0, 0, 1, 1), patch.object(host_peers.PeersToBe, "_connect", connect):
        start_again(seconds=2)
        way = meet()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 4.0
    for thread in threading.enumerate():  # rank 0's gives up after the group's limit
        if thread.name == "deepspeed-connect":
            thread.join()
    return way


def start_again(seconds: float) -> None:
    dist.barrier()
    dist.destroy_process_group()
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=seconds))


def test_a_host_that_cannot_be_reached_means_gloo_for_all(pool: Any) -> None:
    found = pool.run(4, unreachable)
    assert found[2] == "gloo, because no route"
    assert found[0] == "gloo, because no connection to the ranks at place 0 of the other hosts in 0.5 s"
    assert found[1] == found[3] == "gloo, because rank 0 cannot reach all of its peers"


def public_calls() -> None:
    rank = dist.get_rank()
    with hosts(0, 0, 1, 1):
        group = dist.new_group([0, 1, 2, 3])
        assert meet(group) == BOTH
        for numel in (0, 3, 70_001):
            tensor = torch.full((numel,), 1.0 + rank, dtype=torch.bfloat16)
            handle = dist.all_reduce(tensor, group=group, async_op=True)
            dist.all_reduce(torch.ones(2, 3).t(), op=dist.ReduceOp.AVG, group=group)
            handle.wait()
            assert tensor.eq(10).all()
            assert tensor.numel() == 0 or handle.get_future().wait()[0] is tensor
            shard = torch.empty(numel)
            dist.reduce_scatter_tensor(shard, torch.arange(4.0).repeat_interleave(numel), group=group)
            assert shard.eq(4.0 * rank).all()
            whole = torch.empty(4 * numel)
            dist.all_gather_into_tensor(whole, shard, group=group)
            assert torch.equal(whole, (4.0 * torch.arange(4.0)).repeat_interleave(numel))
            dist.all_to_all_single(torch.empty(4 * numel), whole, group=group)
            dist.broadcast(shard, 3, group=group)
            assert shard.eq(12.0).all()
        one = torch.full((4,), 1.0 + rank)[::2][1:]  # one element may have any stride
        dist.broadcast(one, 3, group=group)
        assert one.item() == 4.0
        dist.all_gather_into_tensor(whole[:4], one, group=group)
        assert whole[:4].eq(4.0).all()
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, {"rank": rank}, group=group)
        assert found == [{"rank": number} for number in range(4)]
        mean = torch.arange(9.0) * (rank + 1)
        collectives.all_reduce(mean, group, op="avg", deterministic=True, async_op=True).wait()
        assert torch.equal(mean, torch.arange(9.0) * 2.5)
        assert collectives.release_buffers(group) > 0
        dist.destroy_process_group(group)


def test_public_calls_take_the_way_of_both(pool: Any) -> None:
    pool.run(4, public_calls)


def training(stage: int, where: tuple[int, ...]) -> tuple[str, list[float]]:
    losses = []
    torch.manual_seed(3)
    weights = torch.randn(40, 40)
    with hosts(*where):
        model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40))
        with torch.no_grad():
            for layer in (model[0], model[2]):
                layer.weight.copy_(weights)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": 1000},
        }
        engine, *_ = deepspeed.initialize(model=model, config=config)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(5):
            loss = engine(torch.randn(2, 40, generator=generator)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        way = same_host.describe()
        engine.destroy()
    return way, losses


@pytest.mark.parametrize("stage", (2, 3))
def test_training(pool: Any, stage: int) -> None:
    """Against the same program on one host: only the order of sums differs."""
    across, here = pool.run(4, training, stage, (0, 0, 1, 1)), pool.run(4, training, stage, (0, 0, 0, 0))
    for (way, one), (_, other) in zip(across, here, strict=True):
        assert way == BOTH
        assert one == pytest.approx(other, rel=1e-5)
        assert len(set(one)) == 5


def missing(late: int) -> tuple[float, str]:
    with hosts(0, 0, 1, 1):
        start_again(seconds=2)
        meet()
        begin = time.monotonic()
        try:
            if dist.get_rank() == late:
                time.sleep(4)
            else:
                collectives.all_reduce(torch.ones(5), None, what="the norm")
        except dist.CollectiveError as error:
            return time.monotonic() - begin, str(error)
    return 0.0, ""


def test_a_rank_that_does_not_come_is_named_on_both_hosts(pool: Any) -> None:
    found = pool.run(4, missing, 3)
    for rank in range(3):
        seconds, text = found[rank]
        assert 1.5 < seconds < 6
        assert text.startswith(f"rank {rank}: all_reduce (call 5 of the default group, 4 ranks, 20 B) of the norm")
        assert "rank 3" in text
        assert "(missing)" in text
    assert "nothing has come from rank 3" in found[2][1]
