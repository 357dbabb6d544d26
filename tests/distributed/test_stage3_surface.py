"""What clients do with stage 3 by its historical names, and engines that have no optimizer."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.zero.memory_estimators import model_state_bytes
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, ZeroParamType
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from tests.harness.pool import on_ranks

FORCED = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}


def config(*, optimizer: bool = True, **more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, **FORCED},
        **more,
    }
    if optimizer:
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    return settings


def layers(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def batch(step: int) -> torch.Tensor:
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(model.parameters()):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@contextlib.contextmanager
def without_hooks(engine: Any) -> Iterator[nn.Module]:
    """What client libraries do to generate with a model under training."""
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        for param in iter_params(offload.module, recurse=True):
            param.ds_active_sub_modules.clear()
        for hook in offload.forward_hooks:
            hook.remove()
        for hook in offload.backward_hooks:
            hook.remove()
        offload.forward_hooks = []
        offload.backward_hooks = []
        if not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()
        yield engine.module
        offload._register_deepspeed_module(offload.module)


@on_ranks(1, 2)
def test_hooks_taken_off_and_put_back_leave_training_as_it_is() -> None:
    results = []
    for surgery in (False, True):
        engine, *_ = deepspeed.initialize(model=layers(), config=config())
        for step in range(3):
            engine.backward(engine(batch(step)).square().mean())
            engine.step()
            if surgery:
                with without_hooks(engine) as module, torch.no_grad():
                    module(batch(step))
        handles = len(engine.optimizer.parameter_offload.forward_hooks)
        results.append((weights(engine.module), handles))
        engine.destroy()
        assert not hasattr(engine.module[0], "ds_external_parameters")
    (right, hooks), (seen, hooks_again) = results
    assert hooks == hooks_again
    for name, value in right.items():
        assert torch.equal(seen[name], value), name


@on_ranks(1, 2)
def test_methods_of_parameters() -> None:
    world = dist.get_world_size()
    engine, *_ = deepspeed.initialize(model=layers(), config=config())
    param = engine.module[0].weight
    right = layers()[0].weight
    assert param.partition_numel() == 512 // world
    assert param.padding_size() == 0
    assert param.ds_param_type is (ZeroParamType.PARTITIONED if world > 1 else ZeroParamType.NORMAL)
    assert param.ds_summary()["ds_shape"] == (32, 16)
    waiting = ZeroParamStatus.NOT_AVAILABLE if world > 1 else ZeroParamStatus.AVAILABLE
    assert param.ds_status is waiting
    param.all_gather()
    param.all_gather_coalesced([param, engine.module[2].bias]).wait()
    assert param.ds_status is ZeroParamStatus.AVAILABLE
    assert torch.equal(param, right)
    engine(batch(0))  # what is gathered by hand stays
    assert param.ds_status is ZeroParamStatus.AVAILABLE
    with torch.no_grad():
        param.fill_(2.0)
    param.partition(has_been_updated=True)
    engine.module[2].bias.partition()
    assert param.ds_status is waiting
    assert weights(engine.module)["0.weight"].unique().tolist() == [2.0]
    assert engine.optimizer.get_full_hp_param(param).unique().tolist() == [2.0]
    flat = engine.optimizer.fp32_partitioned_groups_flat
    assert sum(shard.numel() for shard in flat) >= (1072 // world if world > 1 else 0)
    engine.destroy()


@on_ranks(1, 2)
def test_parameters_made_whole_can_be_copied_and_pickled() -> None:
    engine, *_ = deepspeed.initialize(model=layers(), config=config())
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        twin = copy.deepcopy(engine.module)
    assert torch.equal(twin[0].weight, layers()[0].weight)
    assert not hasattr(twin[0].weight, "ds_id")
    engine.destroy()
    again = pickle.loads(pickle.dumps(engine.module))
    assert torch.equal(again[0].weight, layers()[0].weight)


# ---- without an optimizer --------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_an_engine_without_optimizer() -> None:
    engine, second, *_ = deepspeed.initialize(model=layers(), config=config(optimizer=False))
    assert isinstance(engine.optimizer, DeepSpeedZeRoOffload)
    assert second is engine.optimizer
    with torch.no_grad():
        assert torch.equal(engine(batch(0)), layers()(batch(0)))
        with without_hooks(engine) as module:
            assert torch.equal(module(batch(1)), layers()(batch(1)))
        assert torch.equal(engine(batch(2)), layers()(batch(2)))
    engine.empty_partition_cache()
    if dist.get_world_size() > 1:
        assert {param.ds_status for param in engine.module.parameters()} == {ZeroParamStatus.NOT_AVAILABLE}
    with pytest.raises(RuntimeError, match="no optimizer was given"):
        engine.step()
    assert engine.get_global_grad_norm() is None
    assert engine.get_lr() == []
    engine.destroy()
    assert engine.optimizer is None


@on_ranks(1, 2)
def test_gradients_flow_through_a_frozen_reference_model() -> None:
    """Two engines at once, the loss of one through the other, as in distillation and reward models."""
    reference, _, *_ = deepspeed.initialize(model=layers(5).requires_grad_(False), config=config(optimizer=False))
    engine, *_ = deepspeed.initialize(model=layers(), config=config())
    twin, frozen = layers(), layers(5).requires_grad_(False)
    other = torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    for step in range(2):
        engine.backward(reference(engine(batch(step))).square().mean())
        engine.step()
        losses = []
        for rank in range(dist.get_world_size()):
            x = torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            losses.append(frozen(twin(x)).square().mean())
        torch.stack(losses).mean().backward()
        other.step()
        other.zero_grad()
    for name, value in weights(engine.module).items():
        torch.testing.assert_close(value, twin.get_parameter(name), rtol=1e-5, atol=1e-6)
    reference.destroy()
    engine.destroy()


@on_ranks(2)
def test_an_engine_inside_the_forward_of_another() -> None:
    teacher, *_ = deepspeed.initialize(model=layers(5), config=config(optimizer=False))

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = teacher(x)
            return (self.net(x) - target).square().mean()

    engine, *_ = deepspeed.initialize(model=Student(), config=config())
    plain, right = layers(), layers(5)
    loss = engine(batch(0))
    assert torch.equal(loss, (plain(batch(0)) - right(batch(0)).detach()).square().mean())
    engine.backward(loss)
    engine.step()
    assert torch.equal(teacher(batch(1)), right(batch(1)))
    teacher.destroy()
    engine.destroy()


# ---- estimates -------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_estimates_are_what_an_engine_holds() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    total, largest = sum(param.numel() for param in model.parameters()), 256 * 257
    world = dist.get_world_size()
    engine, *_ = deepspeed.initialize(model=model, config=config(bf16={"enabled": True}))
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 256, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    held = engine.optimizer.peak_bytes
    engine.destroy()
    states = model_state_bytes(total, world, 3)
    seen = held["parameter"] + held["gradient"] + held["master"] + held["optimizer"]
    assert abs(seen - states.device) <= 0.05 * states.device
    host, device, layer = estimate_zero3_model_states_mem_needs(total, largest, world, 1, False, False)
    assert device == states.device + layer
    assert layer == largest * 4
    assert host == int(largest * 4 * world * 1.5)
