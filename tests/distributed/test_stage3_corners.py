"""Corners of stage 3: contexts inside contexts, refused edits, weights written behind the version counter."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.zero import gathered_parameters, reduce
from tests.distributed.test_stage3_use import DIM, FORCED, batch, mean_square, run, same, start
from tests.harness.pool import on_ranks

Gathered = deepspeed.zero.GatheredParameters


def pair() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))


@on_ranks(2)
@torch.no_grad()
def test_a_context_inside_another_keeps_its_edits() -> None:
    engine = start(pair(), 3)
    first, last = engine.module[0].weight, engine.module[2].weight
    with mock.patch.object(gathered_parameters, "warning_once") as warned:
        with Gathered([first, last]):
            with Gathered([first], modifier_rank=0):
                first.fill_(3.0)
            assert first.eq(3.0).all()
        with Gathered([last], modifier_rank=1):
            with Gathered([first, last]):
                last.fill_(4.0)
            assert last.eq(4.0).all()
        assert not warned.called
        with Gathered([first]):
            first.fill_(5.0)
        assert "'0.weight' was changed inside GatheredParameters without modifier_rank" in warned.call_args.args[0]
        with Gathered([last]):
            last.data.add_(1.0)  # moves no version counter
        assert "'2.weight' was changed inside GatheredParameters without modifier_rank" in warned.call_args.args[0]
    with Gathered([first, last]):
        assert first.eq(3.0).all()
        assert last.eq(4.0).all()
    engine.destroy()


@on_ranks(2)
def test_a_refused_edit_leaves_the_parameter_as_it_was() -> None:
    engine = start(pair(), 3)
    weight = engine.module[0].weight
    with Gathered([weight]):
        before = weight.detach().clone()
    for wrong, found in ((torch.ones(2, DIM), r"a tensor of shape \(2, 12\)"), (before.double(), "torch.float64")):
        with pytest.raises(ValueError, match=found), Gathered([weight], modifier_rank=0):
            weight.data = wrong
        assert weight.shape == before.shape
        assert weight.dtype is before.dtype
        with Gathered([weight]):
            assert torch.equal(weight, before)
    engine.backward(mean_square(engine, batch(0)))
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("stage", (0, 3))
def test_step_under_inference_mode_is_refused(pool: Any, stage: int) -> None:
    pool.run(2, step_under_inference_mode, stage)


def step_under_inference_mode(stage: int) -> None:
    engine = start(pair(), stage)
    engine.backward(mean_square(engine, batch(0)))
    with pytest.raises(RuntimeError, match=r"step\(\) under torch.inference_mode\(\)"), torch.inference_mode():
        engine.step()
    engine.step()
    engine.backward(mean_square(engine, batch(1)))
    engine.step()
    engine.destroy()


class Damped(nn.Linear):
    """Forward writes into its weight, past the version counter."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(x)


def damped() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), Damped(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))


def damped_with_second_copies() -> None:
    zero = {"stage": 3, **FORCED, "zero_hpz_partition_size": 2}
    top = {"gradient_accumulation_steps": 2}  # the second forward writes into what the first has left
    same(run(damped, mean_square, 2, **top), run(damped, mean_square, 3, **top, zero_optimization=zero))


def test_second_copies_follow_what_forward_writes(pool: Any) -> None:
    pool.run(4, damped_with_second_copies)


def feedback_restarts() -> list[str]:
    zero = {"stage": 3, **FORCED, "zero_quantized_gradients": True}
    engines = [
        start(pair(), 3, zero_optimization={**zero, **more})
        for more in ({}, {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 8}})
    ]
    with mock.patch.object(reduce.logger, "info") as said:
        for engine in engines:
            engine.optimizer.publish_masters()
            engine.destroy()
    return [call.args[0] for call in said.call_args_list]


def test_error_feedback_says_that_it_starts_again(pool: Any) -> None:
    for lines in pool.run(2, feedback_restarts):
        assert sum("LoCo error feedback starts from zero" in line for line in lines) == 1


@on_ranks(2)
def test_one_rank_may_ask_which_tensors_share_storage() -> None:
    engine = start(pair(), 3)
    if torch.distributed.get_rank() == 1:  # as exports do that only one rank writes
        state = engine.module.state_dict()
        pointers = {name: value.untyped_storage().data_ptr() for name, value in state.items()}
        assert len(set(pointers.values())) == len(pointers)
        again = engine.module.state_dict()
        assert pointers == {name: value.untyped_storage().data_ptr() for name, value in again.items()}
        with pytest.raises(RuntimeError, match="data_ptr needs its values outside forward"):
            engine.module[0].weight.data_ptr()
    torch.distributed.barrier()
    engine.destroy()


class ReadsWeights(nn.Module):
    """A forward that reads the weights of its parts itself and hands them to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        weights = list(self.parameters())
        return mixed(self, x, weights) + (x @ weights[0].t()).sum()


def mixed(module: ReadsWeights, x: Tensor, weights: list[nn.Parameter]) -> Tensor:
    return module.down(module.up(x)) + weights[-1]


def compiled_losses(compiled: bool) -> list[float]:
    torch.manual_seed(0)
    zero = {"stage": 3, **FORCED}
    engine = start(nn.Sequential(ReadsWeights(), nn.Linear(6, 6), ReadsWeights()), 3, zero_optimization=zero)
    if compiled:
        engine.compile(backend="eager")
    losses = []
    for step in range(3):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(step))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    torch._dynamo.reset()  # compiled code keeps what it saw
    return losses


def compiled_as_eager() -> None:
    # The compiler patches modules for good, and looks at all there is of x.
    with mock.patch.object(nn.Module, "__init__", nn.Module.__init__), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        assert compiled_losses(True) == compiled_losses(False)


def test_a_compiled_forward_may_read_released_weights(pool: Any) -> None:
    pool.run(2, compiled_as_eager)


def traced() -> None:
    engine = start(pair(), 3)
    x = batch(0)
    engine.backward(mean_square(engine, x))
    engine.step()
    with pytest.raises(RuntimeError, match=r"torch.jit.trace .* parameter '0.weight' is sharded"):
        torch.jit.trace(engine.module, x)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())), torch.no_grad():
        assert torch.equal(torch.jit.trace(engine.module, x)(x), engine.module(x))
    engine.backward(mean_square(engine, x))
    engine.step()
    engine.destroy()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_of_released_weights_is_refused(pool: Any) -> None:
    pool.run(2, traced)
