"""Checkpoints of stage 3: exact resume, and any other number of ranks, stage and layout.

`FORCED` releases every block at once and cuts the model into many, so that no weight is gathered when a save begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.checkpoint import runs
from tests.distributed.checkpoint.test_layouts import STATE_KEYS, link, load_run, same_full, save_run, two_groups
from tests.distributed.checkpoint.test_resume import unbroken_and_resumed
from tests.harness.pool import WorkerPool
from tests.harness.width import wide

FORCED = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "reduce_bucket_size": 50,
}
LAMB = {"type": "Lamb", "params": {"lr": 1e-2}}  # looks at whole tensors: none is cut


@pytest.mark.parametrize(
    ("world", "precision", "top"),
    (
        wide(1, "fp32", {}),
        (1, "bf16", {}),
        (2, "fp32", {}),
        (2, "fp32", {"zero": FORCED, "optimizer": LAMB}),
        (2, "bf16", {"zero": FORCED, "gradient_accumulation_steps": 2}),
        (2, "bf16", {"optimizer": runs.SGD}),
        (3, "fp16", {"zero": FORCED}),
        wide(4, "bf16", {"zero": FORCED}),
    ),
)
def test_resume_is_exact(pool: WorkerPool, tmp_path: Path, world: int, precision: str, top: dict[str, Any]) -> None:
    pool.run(world, unbroken_and_resumed, str(tmp_path), runs.config(3, precision, **top), 4, 2)


@pytest.mark.parametrize("stages", (wide((3, 3, 3, 3)), (3, 1, 3, 0), wide((2, 3, 0, 3))))
def test_a_chain_of_ranks_and_stages_equals_one_rank(pool: WorkerPool, tmp_path: Path, stages: tuple[int, ...]) -> None:
    folders = [str(tmp_path / name) for name in "abc"]
    pool.run(4, link, stages[0], None, folders[0], 0, 3)
    pool.run(2, link, stages[1], folders[0], folders[1], 3, 5)
    pool.run(3, link, stages[2], folders[1], folders[2], 5, 7)
    (resumed,) = pool.run(1, link, stages[3], folders[2], None, 7, 8)
    (unbroken,) = pool.run(1, link, 0, None, None, 0, 8)
    for name, values in unbroken.items():
        # The mean over ranks is summed in another order at another number of ranks: fp32 rounding, nothing else.
        assert resumed[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("precision", "old", "new"),
    (
        ("fp32", (3, 3, FORCED), (2, 2, {})),
        ("bf16", (2, 2, {}), (3, 3, FORCED)),
        wide("bf16", (2, 3, {}), (1, 0, {})),
        wide("fp32", (1, 0, {}), (2, 3, {})),
        wide("bf16", (1, 3, {}), (2, 3, FORCED)),
        wide("fp16", (2, 3, FORCED), (2, 1, {})),
        ("bf16", (2, 3, FORCED), (2, 3, {"stage3_param_persistence_threshold": 20, "reduce_bucket_size": 64})),
    ),
)
def test_every_bit_survives_another_layout(
    pool: WorkerPool, tmp_path: Path, precision: str, old: tuple[int, int, dict], new: tuple[int, int, dict]
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    saved = pool.run(old[0], save_run, first, runs.config(old[1], precision, zero=old[2]))[0]
    for found in pool.run(new[0], load_run, first, runs.config(new[1], precision, zero=new[2]), second):
        same_full(saved, found)
    same_full(saved, pool.run(old[0], load_run, second, runs.config(old[1], precision, zero=old[2]))[0])


@pytest.mark.parametrize("optimizer", (LAMB, {"type": "RMSprop", "params": {"lr": 1e-2, "momentum": 0.5}}))
def test_states_of_other_optimizers(pool: WorkerPool, tmp_path: Path, optimizer: dict[str, Any]) -> None:
    folder = str(tmp_path)
    settings = runs.config(3, "bf16", optimizer=optimizer)
    saved = pool.run(2, save_run, folder, settings)
    for left, right in zip(saved, pool.run(2, load_run, folder, settings), strict=True):
        same_full(left, right)
        runs.same(left["own"], right["own"])
    same_full(saved[0], pool.run(3, load_run, folder, runs.config(1, "bf16", optimizer=optimizer))[0])


@pytest.mark.parametrize(("old", "new"), (("bf16", "fp32"), ("fp32", "fp16"), ("fp16", "bf16")))
def test_another_precision_takes_the_masters(pool: WorkerPool, tmp_path: Path, old: str, new: str) -> None:
    saved = pool.run(2, save_run, str(tmp_path), runs.config(3, old, optimizer=runs.SGD), 6)[0]
    for found in pool.run(2, load_run, str(tmp_path), runs.config(3, new, optimizer=runs.SGD)):
        same_full(saved, found, ("masters", "states", "counters", "schedule"))


def grouped(folder: str, settings: dict[str, Any], groups: bool, save: bool) -> dict[str, Any]:
    module = runs.build(0 if save else 9)
    engine = runs.start(settings, module=module, model_parameters=two_groups(module) if groups else None)
    if save:
        for index in range(2):
            runs.step(engine, index, dist.get_rank())
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    found = runs.snapshot(engine, STATE_KEYS)
    engine.destroy()
    return found


def test_several_groups_and_another_cut_of_them(pool: WorkerPool, tmp_path: Path) -> None:
    settings = runs.config(3, "bf16")
    del settings["scheduler"]
    saved = pool.run(2, grouped, str(tmp_path), settings, True, True)[0]
    same_full(saved, pool.run(2, grouped, str(tmp_path), settings, True, False)[0])
    found = pool.run(2, grouped, str(tmp_path), settings, False, False)[0]
    same_full(saved, found, ("weights", "masters", "states", "counters"))


def without_optimizer_body(folder: str) -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 3, **FORCED},
    }
    engine = runs.start(settings)
    engine.save_checkpoint(folder)
    right = runs.whole(engine.module)
    other = runs.start(settings, seed=9)
    other.load_checkpoint(folder)
    runs.same(right, runs.whole(other.module))
    trained = runs.start(runs.config(2), seed=8)
    trained.load_checkpoint(folder, load_module_only=True)
    runs.same(right, runs.whole(trained.module))
    for used in (engine, other, trained):
        used.destroy()


@pytest.mark.parametrize("world", (1, 2))
def test_engines_without_optimizer(pool: WorkerPool, tmp_path: Path, world: int) -> None:
    pool.run(world, without_optimizer_body, str(tmp_path))


class LocalBuffer(nn.Module):
    """A buffer that differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(runs.VOCABULARY, 8)
        self.head = nn.Linear(8, runs.VOCABULARY)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += float(dist.get_rank() + 1)
        return self.head(self.embed(tokens))


def local_body(folder: str, stage: int) -> tuple[float, Any]:
    settings = runs.config(stage)
    engine = runs.start(settings, module=runs.build(0, LocalBuffer))
    runs.step(engine, 0, dist.get_rank())
    engine.save_checkpoint(folder, client_state={"rank": dist.get_rank()})
    other = runs.start(settings, module=runs.build(9, LocalBuffer))
    _, client_state = other.load_checkpoint(folder)
    found = float(other.module.seen)
    for used in (engine, other):
        used.destroy()
    return found, client_state["rank"]


def test_a_rank_gets_its_own_file_back(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, local_body, str(tmp_path), 3) == [(1.0, 0), (2.0, 1)]
