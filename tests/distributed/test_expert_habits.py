"""What expert users do between the steps: each comes to the numbers of plain torch, or to an error that says why."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.test_field_behaviour import (
    DIM,
    LR,
    STAGES,
    batch,
    build,
    loss_of,
    micro_step,
    plain,
    same_weights,
    settings,
    start,
)
from tests.harness.pool import WorkerPool


def at_every_stage(body: Callable[[int], None]) -> None:
    for stage in STAGES:
        body(stage)


# ---- same numbers as torch -------------------------------------------------------------------------------------------


def replaced_tensors_are_trained(stage: int) -> None:
    """``param.data = ...`` and ``module.to(...)`` and back put another tensor in the place of the optimizer's."""
    engine = start(settings(stage))
    micro_step(engine, 0)
    for param in engine.module.parameters():
        param.data = param.data.clone()
    micro_step(engine, 1)
    engine.module.double().float()
    micro_step(engine, 2)
    same_weights(engine.module, plain([(0,), (1,), (2,)]))
    engine.destroy()


def replaced_tensors_reach_the_masters(stage: int) -> None:
    engine = start(settings(stage, bf16={"enabled": True}, optimizer={"type": "SGD", "params": {"lr": 0.0}}))
    weight = engine.module[0].weight
    weight.data = torch.full_like(weight, 0.5)
    for number in range(2):  # a master that kept the old value would be written back
        x, y = batch(number, dist.get_rank())
        engine.backward(F.mse_loss(engine(x.bfloat16()).float(), y))
        engine.step()
    assert torch.equal(weight.detach(), torch.full_like(weight, 0.5))
    engine.destroy()


def replaced_before_loading(stage: int, folder: str) -> None:
    engine = start(settings(stage))
    micro_step(engine, 0)
    engine.save_checkpoint(folder, tag=f"stage{stage}")
    for param in engine.module.parameters():
        param.data = torch.zeros_like(param)
    engine.load_checkpoint(folder, tag=f"stage{stage}")
    micro_step(engine, 1)
    same_weights(engine.module, plain([(0,), (1,)]))
    engine.destroy()


def a_new_number_of_micro_steps_begins_a_whole_window(stage: int) -> None:
    engine = start(settings(stage))
    micro_step(engine, 0)
    engine.set_train_batch_size(2 * 3 * dist.get_world_size())
    assert engine.gradient_accumulation_steps() == 3
    for number in (1, 2, 3):
        assert engine.is_gradient_accumulation_boundary() == (number == 3)
        micro_step(engine, number)
    engine.set_train_batch_size(2 * 2 * dist.get_world_size())
    for number in (4, 5):
        micro_step(engine, number)
    assert engine.global_steps == 3
    same_weights(engine.module, plain([(0,), (1, 2, 3), (4, 5)]))
    engine.destroy()


def a_resumed_run_begins_a_whole_window(stage: int, folder: str) -> None:
    engine = start(settings(stage))
    micro_step(engine, 0)
    engine.set_train_batch_size(2 * 2 * dist.get_world_size())
    for number in (1, 2):
        micro_step(engine, number)
    engine.save_checkpoint(folder, tag=f"window{stage}")
    resumed = start(settings(stage, accumulation=2), build(seed=5))
    resumed.load_checkpoint(folder, tag=f"window{stage}")
    for number in (3, 4):
        micro_step(resumed, number)
    assert resumed.global_steps == 3
    same_weights(resumed.module, plain([(0,), (1, 2), (3, 4)]))
    engine.destroy()
    resumed.destroy()


def a_later_engine_takes_over(stage: int) -> None:
    """initialize() again on the same model, without destroy() and with the same optimizer, as trainers do."""
    module = build()
    base = torch.optim.SGD(module.parameters(), lr=LR)
    first = start(settings(stage), module, optimizer=base)
    micro_step(first, 0)
    second = start(settings(stage), module, optimizer=base)
    micro_step(second, 1)
    for call in (lambda: micro_step(first, 9), first.step, lambda: first.save_checkpoint("never written")):
        with pytest.raises(RuntimeError, match=r"later deepspeed\.initialize"):
            call()
    first.destroy()
    micro_step(second, 2)
    same_weights(module, plain([(0,), (1,), (2,)]))
    second.destroy()


class _Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = build(), build(seed=1)[0]
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def added_groups_are_trained(stage: int) -> None:
    ours, theirs, world = _Grows(), _Grows(), dist.get_world_size()
    engine = start(settings(stage), ours, optimizer=torch.optim.SGD(ours.body.parameters(), lr=LR))
    base = torch.optim.SGD(theirs.body.parameters(), lr=LR)
    for number in range(4):
        if number == 2:
            for module, optimizer in ((ours, engine.optimizer), (theirs, base)):
                module.head.requires_grad_(True)
                optimizer.add_param_group({"params": list(module.head.parameters()), "lr": LR / 2})
        micro_step(engine, number)
        for rank in range(world):
            (loss_of(theirs, number, rank) / world).backward()
        base.step()
        base.zero_grad()
    assert [group["lr"] for group in engine.optimizer.param_groups] == [LR, LR / 2]
    same_weights(ours, theirs)
    engine.destroy()


class _Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, DIM, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, 0].abs() * 9).long().clamp(0, 19))


def sparse_gradients_are_trained(stage: int) -> None:
    ours, theirs, world = _Rows(), _Rows(), dist.get_world_size()
    engine = start(settings(stage), ours)
    base = torch.optim.SGD(theirs.parameters(), lr=LR)
    for number in range(3):
        micro_step(engine, number)
        for rank in range(world):
            (loss_of(theirs, number, rank) / world).backward()
        base.step()
        base.zero_grad()
    same_weights(ours, theirs)
    engine.destroy()


@pytest.mark.parametrize(
    "body",
    (
        replaced_tensors_are_trained,
        replaced_tensors_reach_the_masters,
        a_new_number_of_micro_steps_begins_a_whole_window,
        a_later_engine_takes_over,
        added_groups_are_trained,
        sparse_gradients_are_trained,
    ),
    ids=lambda body: body.__name__,
)
@pytest.mark.parametrize("world", (1, 2))
def test_equal_to_plain_torch(pool: WorkerPool, body: Callable[[int], None], world: int) -> None:
    pool.run(world, at_every_stage, body)


def with_folder(body: Callable[[int, str], None], folder: str) -> None:
    for stage in STAGES:
        body(stage, folder)


@pytest.mark.parametrize(
    "body", (replaced_before_loading, a_resumed_run_begins_a_whole_window), ids=lambda body: body.__name__
)
def test_equal_to_plain_torch_with_a_checkpoint_between(pool: WorkerPool, tmp_path: Any, body: Any) -> None:
    pool.run(2, with_folder, body, str(tmp_path))


def nan_with_clipping(stage: int) -> None:
    """torch.nn.utils.clip_grad_norm_ multiplies every gradient by nan when the norm is nan."""
    engine = start(settings(stage, gradient_clipping=0.5))
    x, y = batch(0, dist.get_rank())
    poison = engine.module[0].bias[0] * (float("nan") if dist.get_rank() == 0 else 1.0)
    engine.backward(F.mse_loss(engine(x), y) + poison)
    engine.step()
    for name, param in engine.module.named_parameters():
        assert param.isnan().all(), name
    engine.destroy()


def test_nan_reaches_what_it_reaches_in_torch(pool: WorkerPool) -> None:
    pool.run(2, at_every_stage, nan_with_clipping)


# ---- said clearly ----------------------------------------------------------------------------------------------------


def refusals(stage: int) -> None:
    def refused(module: nn.Module, make: Callable[[Any], torch.optim.Optimizer], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            start(settings(stage, zero_allow_untested_optimizer=True), module, optimizer=make(module.parameters()))

    refused(build(), torch.optim.LBFGS, "LBFGS.*needs a closure")
    complex_module = nn.Module()
    complex_module.spectrum = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    refused(complex_module, lambda params: torch.optim.SGD(params, lr=LR), "spectrum.*complex64.*view_as_complex")
    if stage:
        refused(_Rows(), torch.optim.SparseAdam, "SparseAdam.*stage 0")


def foreign_dtype(stage: int) -> None:
    engine = start(settings(stage, optimizer={"type": "SGD", "params": {"lr": LR}}))
    micro_step(engine, 0)
    engine.module.to(torch.bfloat16)
    x, y = batch(1, dist.get_rank())

    def train() -> None:
        engine.backward(F.mse_loss(engine(x.bfloat16()).float(), y))
        engine.step()

    with pytest.raises(RuntimeError, match=r"(?i)bfloat16"):
        train()
    engine.destroy()


def after_destroy(stage: int) -> None:
    engine = start(settings(stage))
    engine.destroy()
    for call in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
        with pytest.raises(RuntimeError, match=f"engine.{call.__name__}: the engine has been destroyed"):
            call("never written")


@pytest.mark.parametrize("body", (refusals, foreign_dtype, after_destroy), ids=lambda body: body.__name__)
def test_what_cannot_work_is_refused(pool: WorkerPool, body: Callable[[int], None]) -> None:
    pool.run(2, at_every_stage, body)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def recorded() -> Any:
    from deepspeed.utils.logging import logger

    handler = _Records()
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)


def hand_written_gradient(stage: int) -> None:
    engine = start(settings(stage))
    x, y = batch(0, dist.get_rank())
    engine.backward(F.mse_loss(engine(x), y))
    weight = engine.module[0].weight
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    with recorded() as texts:
        engine.step()
    if stage:
        assert any("0.weight" in text and "safe_set_full_grad" in text for text in texts), texts
    else:
        torch.testing.assert_close(weight.detach(), before - LR)
    engine.destroy()


def no_gradient_written_by_hand(stage: int) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.nothing = build(), nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + self.nothing.sum()

    engine = start(settings(stage), Empty())
    with recorded() as texts:
        micro_step(engine, 0)
    assert not any("safe_set_full_grad" in text for text in texts), texts
    engine.destroy()


def test_a_parameter_of_no_elements_is_not_taken_for_one(pool: WorkerPool) -> None:
    pool.run(2, at_every_stage, no_gradient_written_by_hand)


def test_a_gradient_written_by_hand_is_used_or_named(pool: WorkerPool) -> None:
    pool.run(2, at_every_stage, hand_written_gradient)
