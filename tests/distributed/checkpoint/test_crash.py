"""A rank that dies in the middle of a save: the last good checkpoint loads, bit by bit, and saving works again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.checkpoint import runs
from tests.harness.pool import WorkerDied, WorkerPool


def good_body(folder: str) -> dict[str, Any]:
    engine = runs.start(runs.config(2, "bf16"))
    for index in range(2):
        runs.step(engine, index, dist.get_rank())
    engine.save_checkpoint(folder, tag="same")
    found = runs.snapshot(engine)
    engine.destroy()
    return found


def dying_body(folder: str, rank: int, name: str, background: bool) -> None:
    from deepspeed.checkpoint.disk import durable

    engine = runs.start(runs.config(2, "bf16", checkpoint={"writer": {"decoupled": background}}))
    engine.load_checkpoint(folder)
    runs.step(engine, 2, dist.get_rank())
    plain = durable.open_for_writing

    def deadly(path: Path) -> Any:
        file = plain(path)
        if dist.get_rank() == rank and name in path.name:
            file.write(b"half of it")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return file

    durable.open_for_writing = deadly
    engine.save_checkpoint(folder, tag="same")
    engine.destroy()  # waits for a save in the background


def after_body(folder: str) -> tuple[dict[str, Any], int]:
    engine = runs.start(runs.config(2, "bf16"), seed=9)
    engine.load_checkpoint(folder)
    found, steps = runs.snapshot(engine), engine.global_steps
    engine.save_checkpoint(folder, tag="next")
    engine.destroy()
    return found, steps


@pytest.mark.parametrize(
    ("rank", "name", "complete", "background"),
    (
        (0, "model_states", False, False),
        (1, "optim_states", False, False),
        (0, "manifest", False, False),
        (0, "latest", True, False),
        (1, "optim_states", False, True),
        (0, "latest", True, True),
    ),
)
def test_a_killed_rank(
    pool: WorkerPool, tmp_path: Path, rank: int, name: str, complete: bool, background: bool
) -> None:
    saved = pool.run(2, good_body, str(tmp_path))
    with pytest.raises(WorkerDied, match="SIGKILL"):
        pool.run(2, dying_body, str(tmp_path), rank, name, background)
    for before, (found, steps) in zip(saved, pool.run(2, after_body, str(tmp_path)), strict=True):
        assert steps == (3 if complete else 2)
        if not complete:
            runs.same(before, found)
    left = sorted(entry.name for entry in tmp_path.iterdir() if not entry.name.endswith(".partial"))
    assert left == ["latest", "next", "same", "zero_to_fp32.py", "zero_to_torch.py"]
