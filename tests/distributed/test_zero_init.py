"""Models built under ``zero.Init``: the same values and the same training as built whole, and only shards held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from tests.harness.models import SPECS
from tests.harness.pool import on_ranks


def config(stage: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def under_init(build: Callable[[], nn.Module], settings: dict[str, Any] | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with deepspeed.zero.Init(config_dict_or_path=settings or config()):
        return build()


def whole(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole values of a model, sharded or not. Collective where it is."""
    with deepspeed.zero.GatheredParameters(model.parameters()):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_equal(seen: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert list(seen) == list(right)
    for name, value in right.items():
        assert torch.equal(seen[name], value), name
        assert seen[name].dtype is value.dtype, name


def layers(depth: int = 3, width: int = 16) -> nn.Module:
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.Tanh())))


def train(model: nn.Module, settings: dict[str, Any], steps: int = 2) -> dict[str, torch.Tensor]:
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(2, 16, generator=generator).to(next(model.parameters()).dtype)
        loss = (engine(x).float() - 1).square().mean()
        engine.backward(loss)
        engine.step()
    result = weights(engine.module)
    engine.destroy()
    return result


class Initialised(nn.Module):
    """Writes to the parameters of inner modules in every common way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.apply(self.fill)
        self.late = nn.Parameter(torch.randn(3))
        self.second.weight.data.mul_(2)
        with torch.no_grad():
            self.first.bias.copy_(torch.randn(7))
            self.second.bias += self.late
        self.first.weight.data = torch.randn(7, 5)

    def fill(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, 0.5)
            part.bias.data.uniform_()
            nn.init.constant_(part.bias, 0.25)


# ---- values ----------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
def test_every_kind_of_model_has_the_values_it_has_when_built_whole() -> None:
    for name, spec in SPECS.items():
        model = under_init(spec.build_module)
        assert_equal(weights(model), weights(whole(spec.build_module))), name


@on_ranks(2)
def test_what_constructors_write_to_inner_modules_counts_as_rank_0_has_it() -> None:
    right = weights(whole(Initialised))
    assert_equal(weights(under_init(Initialised)), right)
    assert_equal(weights(under_init(Initialised, seed=7 * dist.get_rank())), right)


@pytest.mark.parametrize("how", ("once", "nested", "twice", "built before", "no init at stage 3", "lower stage"))
@on_ranks(1, 2)
def test_training_is_that_of_a_model_built_whole(how: str) -> None:
    settings = config(2 if how == "lower stage" else 3)
    right = train(whole(layers), config(2))
    if how == "nested":
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = under_init(layers)
    elif how == "built before":
        model = whole(layers)
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    elif how == "no init at stage 3":
        model = whole(layers)
    else:
        model = under_init(layers, settings)
    if how == "twice":
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    assert_equal(train(model, settings), right)


@on_ranks(2)
def test_a_sharded_model_can_be_trained_below_stage_3() -> None:
    assert_equal(train(under_init(layers), config(1)), train(whole(layers), config(1)))


@on_ranks(2)
def test_initialize_inside_the_context() -> None:
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config()):
        model = layers()
        seen = train(model, config())
        after = nn.Linear(3, 3)
    assert_equal(seen, train(whole(layers), config()))
    assert after.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
