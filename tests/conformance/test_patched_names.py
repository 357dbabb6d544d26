"""What clients replace, wrap or assign is looked up when it is used, not when it was imported."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime.engine import autocast_if_enabled
from deepspeed.runtime.zero import partition_parameters

STAGES = (0, 1, 2, 3)


def settings(stage: int, **top: Any) -> dict[str, Any]:
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": sgd, "zero_optimization": {"stage": stage}, **top}


def start(stage: int, **top: Any) -> Any:
    torch.manual_seed(1)
    return deepspeed.initialize(model=nn.Linear(4, 1), config=settings(stage, **top))[0]


def train(engine: Any, value: float = 1.0) -> None:
    engine.backward(engine(torch.full((1, 4), value)).sum())
    engine.step()


def weights(engine: Any) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [param.detach().clone() for param in engine.module.parameters()]


# ---- replaced functions ----------------------------------------------------------------------------------------------


def test_initialize_is_found_through_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper that another package has put around it, `functools.wraps` and all."""
    original, seen = deepspeed.initialize, []

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        seen.append(sorted(kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(deepspeed, "initialize", wrapper)
    with pytest.raises(ValueError, match="model"):
        deepspeed.initialize(args=None, model=None, config={"train_batch_size": 1})
    assert seen == [["args", "config", "model"]]


def the_constructor_wrapper_is_called_late() -> None:
    """Wrapped as `prevent_arange_dtype_change` does it: each entry of zero.Init asks the module for it anew."""
    module: Any = partition_parameters
    original, wrapped = module.zero_wrapper_for_fp_tensor_constructor, []

    def replacement(fn: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped.append(fn)
        return fn if fn is module._orig_torch_arange else original(fn, *args, **kwargs)

    module.zero_wrapper_for_fp_tensor_constructor = replacement
    try:
        with deepspeed.zero.Init(config_dict_or_path=settings(3, bf16={"enabled": True})):
            assert torch.arange(2.0).dtype == torch.float32
            assert torch.ones(2).dtype == torch.bfloat16
        count = len(wrapped)
        assert module._orig_torch_arange in wrapped
    finally:
        module.zero_wrapper_for_fp_tensor_constructor = original
    with deepspeed.zero.Init(config_dict_or_path=settings(3, bf16={"enabled": True})):
        assert torch.ones(2).dtype == torch.bfloat16
    assert len(wrapped) == count
    assert module.get_accelerator().name == "cpu"


def methods_of_one_engine_are_called_late() -> None:
    """`_zero3_consolidated_16bit_state_dict` on the instance, `state_dict` of the module."""
    engine = start(3)
    original = engine._zero3_consolidated_16bit_state_dict

    def replaced(self: Any, exclude_frozen_parameters: bool = False) -> Any:
        state = original(exclude_frozen_parameters)
        return None if state is None else {f"renamed.{name}": value for name, value in state.items()}

    engine._zero3_consolidated_16bit_state_dict = types.MethodType(replaced, engine)
    state = engine._zero3_consolidated_16bit_state_dict(False)
    assert state is None or sorted(state) == ["renamed.bias", "renamed.weight"]
    engine.destroy()

    engine = start(1)
    module = engine.module
    plain = module.state_dict
    module.state_dict = lambda *args, **kwargs: {"only": plain(*args, **kwargs)["weight"]}
    assert list(engine.module_state_dict()) == ["only"]
    engine.destroy()


def initializers_find_the_patched_pre_hooks() -> None:
    """A wrapper that re-orders the forward hooks of the model after `initialize` finds ours there."""
    engine = start(3)
    hooks = engine.module._forward_pre_hooks
    hooks.update(dict(reversed([(key, hooks.pop(key)) for key in list(hooks)])))
    before = weights(engine)
    train(engine)
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
    engine.destroy()


# ---- assigned attributes ---------------------------------------------------------------------------------------------


class Wrapper:
    """As clients write them: forwards everything, counts steps."""

    def __init__(self, wrapped: Any) -> None:
        self.optimizer = wrapped
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return self.optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


def an_assigned_wrapper_steps() -> None:
    for stage in STAGES:
        plain, engine = start(stage), start(stage)
        own = engine.optimizer
        engine.optimizer = wrapper = Wrapper(Wrapper(own))
        assert engine.optimizer is wrapper
        for number in range(2):
            train(plain, number + 1.0)
            train(engine, number + 1.0)
        assert (wrapper.steps, engine.global_steps, engine.was_step_applied()) == (2, 2, True)
        assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(engine), strict=True))
        engine.optimizer = own
        assert engine.optimizer is own
        train(engine)
        assert wrapper.steps == 2
        plain.destroy()
        engine.destroy()
        assert engine.optimizer is None


def what_cannot_step_is_refused() -> None:
    engine = start(1)
    own = engine.optimizer
    with pytest.raises(TypeError, match=r"engine\.optimizer = SGD.*pass another one as optimizer= to"):
        engine.optimizer = torch.optim.SGD(engine.module.parameters(), lr=1.0)
    assert engine.optimizer is own
    engine.optimizer = None
    assert engine.optimizer is None
    with pytest.raises(RuntimeError, match=r"engine\.step: engine\.optimizer has been set to None"):
        engine.step()
    engine.optimizer = own
    train(engine)
    engine.destroy()


def counters_are_read_and_assigned() -> None:
    engine = start(2, gradient_accumulation_steps=2)
    assert (engine.micro_steps, engine.local_rank) == (0, torch.distributed.get_rank())
    train(engine)
    assert (engine.micro_steps, engine.global_steps) == (1, 0)
    train(engine)
    assert (engine.micro_steps, engine.global_steps) == (2, 1)
    engine.micro_steps = 5  # the second micro-step of a window
    assert engine.is_gradient_accumulation_boundary()
    engine.global_steps = 7
    train(engine)
    assert (engine.micro_steps, engine.global_steps) == (6, 8)
    with pytest.raises(ValueError, match=r"engine\.micro_steps = -1: expected a count"):
        engine.micro_steps = -1
    engine.lr_scheduler = None
    train(engine)
    engine.destroy()


# ---- timers, monitor, overflow, compile ------------------------------------------------------------------------------


def timers_run_where_they_are_asked_for() -> None:
    engine = start(1)
    assert engine.get_wall_clock_timers() == {}
    assert engine.timers.get_timers() == {}
    engine.tput_timer.update_epoch_count()
    for _ in range(4):
        train(engine)
    assert engine.tput_timer.epoch_count == 1
    assert engine.tput_timer.global_step_count == 4
    assert 0 < engine.tput_timer.avg_samples_per_sec() < float("inf")
    assert engine.monitor.enabled is engine.monitor.tb_monitor.enabled is False
    engine.monitor.write_events([("Train/loss", 1.0, 1)])
    engine.destroy()

    engine = start(1, wall_clock_breakdown=True, steps_per_print=2)
    for _ in range(2):
        train(engine)
    measured = engine.get_wall_clock_timers()
    assert sorted(measured) == ["bwd", "fwd", "step"]
    assert all(milliseconds > 0 for milliseconds in measured.values())
    with pytest.raises(RuntimeError, match="shapes"):
        engine(torch.ones(1, 3))  # the timer of forward has begun
    train(engine)
    train(engine)
    engine.destroy()


def an_overflow_is_known_before_the_step() -> None:
    for stage in STAGES:
        engine = start(stage, fp16={"enabled": True, "initial_scale_power": 4})
        rank = torch.distributed.get_rank()
        for value, expected in ((1.0, False), (float("inf") if rank == 1 else 1.0, True)):
            engine.backward(engine(torch.full((1, 4), value).half()).sum())
            assert engine.optimizer.check_overflow() is expected
            assert engine.optimizer.overflow is expected
            engine.step()
            assert engine.was_step_applied() is not expected
        engine.destroy()


def a_compiled_engine_trains_as_before() -> None:
    plain = nn.Module.__init__  # torch.compile wraps it for good
    try:
        with warnings.catch_warnings():
            # Tracing looks at the .grad of what a graph break hands over, and torch itself warns of that.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            train_compiled()
    finally:
        nn.Module.__init__ = plain  # type: ignore[method-assign]
        torch.compiler.reset()


def train_compiled() -> None:
    for stage in (1, 3):
        plain, engine = start(stage), start(stage)
        assert engine.is_compiled is False
        engine.compile(backend="eager", compile_kwargs={"dynamic": False})
        assert engine.is_compiled is True
        train(plain)
        train(engine)
        assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(engine), strict=True))
        with pytest.raises(NotImplementedError, match=r"engine\.compile\(schedule=\.\.\.\): DeepCompile is not built"):
            engine.compile(schedule=[(0, [])])
        plain.destroy()
        engine.destroy()


def autocast_as_the_engine_has_it() -> None:
    engine = start(1)
    with autocast_if_enabled(engine):
        assert not torch.is_autocast_enabled("cpu")
    engine.destroy()
    engine = start(1, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    with autocast_if_enabled(engine):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    engine.destroy()


def the_backend_is_the_public_functions() -> None:
    from deepspeed import comm

    gathered = torch.empty(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch has another name for it
        comm.TorchBackend.get_all_gather_function()(gathered, torch.full((1,), float(comm.get_rank())))
    assert gathered.tolist() == [0.0, 1.0]
    backend = comm.TorchBackend(backend="gloo", timeout=comm.default_pg_timeout, init_method=None)
    total = torch.ones(2)
    backend.all_reduce(total)
    assert total.tolist() == [2.0, 2.0]
    assert backend.is_initialized()
    assert len(deepspeed.get_accelerator().default_generators) == deepspeed.get_accelerator().device_count()


BODIES = (
    the_constructor_wrapper_is_called_late,
    methods_of_one_engine_are_called_late,
    initializers_find_the_patched_pre_hooks,
    an_assigned_wrapper_steps,
    what_cannot_step_is_refused,
    counters_are_read_and_assigned,
    timers_run_where_they_are_asked_for,
    an_overflow_is_known_before_the_step,
    a_compiled_engine_trains_as_before,
    autocast_as_the_engine_has_it,
    the_backend_is_the_public_functions,
)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_two_ranks(ranks: Callable[..., Any], body: Callable[[], None]) -> None:
    ranks(body)
