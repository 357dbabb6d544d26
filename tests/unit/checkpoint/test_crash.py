"""Killed at any moment of a save, the folder still holds a whole checkpoint: the last one, or the one before."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint import names, reader
from deepspeed.checkpoint.disk import durable
from deepspeed.checkpoint.disk.manifest import Manifest, is_complete, read_manifest, wrong_checksums
from deepspeed.utils.torch_file import TorchFile
from tests.harness.pool import WorkerPool

FILE = names.model_file(0)


def save_for_ever(folder: str, tags: tuple[str, ...], can_exchange: bool, report: Connection) -> None:
    """Save number 1, 2, 3 ... under the tags in turn, telling each number once it is complete."""
    if not can_exchange:
        durable._exchange = lambda first, second: False
    for number, tag in zip(itertools.count(1), itertools.cycle(tags), strict=False):
        final, token = Path(folder) / tag, durable.new_token()
        aside = durable.saving_folder(final, token)
        aside.mkdir()
        written = durable.write_torch(aside / FILE, TorchFile({"number": number, "data": torch.ones(50_000) * number}))
        Manifest({FILE: written}, number, 0, 1, "test").write(aside)
        durable.publish_folder(aside, final, token)
        durable.write_text(Path(folder) / names.LATEST, tag)
        durable.clear_leftovers(Path(folder), is_complete)
        report.send(number)


@pytest.mark.parametrize("can_exchange", (True, False))
@pytest.mark.parametrize("tags", (("same",), ("even", "odd")))
def test_a_kill_loses_nothing(pool: WorkerPool, tmp_path: Path, tags: tuple[str, ...], can_exchange: bool) -> None:
    draw = random.Random(len(tags) * 2 + can_exchange)
    for trial in range(4):
        folder = tmp_path / str(trial)
        folder.mkdir()
        told = kill_a_saver(pool, folder, tags, can_exchange, draw.uniform(0.0, 0.05))
        tag = reader.read_latest(folder)
        assert tag is not None
        durable.recover(folder / tag, is_complete)
        manifest = read_manifest(folder / tag)
        assert manifest is not None
        assert wrong_checksums(folder / tag, manifest, [FILE]) == []
        content = torch.load(folder / tag / FILE, weights_only=True)
        assert content["number"] >= told - (len(tags) - 1)
        assert bool((content["data"] == content["number"]).all())
        durable.clear_leftovers(folder, is_complete)
        assert sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) == sorted(
            entry for entry in tags if (folder / entry).exists()
        )


def kill_a_saver(pool: WorkerPool, folder: Path, tags: tuple[str, ...], can_exchange: bool, delay: float) -> int:
    """Let a process save until ``delay`` seconds after its second checkpoint, kill it; the last number it told."""
    here, there = multiprocessing.Pipe()
    process = pool._context.Process(target=save_for_ever, args=(str(folder), tags, can_exchange, there), daemon=True)
    process.start()
    there.close()
    told = here.recv()
    told = here.recv()
    time.sleep(delay)
    process.kill()
    process.join()
    try:
        while True:
            told = here.recv()
    except (EOFError, ConnectionResetError):
        here.close()
    process.close()
    return int(told)
