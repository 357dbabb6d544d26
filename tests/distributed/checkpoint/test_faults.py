"""What disks and other people do: full, read-only, links, another job in the same folder, a rank that never comes.

Each is an error that every rank raises with the same text (or no error at all), and what was there stays loadable.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests.distributed.checkpoint import runs
from tests.harness.pool import WorkerPool
from tests.harness.width import product

DECOUPLED = {"checkpoint": {"writer": {"decoupled": True}}}


def same_text(error: BaseException, *parts: str) -> None:
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(error))
    assert len(set(texts)) == 1, texts
    for part in parts:
        assert part in texts[0], texts[0]


def failing_save(engine: Any, background: bool, folder: str, tag: str, *parts: str) -> None:
    """A save that fails on every rank, at once or when its end is heard of."""
    from deepspeed.checkpoint import CheckpointError

    def save() -> None:
        engine.save_checkpoint(folder, tag=tag)
        if background:
            engine.checkpoint.background.wait()

    with pytest.raises(CheckpointError) as caught:
        save()
    same_text(caught.value, *parts)


# ---- a full disk ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of :func:`full_disk_body`, and the spare it asks for."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3400k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def full_disk_body(folder: str, background: bool, checked: bool) -> None:
    module = nn.Sequential(nn.Embedding(runs.VOCABULARY, 256), nn.Linear(256, 512), nn.Linear(512, runs.VOCABULARY))
    engine = runs.start(runs.config(2, **(DECOUPLED if background else {})), module=module)
    runs.step(engine, 0, dist.get_rank())
    engine.save_checkpoint(folder, tag="good")  # about 1.8 MB
    if background:
        engine.checkpoint.background.wait()
    saved = runs.snapshot(engine)
    runs.step(engine, 1, dist.get_rank())
    plain = shutil.disk_usage
    if not checked:  # another program fills the disk after the look at it
        shutil.disk_usage = lambda path: plain(path)._replace(free=1 << 40)  # type: ignore[assignment]
    try:
        failing_save(engine, background, folder, "good", "bytes free" if checked else "No space left")
    finally:
        shutil.disk_usage = plain
    dist.barrier()
    assert [entry.name for entry in Path(folder).iterdir() if entry.name.startswith(".")] == []
    engine.load_checkpoint(folder)
    runs.same(saved, runs.snapshot(engine))
    engine.destroy()


@pytest.mark.parametrize(
    ("background", "checked"), product((False, True), (False, True), daily=lambda b, c: (b, c) != (True, True))
)
def test_a_full_disk(pool: WorkerPool, small_disk: Path, background: bool, checked: bool) -> None:
    pool.run(2, full_disk_body, str(small_disk), background, checked)


# ---- folders -------------------------------------------------------------------------------------------------------


def refused_body(folder: str) -> None:
    engine = runs.start(runs.config(1))
    file = Path(folder) / "file"
    if dist.get_rank() == 0:
        file.write_text("a file, not a folder")
    dist.barrier()
    before = runs.snapshot(engine)
    failing_save(engine, False, str(file), "a", str(file))
    failing_save(engine, False, "/sys/checkpoints", "a", "/sys/checkpoints")  # even the super user may not write there
    runs.same(before, runs.snapshot(engine))
    engine.save_checkpoint(folder)
    engine.destroy()
    assert file.read_text() == "a file, not a folder"


def test_folders_that_cannot_be_written(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, refused_body, str(tmp_path))


def links_body(folder: str, elsewhere: str) -> None:
    engine = runs.start(runs.config(1, checkpoint={"keep_last": 1}))
    engine.save_checkpoint(elsewhere, tag="moved")
    if dist.get_rank() == 0:
        os.symlink(f"{elsewhere}/moved", f"{folder}/linked")
        os.symlink(f"{folder}/nowhere", f"{folder}/broken")
        Path(f"{elsewhere}/pointer").write_text("linked")
        os.symlink(f"{elsewhere}/pointer", f"{folder}/latest")
    dist.barrier()
    engine.load_checkpoint(folder)
    assert engine.loaded_checkpoint_tag == "linked"
    for tag in ("linked", "broken", "next"):
        engine.save_checkpoint(folder, tag=tag)
    engine.load_checkpoint(folder)
    engine.destroy()


def test_links_are_replaced_not_followed(pool: WorkerPool, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "a", tmp_path / "b"
    folder.mkdir()
    pool.run(2, links_body, str(folder), str(elsewhere))
    assert sorted(entry.name for entry in folder.iterdir()) == ["latest", "next", "zero_to_fp32.py", "zero_to_torch.py"]
    assert (elsewhere / "moved" / "manifest.json").exists()
    assert (elsewhere / "pointer").read_text() == "linked"


def job_body(folder: str, saves: int) -> None:
    """One of two jobs of one rank each."""
    import deepspeed
    from deepspeed.checkpoint import CheckpointError

    number = int(os.environ["RANK"])
    given = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    meeting = f"file://{folder}/meeting{number}"
    deepspeed.init_distributed(dist_backend="gloo", rank=0, world_size=1, init_method=meeting)
    engine = runs.start(runs.config(1), seed=number)
    runs.step(engine, number, 0)
    try:
        for count in range(saves):
            with contextlib.suppress(CheckpointError):  # told that somebody else is there, if anything
                engine.save_checkpoint(f"{folder}/saved", tag="same" if count % 2 else f"own{number}")
    finally:
        engine.destroy()
        dist.destroy_process_group()
        os.environ |= given


def check_body(folder: str) -> None:
    from deepspeed.checkpoint.__main__ import main

    assert main(["verify", folder, "--all"]) == 0
    engine = runs.start(runs.config(1), seed=5)
    for tag in ("same", "own0", "own1", None):
        engine.load_checkpoint(folder, tag=tag)
    engine.destroy()


def test_two_jobs_in_one_folder(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, job_body, str(tmp_path), 12, create_group=False)
    pool.run(1, check_body, str(tmp_path / "saved"))
    assert [entry.name for entry in (tmp_path / "saved").iterdir() if entry.name.startswith(".")] == []


# ---- a rank that does not come -------------------------------------------------------------------------------------


def one_rank_body(folder: str) -> str:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=3))
    engine = runs.start(runs.config(1))
    text, told = "", Path(folder) / "told"
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            engine.save_checkpoint(f"{folder}/saved", tag="alone")
        text = str(caught.value)
        told.touch()
    while not told.exists():
        time.sleep(0.05)
    return text


def test_a_save_by_one_rank_alone_ends(pool: WorkerPool, tmp_path: Path) -> None:
    text, _ = pool.run(2, one_rank_body, str(tmp_path), create_group=False, timeout=60)
    assert "saving checkpoint 'alone'" in text
    assert "rank 1" in text
    assert not (tmp_path / "saved").exists()
