"""A resumed run equals the unbroken one, bit by bit, at the same number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.checkpoint import runs
from tests.harness.pool import WorkerPool


def unbroken_and_resumed(folder: str, settings: dict[str, Any], before: int, after: int, **kwargs: Any) -> None:
    """Train on; meanwhile save in the middle and resume in an engine of other initial weights."""
    import torch.distributed as dist

    rank = dist.get_rank()
    torch.manual_seed(rank)
    engine = runs.start(settings)
    for index in range(before):
        runs.step(engine, index, rank)
    saved = runs.snapshot(engine)
    assert engine.save_checkpoint(folder, client_state={"note": [1, "two"]}) is True
    runs.same(saved, runs.snapshot(engine))  # saving changes nothing, no random number is taken
    losses = [runs.step(engine, index, rank) for index in range(before, before + after)]
    end = runs.snapshot(engine)
    engine.destroy()

    torch.manual_seed(1000 + rank)
    resumed = runs.start(settings, seed=9)
    path, client_state = resumed.load_checkpoint(folder)
    assert path is not None
    assert client_state["note"] == [1, "two"]
    runs.same(saved, runs.snapshot(resumed))
    assert [runs.step(resumed, index, rank) for index in range(before, before + after)] == losses
    runs.same(end, runs.snapshot(resumed))
    resumed.destroy()


@pytest.mark.parametrize("world", (1, 2, 3))
@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("stage", (0, 1, 2))
def test_resume_is_exact(pool: WorkerPool, tmp_path: Path, stage: int, precision: str, world: int) -> None:
    pool.run(world, unbroken_and_resumed, str(tmp_path), runs.config(stage, precision), 4, 2)
