"""The reference itself: it must agree with torch's own data-parallel training, and the comparison must see faults."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.harness import leaks
from tests.harness.models import SPECS
from tests.harness.parity import OPTIMIZERS, Case, StepRecord, Tolerance, compare, tensor_difference
from tests.harness.reference import PlainTrainer, Precision, Scaler


def _trainer(model: str, world_size: int, **options: Any) -> PlainTrainer:
    optimizer = OPTIMIZERS["adamw"]
    make = lambda params: optimizer.make(optimizer.groups(params))  # noqa: E731
    return PlainTrainer(SPECS[model].build(), make, world_size=world_size, **options)


def _train_plain(model: str, world_size: int, steps: int, **options: Any) -> PlainTrainer:
    spec, trainer = SPECS[model], _trainer(model, world_size, **options)
    for step in range(steps):
        for micro in range(trainer.accumulation):
            index = step * trainer.accumulation + micro
            trainer.backward(lambda module, rank, i=index: spec.loss(module, spec.batch(i, rank), i, rank))
        trainer.step()
    return trainer


def _train_ddp(model: str, steps: int, clip: float) -> dict[str, torch.Tensor]:
    spec, rank = SPECS[model], dist.get_rank()
    module = spec.build()
    wrapped = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = OPTIMIZERS["adamw"].make([{"params": list(module.parameters())}])
    for step in range(steps):
        optimizer.zero_grad()
        spec.loss(wrapped, spec.batch(step, rank), step, rank).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return {name: param.detach() for name, param in module.named_parameters()}


@pytest.mark.parametrize("model", ("odd", "tied", "shared", "branches", "llama"))
@pytest.mark.parametrize("stage", (0, 2))
def test_reference_agrees_with_torch_ddp(pool, model: str, stage: int) -> None:
    theirs = pool.run(2, _train_ddp, model, 3, 0.5)[0]
    ours = _train_plain(model, 2, 3, clip=0.5, stage=stage).weights()
    # DDP divides before it sums and sums the squares of its norm in fp32; Adam turns that into a few ulps.
    slack = Tolerance(rtol=2e-5, atol=1e-6, reason="other order of sums in DDP")
    assert [tensor_difference(ours[name], theirs[name], slack) for name in ours] == [""] * len(ours)


def test_one_rank_is_a_plain_loop_to_the_last_bit() -> None:
    spec = SPECS["odd"]
    module = spec.build()
    optimizer = OPTIMIZERS["adamw"].make([{"params": list(module.parameters())}])
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            index = 2 * step + micro
            (spec.loss(module, spec.batch(index, 0), index, 0) / 2).backward()
        optimizer.step()
    ours = _train_plain("odd", 1, 3, accumulation=2).weights()
    assert all(torch.equal(ours[name], param) for name, param in module.named_parameters())


def test_accumulation_and_ranks_are_one_mean_over_all_rows() -> None:
    spec, module = SPECS["odd"], SPECS["odd"].build()
    batches = [spec.batch(index, rank) for index in range(2) for rank in range(2)]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    spec.loss(module, (x, y), 0, 0).backward()
    trainer = _trainer("odd", 2, accumulation=2)
    for index in range(2):
        trainer.backward(lambda model, rank, i=index: spec.loss(model, spec.batch(i, rank), i, rank))
    trainer.reduce()
    for name, param in module.named_parameters():
        torch.testing.assert_close(trainer.reduced[name], param.grad)


def test_low_precision_keeps_fp32_masters() -> None:
    trainer = _train_plain("odd", 2, 3, precision=Precision(model=torch.bfloat16))
    for name, master in trainer.full_precision_weights().items():
        assert master.dtype == torch.float32
        assert torch.equal(trainer.weights()[name], master.bfloat16())
        assert not torch.equal(master, master.bfloat16().float())


def test_dynamic_scale_sequence() -> None:
    scaler = Scaler(Precision(loss_scale="dynamic", initial_scale=16.0, scale_window=2, hysteresis=2))
    seen = []
    for overflow in (False, False, False, True, True, False, False, False, True, False):
        scaler.update(overflow)
        seen.append(scaler.scale)
    # The first overflow after a refill is free; growth comes with the clean step after a full window.
    assert seen == [16.0, 16.0, 32.0, 32.0, 16.0, 16.0, 16.0, 32.0, 32.0, 32.0]


def test_an_overflow_changes_no_weight_and_halves_the_scale() -> None:
    trainer = _trainer(
        "odd", 2,
        precision=Precision(model=torch.float16, loss_scale="dynamic", initial_scale=2.0**30, hysteresis=1),
    )  # fmt: skip
    before, spec = trainer.weights(), SPECS["odd"]
    trainer.backward(lambda module, rank: spec.loss(module, spec.batch(0, rank), 0, rank))
    assert trainer.step() is False
    assert trainer.skipped_steps == 1
    assert trainer.scaler.scale == 2.0**29
    assert all(torch.equal(before[name], weight) for name, weight in trainer.weights().items())


def _records(case: Case) -> list[StepRecord]:
    """What a perfect engine of one rank would record."""
    spec, optimizer, records = SPECS[case.model], OPTIMIZERS[case.optimizer], []
    trainer = PlainTrainer(
        spec.build(), lambda params: optimizer.make(optimizer.groups(params)), world_size=1, clip=case.clip
    )
    for step in range(case.steps):
        losses = trainer.backward(lambda module, rank, i=step: spec.loss(module, spec.batch(i, rank), i, rank))
        trainer.step()
        masters = trainer.full_precision_weights()
        states = trainer.states(optimizer.state_keys)
        records.append(StepRecord(losses, trainer.norm, 0, trainer.weights(), masters, states))
    return records


def test_comparison_accepts_equal_runs() -> None:
    case = Case(stage=1, steps=2, clip=0.5)
    records = _records(case)
    assert compare(case, [records], records) == []


@pytest.mark.parametrize(
    ("fault", "text"),
    (
        ("loss", "step 1 micro 0 rank 0: loss"),
        ("norm", "step 1: norm"),
        ("skipped", "step 1: skipped"),
        ("weight", "step 1 weight 0.weight: 1 of 221 elements differ"),
        ("master", "step 1 master 0.weight"),
        ("state", "step 1 state 0.weight exp_avg"),
        ("missing state", "missing ['0.weight']"),
    ),
)
def test_comparison_sees_one_wrong_bit(fault: str, text: str) -> None:
    case = Case(stage=1, steps=2)
    records = copy.deepcopy(_records(case))
    bad = records[1]
    next_up = lambda tensor: torch.nextafter(tensor, tensor + 1)  # noqa: E731
    if fault == "loss":
        bad.losses[0] *= 1 + 1e-7
    elif fault == "norm":
        bad.norm *= 1 + 1e-5
    elif fault == "skipped":
        bad.skipped = 1
    elif fault == "weight":
        bad.weights["0.weight"][0, 0] = next_up(bad.weights["0.weight"][0, 0])
    elif fault == "master":
        bad.masters["0.weight"][0, 0] = next_up(bad.masters["0.weight"][0, 0])
    elif fault == "state":
        bad.states["0.weight"]["exp_avg"][0, 0] += 1
    else:
        del bad.states["0.weight"]
    problems = compare(case, [records], records)
    assert any(text in problem for problem in problems), problems


def test_a_tolerance_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="reason"):
        Tolerance(rtol=1e-3)


def test_snapshot_sees_nothing_where_nothing_changed() -> None:
    assert leaks.settle(leaks.take_snapshot()) == []
