"""Checkpoints know nothing of offload: what lay in host memory or in files loads anywhere, and anything into them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.checkpoint import runs
from tests.distributed.checkpoint.test_layouts import OPTIMIZERS, load_run, same_full, save_run
from tests.harness.offload import offload_sections
from tests.harness.pool import WorkerPool

BITS = ("weights", "masters", "states", "counters", "schedule")


def settings(stage: int, kind: str, precision: str = "bf16", **top):
    zero = {**(offload_sections(kind) if kind else {}), "sub_group_size": 100}
    return runs.config(stage, precision, zero=zero, **top)


@pytest.mark.parametrize(
    ("old", "new"),
    (
        ((2, 2, "cpu"), (3, 3, "disk_all")),
        ((1, 3, "disk"), (2, 1, "cpu")),
        ((3, 3, "half"), (1, 0, "")),
        ((1, 0, ""), (2, 3, "disk")),
        ((2, 3, "all"), (2, 2, "")),
    ),
)
def test_every_bit_survives_another_home(pool: WorkerPool, tmp_path: Path, old, new) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    saved = pool.run(old[0], save_run, first, settings(*old[1:]))[0]
    for found in pool.run(new[0], load_run, first, settings(*new[1:]), second):
        same_full(saved, found, BITS)
    same_full(saved, pool.run(old[0], load_run, second, settings(*old[1:]))[0], BITS)


@pytest.mark.parametrize("optimizer", ("momentum", "amsgrad", "lion", "lamb"))
def test_states_of_other_optimizers_on_disk(pool: WorkerPool, tmp_path: Path, optimizer: str) -> None:
    folder = str(tmp_path)
    made = settings(3, "disk", optimizer=OPTIMIZERS[optimizer], zero_allow_untested_optimizer=True)
    saved = pool.run(2, save_run, folder, made)[0]
    same_full(saved, pool.run(2, load_run, folder, made)[0])


def _resume(folder: str, config: dict) -> tuple[list[float], list[float]]:
    rank = dist.get_rank()
    one = runs.start(config)
    for index in range(2):
        runs.step(one, index, rank)
    one.save_checkpoint(folder)
    two = runs.start(config, seed=5)
    two.load_checkpoint(folder)
    state = one.optimizer.state_dict()  # a copy: what comes next does not change it
    three = runs.start(config, seed=6)
    three.optimizer.load_state_dict(state)
    for bound, twin in zip(one.optimizer.groups[0].fragments, three.optimizer.groups[0].fragments, strict=True):
        assert bound.leaf.detach().equal(twin.leaf.detach())
    three.destroy()
    losses = []
    for engine in (one, two):
        torch.manual_seed(rank)  # of dropout
        losses.append([runs.step(engine, index, rank) for index in range(2, 5)])
    one.destroy()
    two.destroy()
    return losses[0], losses[1]


@pytest.mark.parametrize("kind", ("cpu", "disk_all"))
def test_a_resumed_run_goes_on_as_the_unbroken_one(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    config = settings(3, kind, "fp32")
    for unbroken, resumed in pool.run(2, _resume, str(tmp_path), config):
        assert unbroken == resumed


def _back_to_the_start(folder: str, kinds: tuple[str, ...]) -> list[dict]:
    found = []
    for kind in kinds:
        engine = runs.start(settings(3, kind))
        engine.save_checkpoint(folder, tag="start")
        runs.step(engine, 0, 0)
        engine.load_checkpoint(folder, tag="start")
        torch.manual_seed(0)  # of dropout
        for index in range(2):
            runs.step(engine, index, 0)
        found.append(runs.snapshot(engine))
        engine.destroy()
    return found


def test_a_checkpoint_without_states_starts_them_anew(pool: WorkerPool, tmp_path: Path) -> None:
    """Saved before the first step: what files hold of the steps since must not come back."""
    plain, *offloaded = pool.run(1, _back_to_the_start, str(tmp_path), ("", "cpu", "disk"))[0]
    for found in offloaded:
        same_full(plain, found, BITS)
