"""`use_node_local_storage`: every node saves to and loads from a disk of its own, which holds what its ranks wrote."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed.checkpoint.__main__ import main
from deepspeed.utils import zero_to_fp32
from tests.distributed.checkpoint import runs
from tests.harness.pool import WorkerPool
from tests.harness.width import wide

LOCAL = {"checkpoint": {"use_node_local_storage": True, "keep_last": 2}}


def on_nodes(body: Callable[..., Any], ranks_per_node: int, folder: str, *arguments: Any) -> Any:
    """``body(rank, disk of its node, *arguments)``. A launcher sets LOCAL_RANK on every node."""
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank % ranks_per_node))
        return body(rank, Path(folder) / f"node{rank // ranks_per_node}", *arguments)


def resumes(rank: int, disk: Path, stage: int) -> None:
    engine = runs.start(runs.config(stage, **LOCAL))
    for index in range(3):
        runs.step(engine, index, rank)
        engine.save_checkpoint(str(disk))
    before = runs.snapshot(engine)
    unbroken = [runs.step(engine, index, rank) for index in range(3, 5)]
    engine.destroy()

    assert (disk / "latest").read_text() == "global_step3"
    assert sorted(path.name for path in disk.glob("global_step*")) == ["global_step2", "global_step3"]
    again = runs.start(runs.config(stage, **LOCAL), seed=5)
    path, _ = again.load_checkpoint(str(disk))
    assert path is not None
    assert str(disk) in path
    runs.same(before, runs.snapshot(again))
    assert [runs.step(again, index, rank) for index in range(3, 5)] == unbroken
    again.destroy()


@pytest.mark.parametrize(
    ("stage", "world", "ranks_per_node"), (wide(0, 2, 1), wide(2, 2, 1), (3, 2, 1), (1, 4, 2), wide(3, 4, 2))
)
def test_every_node_has_its_own_disk(
    pool: WorkerPool, tmp_path: Path, stage: int, world: int, ranks_per_node: int
) -> None:
    pool.run(world, on_nodes, resumes, ranks_per_node, str(tmp_path), stage)
    disks = sorted(tmp_path.iterdir())
    assert [disk.name for disk in disks] == [f"node{number}" for number in range(world // ranks_per_node)]
    for node, disk in enumerate(disks if stage else ()):
        found = sorted(path.name for path in disk.glob("global_step3/*optim_states.pt"))
        first = node * ranks_per_node
        assert [name.split("_")[3] for name in found] == [str(rank) for rank in range(first, first + ranks_per_node)]


def save(rank: int, disk: Path, stage: int) -> None:
    engine = runs.start(runs.config(stage, **LOCAL))
    runs.step(engine, 0, rank)
    engine.save_checkpoint(str(disk))
    engine.destroy()


def refused(rank: int, disk: Path, stage: int) -> str:
    """Loading raises, and changes nothing."""
    engine = runs.start(runs.config(stage, **LOCAL), seed=5)
    before = runs.snapshot(engine)
    said = runs.raises(lambda: engine.load_checkpoint(str(disk)))
    runs.same(before, runs.snapshot(engine))
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", (wide(2), 3))
def test_a_lost_disk_is_named_by_all(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    """One node comes back with an empty disk, or with one file of it gone or damaged."""
    pool.run(2, on_nodes, save, 1, str(tmp_path), stage)
    own = next((tmp_path / "node1" / "global_step1").glob("*optim_states.pt"))
    content = own.read_bytes()
    own.write_bytes(content[:-20] + bytes(20))
    for said in pool.run(2, on_nodes, refused, 1, str(tmp_path), stage):
        assert f"{own.name} is damaged" in said
    own.unlink()
    for said in pool.run(2, on_nodes, refused, 1, str(tmp_path), stage):
        assert own.name in said
    shutil.rmtree(tmp_path / "node1" / "global_step1")
    for said in pool.run(2, on_nodes, refused, 1, str(tmp_path), stage):
        assert "there is no checkpoint 'global_step1'" in said
        assert "node1" in said


def test_another_number_of_ranks_needs_all_files(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, on_nodes, save, 1, str(tmp_path), 2)
    (said,) = pool.run(1, on_nodes, refused, 1, str(tmp_path), 2)
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in said
    assert "python -m deepspeed.checkpoint merge" in said


def loads_whole(folder: str, stage: int, masters: dict[str, str]) -> None:
    engine = runs.start(runs.config(stage), seed=5)
    engine.load_checkpoint(folder)
    assert runs.snapshot(engine)["masters"] == masters
    engine.destroy()


def save_and_tell(rank: int, disk: Path, stage: int) -> dict[str, str]:
    engine = runs.start(runs.config(stage, **LOCAL))
    runs.step(engine, 0, rank)
    engine.save_checkpoint(str(disk))
    masters: dict[str, str] = runs.snapshot(engine)["masters"]
    engine.destroy()
    return masters


@pytest.mark.parametrize("stage", (1, wide(3)))
def test_merged_disks_load_anywhere(
    pool: WorkerPool, tmp_path: Path, stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    masters = pool.run(2, on_nodes, save_and_tell, 1, str(tmp_path), stage)[0]
    nodes, out = [str(tmp_path / f"node{number}") for number in range(2)], tmp_path / "whole"
    assert main(["merge", nodes[0], "--out", str(out)]) == 2
    assert "rank 1 are on disks of other nodes" in capsys.readouterr().err or stage == 3
    for node in nodes if stage else ():
        assert main(["verify", node]) == 1
        said = capsys.readouterr().out
        assert "one node's PART of a save, 3 files" in said
        assert "deepspeed.checkpoint merge" in said
        assert "DAMAGED" not in said
        assert zero_to_fp32.main([node, str(out)]) == 1
        assert "one node's part of a save" in capsys.readouterr().err
    assert main(["merge", nodes[0], nodes[0], "--out", str(out)]) == 2
    assert "given twice" in capsys.readouterr().err
    assert not out.exists()
    pool.run(2, on_nodes, save_and_tell, 1, str(tmp_path / "other"), stage)  # another run, as far as this one
    assert main(["merge", nodes[0], str(tmp_path / "other" / "node1"), "--out", str(out)]) == 2
    assert "written by two saves" in capsys.readouterr().err
    assert not out.exists()
    assert main(["merge", *nodes, "--out", str(out)]) == 0
    assert main(["verify", str(out)]) == 0
    assert main(["merge", *nodes, "--out", str(out)]) == 2
    assert "exists" in capsys.readouterr().err
    pool.run(1, loads_whole, str(out), 4 - stage if stage == 3 else 0, masters)


def test_weights_of_every_node_are_checked(pool: WorkerPool, tmp_path: Path) -> None:
    """Each node has a model-states file of its own; that of the second is read by the second alone."""
    pool.run(2, on_nodes, save, 1, str(tmp_path), 2)
    weights = tmp_path / "node1" / "global_step1" / "mp_rank_00_model_states.pt"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    for said in pool.run(2, on_nodes, refused, 1, str(tmp_path), 2):
        assert "mp_rank_00_model_states.pt is damaged" in said
