"""ZenFlow's thread: what fails in it, and what a slow one or an end in the middle changes."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_zenflow import LATE, STEP, assert_same, backward, everything, start, train, weights
from tests.harness.width import wide


def _failure() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def fail(self: Any, rows: Any, scale: float) -> None:
        raise OSError("no memory today")

    engine = start(2, {**STEP, "update_interval": 1, "overlap_step": True})
    train(engine, 0, 1)
    engine.optimizer.hold_still()  # its update has ended
    plain, DeepSpeedCPUAdam.update_from = DeepSpeedCPUAdam.update_from, fail
    try:
        train(engine, 1, 2)
        backward(engine, 2)
        with pytest.raises(OSError, match="no memory today"):
            engine.step()
    finally:
        DeepSpeedCPUAdam.update_from = plain
    engine.destroy()


def test_a_failure_of_the_thread_comes_out_of_the_next_step(pool) -> None:
    pool.run(1, _failure)


def _failure_of_one(late: bool, folder: str) -> list[str]:
    """Rank 1 fails in its thread: at the next boundary (`late`: where it lands after one) all say so, and go on."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    rank = dist.get_rank()

    def fail(self: Any, rows: Any, scale: float) -> None:
        if late:
            time.sleep(0.5)
        raise OSError("no memory today")

    engine = start(2, {**STEP, "update_interval": 2 if late else 1, "overlap_step": True})
    train(engine, 0, 4)
    engine.save_checkpoint(folder, tag="before")
    found = []
    plain = DeepSpeedCPUAdam.update_from
    if rank == 1:
        DeepSpeedCPUAdam.update_from = fail
    try:
        for index in range(4, 12):
            backward(engine, index)
            try:
                engine.step()
            except RuntimeError as error:
                found += [f"{type(error).__name__} in step {index}: {error}", repr(error.__cause__)]
                break
        with pytest.raises(RuntimeError, match="no memory today"):
            engine.step()  # for good
    finally:
        DeepSpeedCPUAdam.update_from = plain
    with pytest.raises(RuntimeError, match=r"rank 1: .*no memory today"):
        engine.save_checkpoint(folder, tag="after")
    engine.load_checkpoint(folder, tag="before")
    train(engine, 4, 8)
    after = weights(engine)
    engine.destroy()
    engine = start(2, {**STEP, "update_interval": 2 if late else 1, "overlap_step": True})
    engine.load_checkpoint(folder, tag="before")
    train(engine, 4, 8)
    assert all(torch.equal(one, other) for one, other in zip(after, weights(engine), strict=True))
    engine.destroy()
    return found


@pytest.mark.parametrize("late", (False, True))
def test_a_failure_of_one_rank_is_told_by_all_at_the_next_boundary(pool, tmp_path: Path, late: bool) -> None:
    (first, no_cause), (second, cause) = pool.run(2, _failure_of_one, late, str(tmp_path))
    assert first == second
    assert "RankFailed in step " in first
    assert "has failed on rank 1: OSError: no memory today" in first
    assert (no_cause, cause) == ("None", "OSError('no memory today')")


def _given_up_in_flight() -> None:
    engine = start(3, {**LATE, "update_interval": 1})
    train(engine, 0, 2)
    engine.destroy()
    assert not [thread for thread in threading.enumerate() if "zenflow" in thread.name]
    assert all(param.numel() for param in engine.module.parameters())


def test_destroyed_with_an_update_in_flight(pool) -> None:
    pool.run(2, _given_up_in_flight)


def _slow(stage: int) -> None:
    """However long an update takes, it lands when it should, and the weights of a forward are one version."""
    import time

    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def train_with_schedule(engine: Any) -> None:
        for index in range(8):
            train(engine, index, index + 1)
            engine.optimizer.param_groups[0]["lr"] *= 0.7  # an update under way keeps the rate of its step

    quick, slow = start(stage, LATE, "bf16"), start(stage, {**LATE, "pt_reserved_cores_perc": 0.0}, "bf16")
    train_with_schedule(quick)
    plain = DeepSpeedCPUAdam.update_from

    def late(self: Any, rows: Any, scale: float) -> None:
        time.sleep(0.02)
        plain(self, rows, scale)

    DeepSpeedCPUAdam.update_from = late
    try:
        train_with_schedule(slow)
    finally:
        DeepSpeedCPUAdam.update_from = plain
    assert_same(everything(slow), everything(quick))
    quick.destroy()
    slow.destroy()


@pytest.mark.parametrize("stage", (wide(2), 3))
def test_a_slow_thread_changes_no_number(pool, stage: int) -> None:
    pool.run(2, _slow, stage)
