"""Saving beside training: what is saved is the moment of the call, and its end is heard of by all ranks alike."""

from __future__ import annotations

import contextlib
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.checkpoint import runs
from tests.harness.pool import WorkerPool
from tests.harness.programs import run_programs
from tests.harness.width import product, wide

DECOUPLED = {"checkpoint": {"writer": {"type": "FAST", "decoupled": True}}}


@contextlib.contextmanager
def held_back() -> Iterator[threading.Event]:
    """No file is opened for writing before the event is set."""
    from deepspeed.checkpoint.disk import durable

    go, plain = threading.Event(), durable.open_for_writing

    def waiting(path: Path) -> Any:
        assert go.wait(60)
        return plain(path)

    durable.open_for_writing = waiting
    try:
        yield go
    finally:
        go.set()
        durable.open_for_writing = plain


def overwritten_body(folder: str, stage: int, precision: str) -> None:
    rank = dist.get_rank()
    engine = runs.start(runs.config(stage, precision, **DECOUPLED))
    for index in range(3):
        runs.step(engine, index, rank)
    saved = runs.snapshot(engine)
    with held_back() as go:
        assert engine.save_checkpoint(folder, tag="a", client_state={"epoch": 3}) is True
        for index in range(3, 6):  # everything that was saved changes before a byte is written
            runs.step(engine, index, rank)
        assert [entry.name for entry in Path(folder).iterdir() if not entry.name.startswith(".")] == []
        go.set()
        later = runs.snapshot(engine)
        engine.save_checkpoint(folder, tag="b")
        engine.destroy()
    for tag, expected in (("a", saved), ("b", later)):
        other = runs.start(runs.config(stage, precision), seed=9)
        _, client_state = other.load_checkpoint(folder, tag=tag)
        runs.same(expected, runs.snapshot(other))
        assert client_state.get("epoch") == (3 if tag == "a" else None)
        other.destroy()


@pytest.mark.parametrize(
    ("stage", "precision"),
    product((0, 1, 2, 3), ("fp32", "bf16", "fp16"), daily=lambda *row: row in ((0, "fp32"), (2, "bf16"), (3, "fp32"))),
)
def test_the_moment_of_the_call_is_saved(pool: WorkerPool, tmp_path: Path, stage: int, precision: str) -> None:
    pool.run(2, overwritten_body, str(tmp_path), stage, precision)
    assert (tmp_path / "latest").read_text() == "b"


@contextlib.contextmanager
def copying_held_back() -> Iterator[threading.Event]:
    """Masters and states are not copied before the event is set."""
    from deepspeed.utils.torch_file import TorchFile

    go, plain = threading.Event(), TorchFile.finish_moving

    def waiting(self: Any) -> None:
        assert go.wait(60)
        plain(self)

    TorchFile.finish_moving = waiting  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()
        TorchFile.finish_moving = plain  # type: ignore[method-assign]


CHANGES = ("step", "load", "set master", "set state", "edit", "offload_states")


def changing_body(folder: str, stage: int, precision: str, changes: list[str]) -> None:
    """Everything that writes to masters or states waits until they have been copied."""
    from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_fp32_param, safe_set_full_optimizer_state

    engine = runs.start(runs.config(stage, precision, **DECOUPLED))
    for index in range(2):
        runs.step(engine, index, dist.get_rank())
    param = engine.module.embed.weight
    old = torch.zeros(getattr(param, "ds_shape", param.shape))
    engine.save_checkpoint(folder, tag="old")
    for change in changes:
        if change == "load":
            engine.load_checkpoint(folder, tag="old")
            runs.step(engine, 7, dist.get_rank())
        saved = runs.snapshot(engine)
        with copying_held_back() as go:
            assert engine.save_checkpoint(folder, tag="a")
            saver = engine.checkpoint.background
            assert not saver._copied.is_set()
            timer = threading.Timer(0.05, go.set)
            timer.start()
            if change == "step":
                runs.step(engine, 2, dist.get_rank())
            elif change == "load":
                engine.load_checkpoint(folder, tag="old")
            elif change == "set master":
                safe_set_full_fp32_param(param, old)
            elif change == "set state":
                safe_set_full_optimizer_state(param, old, "exp_avg")
                assert float(safe_get_full_optimizer_state(param, "exp_avg").abs().max()) == 0.0
            elif change == "edit":
                with torch.no_grad():
                    param.mul_(2.0)  # weights have been copied; the masters follow at the next step
                runs.step(engine, 3, dist.get_rank())
            else:
                engine.offload_states()
                engine.reload_states()
            assert saver._copied.is_set(), change
            timer.join()
        saver.settle()
        other = runs.start(runs.config(stage, precision), seed=9)
        other.load_checkpoint(folder, tag="a")
        runs.same(saved, runs.snapshot(other))
        other.destroy()
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "precision"),
    product((0, 1, 2, 3), ("fp32", "bf16", "fp16"), daily=lambda *row: row in ((2, "fp32"), (2, "bf16"))),
)
def test_what_changes_states_waits_for_their_copy(pool: WorkerPool, tmp_path: Path, stage: int, precision: str) -> None:
    changes = [change for change in CHANGES if stage < 3 or change not in ("set master", "edit")]
    if precision == "fp16":
        changes.remove("set state")  # the first steps overflow, so there is none yet
    pool.run(2, changing_body, str(tmp_path), stage, precision, changes)


def torn_body(folder: str) -> None:
    from deepspeed.checkpoint import CheckpointError

    engine = runs.start(runs.config(2, "bf16", **DECOUPLED))
    runs.step(engine, 0, dist.get_rank())
    engine.save_checkpoint(folder, tag="good")
    engine.checkpoint.background.wait()
    with copying_held_back() as go:
        engine.save_checkpoint(folder, tag="bad")
        if dist.get_rank() == 1:
            for state in engine.optimizer.optimizer.state.values():
                state["exp_avg"].zero_()  # past all that waits
        go.set()
        engine.checkpoint.background.settle()
    with pytest.raises(CheckpointError, match=r"rank 1: \w+: an optimizer state was written to in place"):
        engine.checkpoint.background.wait()
    engine.save_checkpoint(folder, tag="next")
    engine.destroy()


def uncopied_body(folder: str) -> None:
    """The device of one rank fails under the copy: nobody waits for its thread, and all hear why."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.checkpoint import CheckpointError

    engine = runs.start(runs.config(2, "bf16", **DECOUPLED))
    runs.step(engine, 0, dist.get_rank())
    saver, accelerator = engine.checkpoint.background, get_accelerator()

    def lost(index: int) -> None:
        raise RuntimeError("the device is lost")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(accelerator, "set_device", lost)
        engine.save_checkpoint(folder, tag="bad")
        saver.settle()
    with pytest.raises(CheckpointError, match=r"rank 1: \w+: the device is lost"):
        saver.wait()
    runs.step(engine, 1, dist.get_rank())
    engine.destroy()


def test_a_copy_that_fails_is_heard_of_by_all(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, uncopied_body, str(tmp_path))
    assert not [entry.name for entry in tmp_path.iterdir() if entry.is_dir()]


def test_states_written_to_while_they_are_copied_are_not_saved(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, torn_body, str(tmp_path))
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == ["good", "next"]


def failing_body(folder: str, rank: int, name: str) -> tuple[int, str]:
    from deepspeed.checkpoint import CheckpointError
    from deepspeed.checkpoint.disk import durable

    engine = runs.start(runs.config(2, **DECOUPLED))
    runs.step(engine, 0, dist.get_rank())
    engine.save_checkpoint(folder, tag="good")
    engine.checkpoint.background.wait()
    saved = runs.snapshot(engine)
    plain = durable.open_for_writing

    def failing(path: Path) -> Any:
        if dist.get_rank() == rank and name in path.name:
            raise OSError(5, "Input/output error", str(path))
        return plain(path)

    told: list[tuple[int, str]] = []
    try:
        with held_back() as go:
            waiting = durable.open_for_writing
            durable.open_for_writing = lambda path: failing(path) if waiting(path).close() is None else None
            engine.save_checkpoint(folder, tag="bad")
            for index in range(1, 4):
                runs.step(engine, index, dist.get_rank())  # nothing to tell yet
            go.set()
            if dist.get_rank() == 0:
                engine.checkpoint.background.settle()  # this rank knows before the other one may
            for index in range(4, 2000):
                try:
                    runs.step(engine, index, dist.get_rank())
                except CheckpointError as error:
                    told.append((index, str(error)))
                    runs.step(engine, index, dist.get_rank())  # the failure has been told: training may go on
                    break
    finally:
        durable.open_for_writing = plain
    engine.load_checkpoint(folder)
    assert engine.loaded_checkpoint_tag == "good"
    runs.same(saved, runs.snapshot(engine))
    engine.save_checkpoint(folder, tag="next")
    engine.destroy()
    (found,) = told
    return found


@pytest.mark.parametrize(("rank", "name"), ((1, "optim_states"), (0, "manifest")))
def test_a_failure_is_raised_by_all_ranks_at_one_step(pool: WorkerPool, tmp_path: Path, rank: int, name: str) -> None:
    first, second = pool.run(2, failing_body, str(tmp_path), rank, name)
    assert first == second
    assert f"rank {rank}" in first[1]
    assert "Input/output error" in first[1]
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == ["good", "next"]


def waiting_body(folder: str) -> None:
    from deepspeed.checkpoint import CheckpointError
    from deepspeed.checkpoint.disk import durable

    engine = runs.start(runs.config(1, "bf16", **DECOUPLED))
    runs.step(engine, 0, dist.get_rank())
    saver = engine.checkpoint.background
    with held_back() as go:
        engine.save_checkpoint(folder, tag="a")
        buffer = saver._buffer.nbytes
        timer = threading.Timer(0.3, go.set)
        timer.start()
        engine.save_checkpoint(folder, tag="b")  # waits for the one before: memory is bounded
        timer.join()
        assert saver._buffer.nbytes == buffer
        assert (Path(folder) / "a" / "manifest.json").exists()
    engine.load_checkpoint(folder, tag="b")  # waits for it
    runs.step(engine, 1, dist.get_rank())
    plain = durable.open_for_writing
    durable.open_for_writing = lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device", str(path)))
    try:
        engine.save_checkpoint(folder, tag="c")
        with pytest.raises(CheckpointError, match="No space left"):
            engine.destroy()
    finally:
        durable.open_for_writing = plain
    assert engine.checkpoint is None
    engine.destroy()


def test_later_calls_wait(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, waiting_body, str(tmp_path))
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == ["a", "b"]


SCRIPT = """
    import sys, time
    import torch
    import deepspeed
    from deepspeed.checkpoint.disk import durable

    plain = durable.open_for_writing
    durable.open_for_writing = lambda path: (time.sleep(0.1), plain(path))[1]
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
                "checkpoint": {"writer": {"decoupled": True}}, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(1024, 1280), config=settings)
    engine.backward(engine(torch.ones(1, 1024)).sum())
    engine.step()
    engine.save_checkpoint(sys.argv[1], tag="last")
    torch.distributed.destroy_process_group()
"""


def test_the_end_of_the_program_waits(pool: WorkerPool, tmp_path: Path) -> None:
    for ended in run_programs(pool, textwrap.dedent(SCRIPT), str(tmp_path / "saved"), ranks=2):
        assert ended.code == 0, ended.errors
    assert (tmp_path / "saved" / "latest").read_text() == "last"
    assert (tmp_path / "saved" / "last" / "manifest.json").exists()


def two_engines(folder: str, stage: int, zero: dict[str, Any], shared: bool) -> None:
    """Both are saved at once, without waiting for each other, and each gets back what is its own."""
    rank = dist.get_rank()
    if zero.get("offload_optimizer", {}).get("device") == "nvme":
        zero = {"offload_optimizer": {**zero["offload_optimizer"], "nvme_path": f"{folder}/nvme"}}
    one, two = (runs.start(runs.config(stage, zero=dict(zero), **DECOUPLED), seed=seed) for seed in range(2))
    folders = [f"{folder}/a", f"{folder}/{'a' if shared else 'b'}"]
    saved = []
    for index in range(3):
        for engine in (one, two):
            runs.step(engine, index, rank)
        saved.append([runs.snapshot(one), runs.snapshot(two)])
        one.save_checkpoint(folders[0], f"one{index}")
        two.save_checkpoint(folders[1], f"two{index}")
    one.load_checkpoint(folders[0], "one1")
    runs.same(saved[1][0], runs.snapshot(one))
    one.destroy()
    two.load_checkpoint(folders[1], "two0")
    runs.same(saved[0][1], runs.snapshot(two))
    two.destroy()


NVME = {"offload_optimizer": {"device": "nvme", "buffer_count": 5}}


@pytest.mark.parametrize(
    ("stage", "zero", "shared"), ((2, {}, True), wide(0, {}, True), wide(3, {}, True), (3, NVME, False))
)
def test_two_engines_at_once(pool: WorkerPool, tmp_path: Path, stage: int, zero: dict[str, Any], shared: bool) -> None:
    pool.run(2, two_engines, str(tmp_path), stage, zero, shared)
