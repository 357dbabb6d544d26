"""Updates during backward: used when the guess was right, undone to the last bit when not, never seen too early."""

from __future__ import annotations

import pytest
import torch

from tests.harness.models import SPECS
from tests.harness.offload import apart, offload_sections
from tests.harness.parity import OPTIMIZERS


def _engine(stage: int, clip: float, kind: str = "super", overlap_comm: bool | None = None, **top):
    import deepspeed

    small = {"reduce_bucket_size": 50, "sub_group_size": 30}
    small |= {} if overlap_comm is None else {"overlap_comm": overlap_comm}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": clip,
        "optimizer": OPTIMIZERS["adamw"].block,
        "zero_optimization": {"stage": stage, **small, **offload_sections(kind)},
        **top,
    }
    with apart():
        return deepspeed.initialize(model=SPECS["odd"].build(), config=config)[0]


def _backward(engine, index: int) -> None:
    spec, rank = SPECS["odd"], torch.distributed.get_rank()
    engine.backward(spec.loss(engine, spec.batch(index, rank, 2), index, rank))


def _guesses(stage: int, clip: float) -> tuple[int, int]:
    engine = _engine(stage, clip)
    for index in range(3):
        _backward(engine, index)
        engine.step()
    found = engine.optimizer.executors.speculation
    counts = found.right, found.undone
    engine.destroy()
    return counts


@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize("stage", (2, 3))
def test_guesses_are_right_unless_something_is_clipped(pool, world: int, stage: int) -> None:
    for right, undone in pool.run(world, _guesses, stage, 0.0):
        assert right >= 3
        assert undone == 0
    for right, undone in pool.run(world, _guesses, stage, 1e-3):
        assert right == 0
        assert undone >= 3


def _in_between(stage: int) -> None:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_grad

    one, two = _engine(stage, 0.0), _engine(stage, 0.0, "cpu")
    for index in range(4):
        for engine in (one, two):
            params = [param for param in engine.module.parameters() if param.requires_grad]
            before = [safe_get_full_fp32_param(param) for param in params]
            _backward(engine, index)
            if index == 1:  # masters of the last step, although units have been updated
                for param, value in zip(params, before, strict=True):
                    assert torch.equal(safe_get_full_fp32_param(param), value)
            if index == 2:
                safe_set_full_grad(params[0], 2 * safe_get_full_grad(params[0]))
            if index == 3:
                for group in engine.optimizer.param_groups:
                    group["lr"] = 0.5
            engine.step()
    for left, right in zip(one.module.parameters(), two.module.parameters(), strict=True):
        if left.requires_grad:
            assert torch.equal(safe_get_full_fp32_param(left), safe_get_full_fp32_param(right))
    one.destroy()
    two.destroy()


@pytest.mark.parametrize("stage", (2, 3))
def test_nobody_sees_a_guess(pool, stage: int) -> None:
    pool.run(2, _in_between, stage)


def _error() -> None:
    engine = _engine(2, 0.0)
    _backward(engine, 0)
    engine.step()

    def fail(rows, scale) -> None:
        raise OSError("no memory today")

    engine.optimizer.optimizer.update_from = fail
    _backward(engine, 1)
    with pytest.raises(OSError, match="no memory today"):
        engine.step()


def test_an_error_of_the_worker_comes_out_of_step(pool) -> None:
    pool.run(1, _error)


def _masters(engine) -> list[torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return [safe_get_full_fp32_param(param) for param in engine.module.parameters() if param.requires_grad]


def _assert_same_masters(one, two) -> None:
    for left, right in zip(_masters(one), _masters(two), strict=True):
        assert torch.equal(left, right)
    one.destroy()
    two.destroy()


def _worker_fails_once(stage: int) -> None:
    one, two = _engine(stage, 0.0), _engine(stage, 0.0, "cpu")
    optimizer, calls = one.optimizer.optimizer, []

    def fail_once(rows, scale) -> None:
        calls.append(scale)
        if len(calls) == 2 and torch.distributed.get_rank() == 0:
            raise MemoryError("none left")
        type(optimizer).update_from(optimizer, rows, scale)

    for index in range(3):
        for engine in (one, two):
            if index == 1 and engine is one:
                optimizer.update_from = fail_once
            _backward(engine, index)
            engine.step()
    assert len(calls) > (2 if torch.distributed.get_rank() == 0 else 1)
    _assert_same_masters(one, two)


def test_a_failed_guess_is_a_wrong_one(pool) -> None:
    """The unit is put back and updated at the boundary; nothing of the failure is left."""
    pool.run(2, _worker_fails_once, 3)


def _gives_up() -> None:
    engine = _engine(2, 0.0)

    def fail(rows, scale) -> None:
        raise OSError("no memory today")

    engine.optimizer.optimizer.update_from = fail
    _backward(engine, 0)
    engine.zero_grad()
    engine.destroy()


def test_an_engine_whose_worker_failed_can_go(pool) -> None:
    pool.run(1, _gives_up)


def _changed_by_hand(stage: int, how: str) -> None:
    """Gradients changed between backward and step, in any way, count as they do without guesses."""
    one, two = _engine(stage, 0.0, overlap_comm=True), _engine(stage, 0.0, "cpu", overlap_comm=True)
    for index in range(3):
        for engine in (one, two):
            _backward(engine, index)
            if how == "added":
                param = list(engine.module.parameters())[index]
                param.grad = torch.full_like(param, 0.5)
            elif how == "averaged_gradients":
                for grads in engine.optimizer.averaged_gradients.values():
                    for grad in grads or ():
                        grad.mul_(0.25)
            else:
                for group in engine.optimizer.param_groups:
                    group["lr"] = torch.tensor(0.5) if index == 0 else group["lr"].mul_(0.5)
            engine.step()
    _assert_same_masters(one, two)


@pytest.mark.parametrize(
    ("world", "stage", "how"),
    ((1, 2, "added"), (1, 2, "averaged_gradients"), (2, 2, "averaged_gradients"), (1, 2, "rate in a tensor")),
)
def test_changes_by_hand_count(pool, world: int, stage: int, how: str) -> None:
    pool.run(world, _changed_by_hand, stage, how)
