"""Forms of documented functions that no client package above shows: older names, positions, refused arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.conformance.calls.table import backward, calls, changed, start, train, weights


@calls(
    "documented",
    "optimizer.load_state_dict(state), ([state of each rank]), (state_dict_list=)",
    "optimizer.load_state_dict(state, load_optimizer_states=False)",
    "optimizer.load_state_dict(..., checkpoint_folder=) is refused",
)
def states(folder: Path) -> None:
    for stage in (0, 1, 2, 3):
        engine = start(stage, bf16={"enabled": True})
        train(engine)
        kept, state = weights(engine), engine.optimizer.state_dict()
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, state)
        for options in (
            {"state_dict": state},
            {"state_dict_list": everyone, "load_optimizer_states": True, "load_from_fp32_weights": True},
            {"state_dict": everyone, "load_optimizer_states": False},
        ):
            train(engine)
            engine.optimizer.load_state_dict(**options)
            assert not changed(kept, weights(engine))
        counts = {int(state["step"]) for state in engine.optimizer.state.values()}
        assert counts <= {2}  # moments stay those of the second step where the masters alone go back
        with pytest.raises(ValueError, match="found checkpoint_folder"):
            engine.optimizer.load_state_dict(state, checkpoint_folder=str(folder))
        with pytest.raises(ValueError, match="load_optimizer_states='"):
            engine.optimizer.load_state_dict(state, str(folder))
        with pytest.raises(ValueError, match="found 1 states for 2 ranks"):
            engine.optimizer.load_state_dict([state])
        with pytest.raises(TypeError, match="needs the result"):
            engine.optimizer.load_state_dict()
        engine.destroy()


@calls(
    "documented",
    "optimizer.backward(loss, create_graph=False, retain_graph=True)",
    "optimizer.backward(loss, create_graph=True) is refused",
    "utils.safe_update_full_grad_vectorized(param_list, update_func(grad, param))",
)
def gradients(folder: Path) -> None:
    for stage in (1, 3):
        engine = start(stage)
        with pytest.raises(ValueError, match="create_graph=True"):
            engine.optimizer.backward(engine(torch.ones(2, 4)).sum(), create_graph=True)
        backward(engine)
        params = list(engine.module.parameters())
        before = [deepspeed.utils.safe_get_full_grad(param) for param in params]
        seen: list[nn.Parameter] = []

        def double(grad: torch.Tensor, param: nn.Parameter, seen: list[nn.Parameter] = seen) -> torch.Tensor:
            seen.append(param)
            return grad * 2

        deepspeed.utils.safe_update_full_grad_vectorized(params, double)
        assert all(a is b for a, b in zip(params, seen, strict=True))
        for param, grad in zip(params, before, strict=True):
            assert torch.equal(deepspeed.utils.safe_get_full_grad(param), grad * 2)
        engine.step()
        engine.destroy()


@calls(
    "documented",
    "DeepSpeedFlopsProfilerConfig(param_dict), DeepSpeedActivationCheckpointingConfig(param_dict)",
    "a section built from a mapping by position is refused",
    "partition_parameters.get_all_subclasses(cls, include_root=True)",
    "runtime.utils.torch_memory_reserved(device_index=None), torch_max_memory_reserved",
    "accelerator.create_op_builder(op_name)",
    "a subclass of runtime.base_optimizer.DeepSpeedOptimizer without an optimizer yet",
    "adamw_mode=True for Adagrad is refused",
)
def small_forms(folder: Path) -> None:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
    from deepspeed.runtime.utils import torch_max_memory_reserved, torch_memory_reserved
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.partition_parameters import get_all_subclasses

    config = {"flops_profiler": {"profile_step": 4}, "activation_checkpointing": {"profile": True}}
    assert DeepSpeedFlopsProfilerConfig(config).profile_step == 4
    assert DeepSpeedFlopsProfilerConfig({}).profile_step == DeepSpeedFlopsProfilerConfig().profile_step == 1
    assert DeepSpeedActivationCheckpointingConfig(config).profile is True
    assert DeepSpeedActivationCheckpointingConfig(profile=True).profile is True
    with pytest.raises(TypeError, match=r"write DeepSpeedZeroConfig\(\*\*values\)"):
        DeepSpeedZeroConfig({"stage": 2})

    class Root:
        pass

    class Below(Root):
        pass

    assert get_all_subclasses(Root) == {Root, Below}
    assert get_all_subclasses(Root, include_root=False) == {Below}
    assert 0 < torch_memory_reserved(None) <= torch_max_memory_reserved(0)
    assert deepspeed.get_accelerator().create_op_builder(op_name="CPUAdamBuilder").name == "cpu_adam"

    class Late(DeepSpeedOptimizer):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)

    assert Late().param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="adamw_mode = True"):
        DeepSpeedCPUAdagrad([nn.Parameter(torch.ones(1))], adamw_mode=True)
