"""Ranks that part ways at stage 3: an error in bounded time on every rank, with the parameters and what to do; and the
remedies it names, which finish."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed import comm as dist
from tests.distributed.test_stage3_use import DIM, FORCED, batch, mean_square, start, weights

LIMIT_S = 2.0


class Sparse(nn.Module):
    """Experts of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        return sum((self.experts[k](x) for k in use), torch.zeros(()))


def short_limit() -> int:
    """The group of the test with a short limit; the pool's group brings the ranks together first."""
    dist.barrier()
    dist.destroy_process_group()
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=LIMIT_S))
    return dist.get_rank()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))


def caught(call: Callable[[], Any]) -> str:
    try:
        call()
    except dist.CollectiveError as error:
        text = str(error)
    else:
        return "no error"
    time.sleep(LIMIT_S)  # what else was in flight runs out, so that nothing of the group is left behind
    return text


def more_forwards_on_one_rank() -> str:
    rank = short_limit()
    engine = start(model(), 3)
    engine.eval()

    def forwards() -> None:
        with torch.no_grad():
            for step in range(3 if rank == 0 else 2):
                engine(batch(step))
        dist.barrier()

    return caught(forwards)


def experts_that_differ() -> str:
    rank = short_limit()
    torch.manual_seed(0)
    engine = start(Sparse(), 3)
    return caught(lambda: engine(batch(0), (0, 1) if rank == 0 else (2, 3)))


def fewer_micro_batches() -> str:
    rank = short_limit()
    engine = start(model(), 3)

    def window() -> None:
        for part in range(2 if rank == 0 else 1):
            engine.backward(mean_square(engine, batch(part)))
        engine.step()

    return caught(window)


def a_skipped_module() -> str:
    rank = short_limit()
    engine = start(model(), 3)

    def window() -> None:
        module = engine.module
        out = engine(batch(0)) if rank == 0 else module[2](torch.tanh(module[0](batch(0))))
        engine.backward(out.pow(2).mean())
        engine.step()

    return caught(window)


def a_norm_on_one_rank() -> str:
    rank = short_limit()
    engine = start(model(), 3)
    for step in range(2):
        engine.backward(mean_square(engine, batch(step)))
        engine.step()

    def look() -> None:
        if rank == 0:
            engine.module[2].weight.norm()
        dist.barrier()

    return caught(look)


def gathered_by_hand_on_one_rank() -> str:
    rank = short_limit()
    engine = start(model(), 3)

    def look() -> None:
        if rank == 0:
            with deepspeed.zero.GatheredParameters([engine.module[2].weight]):
                pass
        dist.barrier()

    return caught(look)


def all_gathered_by_hand_on_one_rank() -> str:
    """The first use of the group of gathers; its ranks find out about each other in the second call."""
    rank = short_limit()
    engine = start(model(), 3)

    def look() -> None:
        if rank == 0:
            with deepspeed.zero.GatheredParameters(engine.module.parameters()):
                pass
        dist.barrier()

    return caught(look)


@pytest.mark.parametrize(
    ("body", "use", "remedy"),
    (
        (a_norm_on_one_rank, "norm reads parameter '2.weight'", "GatheredParameters([parameter])"),
        (gathered_by_hand_on_one_rank, "GatheredParameters is entered with", "every rank must enter and leave"),
        (all_gathered_by_hand_on_one_rank, "GatheredParameters is entered with", "every rank must enter and leave"),
    ),
)
def test_what_one_rank_gathers_alone_outside_of_training_is_named(
    pool: Any, body: Callable[[], str], use: str, remedy: str
) -> None:
    alone, other = (outcome.value for outcome in pool.outcomes(2, body, timeout=60.0))
    first, *rest = alone.splitlines()
    assert first.startswith("rank 0: all_gather")
    assert f"because {use}" in first
    assert "in barrier (call" in rest[1]  # where the others are
    assert f"Here this rank gathers outside forward and backward: {use}" in rest[-1]
    assert "test_stage3_divergence.py:" in rest[-1]
    assert "(look)" in rest[-1]
    assert remedy in rest[-1]
    assert "set_z3_leaf_modules" not in alone
    assert f"because {use}" in other  # those that wait elsewhere read what the first rank waits for


def a_norm_that_meets_a_forward() -> str:
    rank = short_limit()
    engine = start(model(), 3)

    def window() -> None:
        if rank == 0:
            engine.module[0].weight.norm()  # the others' forward gathers the same block
        engine.backward(mean_square(engine, batch(0)))
        engine.step()

    return caught(window)


def test_it_is_named_too_where_it_only_puts_the_ranks_out_of_step(pool: Any) -> None:
    outcomes = pool.outcomes(2, a_norm_that_meets_a_forward, timeout=60.0)
    texts = [f"{outcome.value} {outcome.error}" for outcome in outcomes]
    said = "Before, this rank has gathered outside forward and backward: norm reads"
    assert any(said in text for text in texts), texts


@pytest.mark.parametrize(
    ("body", "named"),
    (
        (more_forwards_on_one_rank, "0.weight"),
        (experts_that_differ, "experts."),
        (fewer_micro_batches, "0.weight"),
        (a_skipped_module, "4.weight"),
    ),
)
def test_every_rank_is_told_who_waits_for_what(pool: Any, body: Callable[[], str], named: str) -> None:
    for outcome in pool.outcomes(2, body, timeout=60.0):
        assert outcome.error is None, outcome.error
        text = outcome.value
        assert "What the other ranks were doing" in text
        assert f"gather of parameters {named}" in text
        assert "set_z3_leaf_modules" in text or "gather of parameters" not in text.splitlines()[0]


def gathered_for_inference() -> int:
    rank = dist.get_rank()
    engine = start(model(), 3)
    engine.eval()
    done = 0
    with torch.no_grad(), deepspeed.zero.GatheredParameters(engine.module.parameters()):
        for step in range(5 if rank == 0 else 2):
            engine(batch(step))
            done += 1
    dist.barrier()
    engine.destroy()
    return done


def test_gathered_around_all_forwards_ranks_may_differ(pool: Any) -> None:
    assert pool.run(2, gathered_for_inference) == [5, 2]


def sparse_experts(stage: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Sparse()
    deepspeed.utils.set_z3_leaf_modules(module, [Sparse])
    engine = start(module, stage)
    for step in range(3):
        # The last expert is used by nobody, the first by nobody in the second step.
        use = ((0, 1), (1,), (0, 2))[step] if dist.get_rank() == 0 else ((2,), (2, 1), (1,))[step]
        engine.backward(engine(batch(step), use).pow(2).mean())
        engine.step()
    found = weights(engine)
    engine.destroy()
    return found


def leaf_equals_whole() -> None:
    sharded, whole = sparse_experts(3), sparse_experts(2)  # 2: gradients of both are reduced as they come
    for name in whole:
        assert torch.equal(sharded[name], whole[name]), name


def test_experts_in_a_leaf_module_equal_whole_parameters(ranks) -> None:
    assert FORCED["stage3_max_live_parameters"] == 0  # else nothing would be gathered in backward
    ranks(leaf_equals_whole)
