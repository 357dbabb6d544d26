"""Habits of ordinary training loops that have broken others, and what each must come to, at every stage.

The numbers are compared with one process of plain torch over the same batches. SGD makes a change of weights a
gradient, so nothing here looks inside the engine.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness.models import mlp
from tests.harness.pool import WorkerPool

STAGES = (0, 1, 2)
LR = 0.1
DIM = 16
# Ranks are summed in another order than one process sums them; fp32 gradients of this size agree to a few ulp.
CLOSE = {"rtol": 0.0, "atol": 1e-6}


class Interrupted(Exception):
    """Raised on purpose inside a forward or a backward."""


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Interrupted("in backward")


def build(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return mlp(DIM, DIM, DIM, DIM)


def settings(stage: int, accumulation: int = 1, **top: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage},
        **top,
    }


def start(config: dict[str, Any], module: nn.Module | None = None, **kwargs: Any) -> Any:
    import deepspeed

    engine, *_ = deepspeed.initialize(model=module or build(), config=config, **kwargs)
    return engine


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1009 * number + rank + 1)
    return torch.randn(2, DIM, generator=generator), torch.randn(2, DIM, generator=generator)


def loss_of(model: Callable[[Tensor], Tensor], number: int, rank: int) -> Tensor:
    x, y = batch(number, rank)
    return F.mse_loss(model(x), y)


def micro_step(engine: Any, number: int) -> None:
    engine.backward(loss_of(engine, number, dist.get_rank()))
    engine.step()


def plain(windows: Iterable[Iterable[int]], divisor: int | None = None) -> nn.Module:
    """Plain torch over all ranks: one SGD step per window of batch numbers, mean over ranks and window."""
    module, world = build(), dist.get_world_size()
    for window in windows:
        numbers = list(window)
        for number in numbers:
            for rank in range(world):
                (loss_of(module, number, rank) / (world * (divisor or len(numbers)))).backward()
        with torch.no_grad():
            for param in module.parameters():
                param -= LR * param.grad
                param.grad = None
    return module


def same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, left), right in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            left.detach(), right.detach(), msg=lambda text, name=name: f"{name}: {text}", **CLOSE
        )


# ---- order of calls --------------------------------------------------------------------------------------------------


def evaluation_between(stage: int) -> None:
    engine = start(settings(stage, accumulation=2))
    for number in range(4):
        engine.eval()
        with torch.no_grad():
            loss_of(engine, 99, dist.get_rank())
        loss_of(engine, 98, dist.get_rank())
        engine.train()
        micro_step(engine, number)
    same_weights(engine.module, plain([(0, 1), (2, 3)]))
    engine.destroy()


def windows_straddle_epochs(stage: int) -> None:
    engine = start(settings(stage, accumulation=4))
    for number in range(12):
        micro_step(engine, number)
    assert engine.global_steps == 3
    same_weights(engine.module, plain([range(4), range(4, 8), range(8, 12)]))
    engine.destroy()


def dropped_window_leaves_nothing(stage: int) -> None:
    engine = start(settings(stage, accumulation=2))
    micro_step(engine, 7)
    engine.zero_grad()
    micro_step(engine, 0)
    same_weights(engine.module, plain([(0,)], divisor=2))
    engine.destroy()


def short_window_by_hand(stage: int) -> None:
    engine = start(settings(stage, accumulation=4))
    for number in range(6):
        engine.set_gradient_accumulation_boundary(number in (3, 5))
        micro_step(engine, number)
    same_weights(engine.module, plain([range(4), (4, 5)], divisor=4))
    engine.destroy()


def step_without_backward(stage: int) -> None:
    engine = start(settings(stage))
    engine.step()
    same_weights(engine.module, build())
    micro_step(engine, 0)
    same_weights(engine.module, plain([(0,)]))
    engine.destroy()


def accumulation_by_no_sync(stage: int) -> None:
    engine = start(settings(stage))
    for number in range(3):
        with engine.no_sync() if number < 2 else contextlib.nullcontext():
            engine.backward(loss_of(engine, number, dist.get_rank()) / 3)
    engine.step()
    same_weights(engine.module, plain([range(3)]))
    engine.destroy()


def steps_inside_no_sync(stage: int) -> None:
    """Wrappers that hold gradients back and call step() every time: it counts, and is refused where it would update."""
    engine = start(settings(stage, gradient_accumulation_steps=2))
    for number in range(2):
        with engine.no_sync() if number < 1 else contextlib.nullcontext():
            engine.backward(loss_of(engine, number, dist.get_rank()))
            engine.step()
    same_weights(engine.module, plain([range(2)]))
    assert engine.global_steps == 1
    engine.backward(loss_of(engine, 0, dist.get_rank()))
    engine.step()
    with engine.no_sync():
        engine.backward(loss_of(engine, 1, dist.get_rank()))
        with pytest.raises(RuntimeError, match="at a boundary"):
            engine.step()
    assert engine.global_steps == 1
    engine.destroy()


def step_skipped_by_request(stage: int) -> None:
    """Two models trained together skip together: who did not overflow is told to."""
    engine = start(settings(stage))
    micro_step(engine, 0)
    engine.backward(loss_of(engine, 1, dist.get_rank()))
    engine.optimizer.skip_step = True
    engine.step()
    assert (engine.global_steps, engine.skipped_steps, engine.optimizer.skip_step) == (2, 1, False)
    same_weights(engine.module, plain([(0,)]))
    micro_step(engine, 2)
    same_weights(engine.module, plain([(0,), (2,)]))
    engine.destroy()


def _forward_and_backward(engine: Any, own_backward: bool) -> None:
    loss = loss_of(engine, 9, dist.get_rank())
    loss.backward() if own_backward else engine.backward(loss)


def goes_on_after_an_exception(stage: int) -> None:
    """A failing forward or backward on all ranks, managed or plain; after zero_grad() nothing of it is left."""
    engine = start(settings(stage))

    def fail(*_: Any) -> None:
        raise Interrupted("in forward")

    for in_forward in (True, False):
        for own_backward in (True, False):
            if in_forward:
                handle = engine.module[2].register_forward_pre_hook(fail)
            else:
                handle = engine.module[1].register_forward_hook(lambda module, args, out: _FailsInBackward.apply(out))
            with pytest.raises(Interrupted):
                _forward_and_backward(engine, own_backward)
            handle.remove()
            engine.zero_grad()
    micro_step(engine, 0)
    micro_step(engine, 1)
    same_weights(engine.module, plain([(0,), (1,)]))
    engine.destroy()


def copies_of_the_module_are_plain(stage: int) -> None:
    """torch.save and deepcopy of a module in training give modules that no engine knows."""
    engine = start(settings(stage))
    micro_step(engine, 0)
    file = io.BytesIO()
    torch.save(engine.module, file)
    file.seek(0)
    loaded, copied = torch.load(file, weights_only=False), copy.deepcopy(engine.module)
    for module in (loaded, copied):
        same_weights(module, engine.module)
        loss_of(module, 5, 0).backward()
    micro_step(engine, 1)
    same_weights(engine.module, plain([(0,), (1,)]))
    same_weights(copied, plain([(0,)]))
    engine.destroy()


BEHAVIOURS = (
    evaluation_between,
    windows_straddle_epochs,
    dropped_window_leaves_nothing,
    short_window_by_hand,
    step_without_backward,
    accumulation_by_no_sync,
    steps_inside_no_sync,
    step_skipped_by_request,
    goes_on_after_an_exception,
    copies_of_the_module_are_plain,
)


def at_every_stage(behaviour: Callable[[int], None]) -> None:
    for stage in STAGES:
        behaviour(stage)


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.__name__)
def test_calls_in_this_order_give_the_numbers_of_torch(pool: WorkerPool, behaviour: Callable[[int], None]) -> None:
    pool.run(2, at_every_stage, behaviour)


# ---- settings that must not be dropped -------------------------------------------------------------------------------


def refuses_unused(stage: int) -> str:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(DIM, DIM), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    config = settings(stage)
    config["zero_optimization"]["ignore_unused_parameters"] = False
    engine = start(config, Idle())
    with pytest.raises(AssertionError) as caught:
        micro_step(engine, 0)
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("stage", (1, 2))
def test_unused_parameters_are_named_where_the_config_forbids_them(pool: WorkerPool, stage: int) -> None:
    for text in pool.run(2, refuses_unused, stage):
        assert "idle.weight" in text
        assert "idle.bias" in text
        assert "ignore_unused_parameters" in text


def logs_collectives() -> set[str]:
    import deepspeed

    engine = start(settings(1, comms_logger={"enabled": True}))
    try:
        micro_step(engine, 0)
        return set(deepspeed.comm.log_summary()["summary"])
    finally:
        engine.destroy()
        deepspeed.comm.configure(enabled=False)
        deepspeed.comm.reset_log()


def test_the_log_of_collectives_is_switched_on_by_the_config(pool: WorkerPool) -> None:
    for names in pool.run(2, logs_collectives):
        assert {"all_reduce", "reduce_scatter", "all_gather"} <= names


def with_16_bit_and_kept_fp32(folder: str) -> None:
    class Kept(nn.Module):
        def __init__(self, seed: int = 0) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.line, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
            self.register_buffer("table", torch.tensor([16777217.0, 1 / 3]))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.line(x.bfloat16()).float())

    for stage in STAGES:
        extra = {"bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": ["norm"]}}
        engine = start(settings(stage, **extra), Kept())
        assert engine.module.norm.weight.dtype == torch.float32
        micro_step(engine, 0)
        engine.save_checkpoint(folder, tag=stage)
        resumed = start(settings(stage, **extra), Kept(seed=3))
        resumed.load_checkpoint(folder, tag=stage)
        for name, value in engine.module.state_dict().items():
            assert torch.equal(value, resumed.module.state_dict()[name]), name
        engine.destroy()
        resumed.destroy()


def test_modules_kept_in_fp32_beside_bf16_are_saved_and_resumed(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, with_16_bit_and_kept_fp32, str(tmp_path))


# ---- life ------------------------------------------------------------------------------------------------------------


def engines_in_a_loop(give_back: bool) -> int:
    alive = []
    for stage in STAGES * 2:
        engine = start(settings(stage, optimizer={"type": "Adam", "params": {"lr": 1e-3}}))
        micro_step(engine, 0)
        alive.append(weakref.ref(engine.module))
        if give_back:
            engine.destroy()
            engine.destroy()
        del engine
        gc.collect()
    return sum(reference() is not None for reference in alive)


def groups_in_a_loop() -> list[int]:
    counts = []
    for _ in range(4):
        one, two = start(settings(3)), start(settings(3))
        micro_step(one, 0)
        micro_step(two, 0)
        one.destroy()
        two.destroy()
        counts.append(len(torch.distributed.distributed_c10d._world.pg_map))
    return counts


def test_process_groups_of_an_engine_that_is_gone_are_used_again(pool: WorkerPool) -> None:
    for counts in pool.run(2, groups_in_a_loop):
        assert len(set(counts)) == 1


@pytest.mark.parametrize(("give_back", "left"), ((True, 0), (False, 1)))
def test_at_most_the_last_engine_of_a_loop_stays_alive(pool: WorkerPool, give_back: bool, left: int) -> None:
    assert max(pool.run(2, engines_in_a_loop, give_back)) <= left


def plateau_and_copies(stage: int) -> None:
    """ReduceLROnPlateau without its metric changes nothing and says what to pass; engines are not copied."""
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    config = {name: value for name, value in settings(stage).items() if name != "optimizer"}
    engine = start(config, module, optimizer=optimizer, lr_scheduler=schedule)
    x, y = batch(0, dist.get_rank())
    engine.backward(F.mse_loss(engine(x), y))
    with pytest.raises(TypeError, match=r"ReduceLROnPlateau\.step needs metrics; nothing was updated.*lr_kwargs"):
        engine.step()
    assert engine.global_steps == 0
    for metric in (1.0, 2.0):
        engine.step(lr_kwargs={"metrics": metric})
        engine.backward(F.mse_loss(engine(x), y))
    assert engine.get_lr() == [LR / 2]
    with pytest.raises(TypeError, match=r"save_checkpoint.*engine\.module"):
        copy.deepcopy(engine)
    with pytest.raises(TypeError, match="cannot be copied, pickled"):
        torch.save(engine, io.BytesIO())
    engine.destroy()


def test_schedules_that_need_a_metric_and_copies_of_the_engine(pool: WorkerPool) -> None:
    pool.run(2, plateau_and_copies, 1)
