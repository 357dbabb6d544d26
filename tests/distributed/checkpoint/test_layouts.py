"""Any saved layout loads into any other: ranks, stage, precision, buckets, parameter groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from tests.distributed.checkpoint import runs
from tests.harness.pool import WorkerPool

GLOBAL_BATCH = 12


class Odd(nn.Module):
    """Sizes that no rank count divides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(17, 13), nn.Linear(13, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def odd_step(engine: Any, index: int) -> None:
    """A step over the same global batch at any number of ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(index)
    x, y = torch.randn(GLOBAL_BATCH, 17, generator=generator), torch.randn(GLOBAL_BATCH, 7, generator=generator)
    share = GLOBAL_BATCH // world
    mine = slice(rank * share, (rank + 1) * share)
    engine.backward(F.mse_loss(engine(x[mine]), y[mine]))
    engine.step()


def link(stage: int, source: str | None, target: str | None, first: int, last: int) -> dict[str, list[float]]:
    """One link of a chain: resume, train steps ``first .. last``, save."""
    settings = runs.config(stage, train_micro_batch_size_per_gpu=GLOBAL_BATCH // dist.get_world_size())
    engine = runs.start(settings, module=runs.build(3 if source is None else 9, Odd))
    if source is not None:
        engine.load_checkpoint(source)
        assert engine.global_steps == first
    for index in range(first, last):
        odd_step(engine, index)
    if target is not None:
        engine.save_checkpoint(target)
    with GatheredParameters(list(engine.module.parameters())):
        weights = {name: param.detach().flatten().tolist() for name, param in engine.module.named_parameters()}
    engine.destroy()
    return weights


@pytest.mark.parametrize("stages", ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (2, 0, 1, 2)))
def test_a_chain_of_rank_counts_equals_one_rank(pool: WorkerPool, tmp_path: Path, stages: tuple[int, ...]) -> None:
    folders = [str(tmp_path / name) for name in "abc"]
    pool.run(4, link, stages[0], None, folders[0], 0, 3)
    pool.run(2, link, stages[1], folders[0], folders[1], 3, 5)
    pool.run(3, link, stages[2], folders[1], folders[2], 5, 7)
    (resumed,) = pool.run(1, link, stages[3], folders[2], None, 7, 8)
    (unbroken,) = pool.run(1, link, stages[3], None, None, 0, 8)
    for name, values in unbroken.items():
        # The mean over ranks is summed in another order at another number of ranks: fp32 rounding, nothing else.
        assert resumed[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


def save_run(folder: str, settings: dict[str, Any], steps: int = 3, **kwargs: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    engine = runs.start(settings, **kwargs)
    for index in range(steps):
        runs.step(engine, index, rank)
    engine.save_checkpoint(folder)
    found = runs.snapshot(engine, STATE_KEYS)
    engine.destroy()
    return found


def load_run(folder: str, settings: dict[str, Any], again: str | None = None, **kwargs: Any) -> dict[str, Any]:
    engine = runs.start(settings, seed=9)
    path, _ = engine.load_checkpoint(folder, **kwargs)
    assert path is not None
    found = runs.snapshot(engine, STATE_KEYS)
    if again is not None:
        engine.save_checkpoint(again)
    runs.step(engine, 50, dist.get_rank())  # the restored state can be used
    engine.destroy()
    return found


STATE_KEYS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "max_exp_avg_sq", "square_avg")
FULL = ("weights", "masters", "states", "groups", "counters", "schedule")


def same_full(left: dict[str, Any], right: dict[str, Any], keys: tuple[str, ...] = FULL) -> None:
    runs.same({key: left[key] for key in keys}, {key: right[key] for key in keys})


@pytest.mark.parametrize(
    ("old", "new"),
    (((3, 0, {}), (2, 2, {})), ((2, 1, {}), (3, 2, {})), ((2, 2, {}), (1, 0, {})), ((1, 0, {}), (3, 1, {})),
     ((2, 2, {"reduce_bucket_size": 64}), (2, 2, {"reduce_bucket_size": 1000})),
     ((2, 1, {"round_robin_gradients": True}), (3, 2, {}))),
)  # fmt: skip
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_every_bit_survives_another_layout(
    pool: WorkerPool, tmp_path: Path, old: tuple[int, int, dict], new: tuple[int, int, dict], precision: str
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    saved = pool.run(old[0], save_run, first, runs.config(old[1], precision, zero=old[2]))[0]
    moved = pool.run(new[0], load_run, first, runs.config(new[1], precision, zero=new[2]), second)
    for found in moved:
        same_full(saved, found)
    back = pool.run(old[0], load_run, second, runs.config(old[1], precision, zero=old[2]))[0]
    same_full(saved, back)


OPTIMIZERS = {
    "momentum": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "plain": {"type": "SGD", "params": {"lr": 0.1}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 0.1}},
    "amsgrad": {"type": "AdamW", "params": {"lr": 1e-2, "amsgrad": True, "torch_adam": True}},
    "rmsprop": {"type": "RMSprop", "params": {"lr": 1e-2, "momentum": 0.5, "centered": True}},
    "nadam": {"type": "NAdam", "params": {"lr": 1e-2}},
    "lion": {"type": "Lion", "params": {"lr": 1e-3}},
    "lamb": {"type": "Lamb", "params": {"lr": 1e-2}},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_state_of_every_optimizer(pool: WorkerPool, tmp_path: Path, optimizer: str) -> None:
    folder, again = str(tmp_path / "a"), str(tmp_path / "b")
    settings = runs.config(1, "bf16", optimizer=OPTIMIZERS[optimizer])
    saved = pool.run(2, save_run, folder, settings)
    same_full(saved[0], pool.run(3, load_run, folder, settings, again)[0])
    for left, right in zip(saved, pool.run(2, load_run, again, settings), strict=True):
        same_full(left, right)
        runs.same(left["own"], right["own"])


@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize(
    ("old", "new"), (("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "fp16"), ("fp16", "fp32"), ("fp32", "fp16"))
)
def test_another_precision_takes_the_masters(pool: WorkerPool, tmp_path: Path, old: str, new: str, world: int) -> None:
    folder = str(tmp_path)
    optimizer = runs.SGD  # fp16 skips its first steps; with momentum alone masters and states stay comparable
    saved = pool.run(world, save_run, folder, runs.config(2, old, optimizer=optimizer), 6)[0]
    for found in pool.run(world, load_run, folder, runs.config(1, new, optimizer=optimizer)):
        same_full(saved, found, ("masters", "states", "counters", "schedule"))
        right = pool.run(1, weights_of_masters, folder, new)[0]
        runs.same(right, found["weights"])


def weights_of_masters(folder: str, precision: str) -> dict[str, str]:
    """The module's state with trained weights cast from the saved masters and frozen ones from the saved weights."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    whole = get_fp32_state_dict_from_zero_checkpoint(folder)
    module = runs.build(9)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found = {name: whole[name].to(dtype) if name in parameters else whole[name] for name in module.state_dict()}
    return runs.digests(found)


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    trained = [param for param in module.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1], "lr": 3e-3},
        {"params": [param for param in trained if param.ndim <= 1], "lr": 2e-2, "weight_decay": 0.0},
    ]


def grouped(folder: str, settings: dict[str, Any], groups: bool, save: bool) -> dict[str, Any]:
    module = runs.build(0 if save else 9)
    engine = runs.start(settings, module=module, model_parameters=two_groups(module) if groups else None)
    if save:
        for index in range(2):
            runs.step(engine, index, dist.get_rank())
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    found = runs.snapshot(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("groups", (True, False))
def test_parameter_groups_may_be_cut_otherwise(pool: WorkerPool, tmp_path: Path, groups: bool) -> None:
    settings = runs.config(2)
    del settings["scheduler"]
    saved = pool.run(2, grouped, str(tmp_path), settings, groups, True)[0]
    found = pool.run(2, grouped, str(tmp_path), settings, not groups, False)[0]
    same_full(saved, found, ("weights", "masters", "states", "counters"))
    rates = {group["lr"] for group in saved["groups"]}
    assert {group["lr"] for group in found["groups"]} <= rates
    same = pool.run(3, grouped, str(tmp_path), settings, groups, False)[0]
    same_full(saved, same)


def test_each_rank_reads_its_own_shard_alone(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(3, save_run, str(tmp_path), runs.config(2, "bf16"))
    opened = pool.run(3, opened_files, str(tmp_path), runs.config(2, "bf16"))
    assert opened == [[0], [1], [2]]


def opened_files(folder: str, settings: dict[str, Any]) -> list[int]:
    """Numbers of the shard files this rank mapped while loading."""
    from deepspeed.checkpoint import names, trusted

    engine = runs.start(settings, seed=9)
    opened = []
    plain = trusted.load_file

    def watched(path: Path) -> Any:
        parts = names.parse_optim_file(os.path.basename(path))
        if parts is not None:
            opened.append(parts.dp_rank)
        return plain(path)

    trusted.load_file = watched
    try:
        engine.load_checkpoint(folder)
    finally:
        trusted.load_file = plain
    engine.destroy()
    return sorted(set(opened))
