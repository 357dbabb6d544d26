"""What is saved under which tag, kept and refused: tags, damaged files, faults, retention."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.checkpoint import runs
from tests.distributed.checkpoint.runs import lines, raises, train
from tests.harness.pool import WorkerPool

# ---- tags ----------------------------------------------------------------------------------------------------------


def tags_body(folder: str, stage: int) -> None:
    settings = runs.config(stage)
    engine = runs.start(settings)
    train(engine, 0, 1)
    engine.save_checkpoint(folder, tag=1, client_state={"i": 1})
    at_one = runs.snapshot(engine)
    train(engine, 1, 3)
    engine.save_checkpoint(folder, tag="t3", client_state={"i": 3})
    train(engine, 3, 4)
    engine.save_checkpoint(folder, client_state={"i": 4}, save_latest=False)
    if dist.get_rank() == 0:
        assert (Path(folder) / "latest").read_bytes() == b"t3"
        assert (Path(folder) / "global_step4").is_dir()
    dist.barrier()
    for drop_latest in (False, True):
        if drop_latest and dist.get_rank() == 0:
            os.remove(f"{folder}/latest")
        dist.barrier()
        fresh = runs.start(settings, seed=9)
        path, client_state = fresh.load_checkpoint(folder, tag=1, load_optimizer_states=False)
        assert client_state["i"] == 1
        assert os.path.dirname(path) == f"{folder}/1"
        runs.same(at_one["weights"], runs.snapshot(fresh)["weights"])
        fresh.destroy()
    path, _ = engine.load_checkpoint(f"{folder}/t3", tag=".")
    assert path.startswith(f"{folder}/t3")
    engine.destroy()


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_tags_name_what_is_loaded(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    pool.run(2, tags_body, str(tmp_path), stage)


def nothing_there_body(folder: str) -> None:
    engine = runs.start(runs.config(1))
    train(engine, 0, 1)
    os.makedirs(f"{folder}/other/sub", exist_ok=True)
    before = runs.snapshot(engine)
    for path, text in ((f"{folder}/nowhere", "does not exist"), (f"{folder}/other", "holds sub/")):
        with lines() as said:
            assert engine.load_checkpoint(path) == (None, None)
        assert (len(said) == 1) is (dist.get_rank() == 0)
        assert all(text in line and "Training starts from scratch" in line for line in said)
        raises(lambda path=path: engine.load_checkpoint(path, tag="nope"), "no checkpoint 'nope'", path, text)
    engine.save_checkpoint(folder, tag="good")
    engine.save_checkpoint(folder, tag="half")
    dist.barrier()
    raises(lambda: engine.load_checkpoint(folder, tag="nope"), "no checkpoint 'nope'", "good, half")
    if dist.get_rank() == 0:
        os.remove(f"{folder}/half/zero_pp_rank_1_mp_rank_00_optim_states.pt")
    dist.barrier()
    raises(lambda: engine.load_checkpoint(folder, tag="half"), "zero_pp_rank_1_mp_rank_00_optim_states.pt", "good")
    if dist.get_rank() == 0:
        Path(f"{folder}/latest").write_text("gone")
    dist.barrier()
    raises(lambda: engine.load_checkpoint(folder), "'gone'", "good, half")
    for tag in ("../good", "/etc", "", ".hidden"):
        with pytest.raises(ValueError, match="checkpoint tag"):
            engine.save_checkpoint(folder, tag=tag)
        with pytest.raises(ValueError, match="checkpoint tag"):
            engine.load_checkpoint(folder, tag=tag)
    with pytest.raises(ValueError, match="save_dir is empty"):
        engine.save_checkpoint("")
    for call, argument in (
        ("save_checkpoint", "save_dir"),
        ("load_checkpoint", "load_dir"),
        ("save_16bit_model", "save_dir"),
    ):
        with pytest.raises(TypeError, match=rf"^{call}: {argument} is None \(NoneType\); expected a path"):
            getattr(engine, call)(None)
    after = runs.snapshot(engine)
    runs.same(before, after)
    engine.destroy()


def given_the_tag_body(folder: str) -> None:
    """The folder of a tag in the place of the folder it lies in: told what to give."""
    engine = runs.start(runs.config(1))
    engine.save_checkpoint(folder, tag="good")
    dist.barrier()
    hint = f"it is a tag itself: give {folder} and the tag 'good'"
    with lines() as said:
        assert engine.load_checkpoint(f"{folder}/good") == (None, None)
    assert [hint in line for line in said] == [True] * (dist.get_rank() == 0)
    raises(lambda: engine.load_checkpoint(f"{folder}/good", tag="good"), hint)
    engine.destroy()


def test_given_the_tag(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, given_the_tag_body, str(tmp_path))


def test_what_is_not_there(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, nothing_there_body, str(tmp_path))


def tag_mismatch_body(folder: str, mode: str) -> list[str]:
    engine = runs.start(runs.config(1, checkpoint={"tag_validation": mode}))
    tag = f"rank{dist.get_rank()}"
    with lines() as said:
        if mode == "Fail":
            with pytest.raises(AssertionError, match="rank 1: 'rank1'"):
                engine.save_checkpoint(folder, tag=tag)
        else:
            engine.save_checkpoint(folder, tag=tag)
            assert engine.load_checkpoint(folder)[0].startswith(f"{folder}/rank0/")
    engine.destroy()
    return [line for line in said if "different tags" in line]


@pytest.mark.parametrize(("mode", "count"), (("Ignore", 0), ("Warn", 1), ("Fail", 0)))
def test_ranks_with_different_tags(pool: WorkerPool, tmp_path: Path, mode: str, count: int) -> None:
    said = pool.run(2, tag_mismatch_body, str(tmp_path), mode)
    assert [len(found) for found in said] == [count, 0]
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == ([] if mode == "Fail" else ["rank0"])


# ---- damaged files -------------------------------------------------------------------------------------------------


def damage_body(folder: str, name: str, how: str) -> None:
    engine = runs.start(runs.config(2, "bf16"))
    train(engine, 0, 1)
    engine.save_checkpoint(folder, tag="a")
    train(engine, 1, 2)
    before = runs.snapshot(engine)
    path = Path(folder) / "a" / name
    if dist.get_rank() == 0:
        raw = bytearray(path.read_bytes())
        if how == "flip":
            raw[len(raw) // 2] ^= 4
            path.write_bytes(raw)
        elif how == "cut":
            path.write_bytes(raw[: len(raw) // 2])
        elif how == "foreign":
            path.write_bytes(b"something else")
        else:
            path.unlink()
    dist.barrier()
    raises(lambda: engine.load_checkpoint(folder, tag="a"), name)
    runs.same(before, runs.snapshot(engine))
    engine.destroy()


MODEL, SHARD = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("name", "how"),
    (
        *((name, how) for name in (MODEL, SHARD) for how in ("flip", "cut", "foreign", "missing")),
        *(("manifest.json", how) for how in ("cut", "foreign", "missing")),
    ),
)
def test_damage_is_an_error_on_all_ranks(pool: WorkerPool, tmp_path: Path, name: str, how: str) -> None:
    pool.run(2, damage_body, str(tmp_path), name, how)


# ---- faults and retention ------------------------------------------------------------------------------------------


def fault_body(folder: str, rank: int, name: str) -> None:
    from deepspeed.checkpoint.disk import durable

    engine = runs.start(runs.config(2))
    train(engine, 0, 1)
    engine.save_checkpoint(folder, tag="a")
    saved = runs.snapshot(engine)
    train(engine, 1, 2)
    if name == "latest":
        saved = runs.snapshot(engine)  # the pointer comes last: what it points to has been replaced by then
    plain = durable.open_for_writing

    def failing(path: Path) -> Any:
        if dist.get_rank() == rank and name in path.name:
            raise OSError(5, "Input/output error", str(path))
        return plain(path)

    durable.open_for_writing = failing
    try:
        for tag in ("a", "b"):
            text = raises(lambda tag=tag: engine.save_checkpoint(folder, tag=tag), f"rank {rank}", "Input/output error")
            assert dist.get_world_size() == 2
            texts: list[Any] = [None, None]
            dist.all_gather_object(texts, text)
            assert texts[0] == texts[1]
    finally:
        durable.open_for_writing = plain
    dist.barrier()
    engine.load_checkpoint(folder)
    runs.same(saved, runs.snapshot(engine))
    engine.save_checkpoint(folder, tag="a")
    engine.destroy()


@pytest.mark.parametrize(
    ("rank", "name"), ((0, "model_states"), (1, "optim_states"), (0, "manifest"), (0, "latest"), (1, "rng_state"))
)
def test_one_ranks_failure_is_everyones(pool: WorkerPool, tmp_path: Path, rank: int, name: str) -> None:
    pool.run(2, fault_body, str(tmp_path), rank, name)
    # A pointer that could not be written leaves the new tag complete but not pointed to.
    tags = sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir())
    assert tags == (["a", "b"] if name == "latest" else ["a"])


def retention_body(folder: str) -> None:
    engine = runs.start(runs.config(1, checkpoint={"keep_last": 2}))
    Path(folder, "mine").mkdir(exist_ok=True)
    for tag in ("e", "d", "c"):
        engine.save_checkpoint(folder, tag=tag)
    engine.save_checkpoint(folder, tag="b", save_latest=False)
    engine.save_checkpoint(folder, tag="a", save_latest=False)
    engine.load_checkpoint(folder)
    assert engine.loaded_checkpoint_tag == "c"
    engine.destroy()


def test_retention_keeps_the_newest_and_the_one_pointed_to(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, retention_body, str(tmp_path))
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == ["a", "b", "c", "mine"]


def nested_retention_body(folder: str) -> None:
    engine = runs.start(runs.config(1, checkpoint={"keep_last": 1}))
    for tag, latest in (("run/1", True), ("run/2", False), ("run/3", False)):
        engine.save_checkpoint(folder, tag=tag, save_latest=latest)
    engine.load_checkpoint(folder)
    assert engine.loaded_checkpoint_tag == "run/1"
    for tag, latest in (("a", True), ("a/b", True), ("c", False)):
        engine.save_checkpoint(folder, tag=tag, save_latest=latest)
    engine.load_checkpoint(folder)
    assert engine.loaded_checkpoint_tag == "a/b"
    engine.destroy()


def test_retention_knows_tags_in_folders(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, nested_retention_body, str(tmp_path))
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == ["1", "3"]


def own_schedule_body(folder: str) -> None:
    settings = runs.config(1)
    del settings["scheduler"]
    engine = runs.start(settings)
    with lines() as said:
        engine.save_checkpoint(folder, client_state={"lr_scheduler": {"at": 5}, "optimizer": {"x": 1}, "n": 1})
    assert sum("'optimizer' belong" in line and "NOT saved" in line for line in said) == 1
    assert not any("'lr_scheduler'" in line for line in said)
    found = engine.load_checkpoint(folder)[1]
    assert (found["lr_scheduler"], found["n"]) == ({"at": 5}, 1)
    engine.save_checkpoint(folder, tag="again", client_state=found)
    assert engine.load_checkpoint(folder)[1]["lr_scheduler"] == {"at": 5}
    engine.destroy()


def test_a_schedule_of_the_users_own_is_kept(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, own_schedule_body, str(tmp_path))


def full_disk_body(folder: str) -> None:
    engine = runs.start(runs.config(1))
    train(engine, 0, 1)
    plain = shutil.disk_usage
    shutil.disk_usage = lambda path: plain(path)._replace(free=1000)  # type: ignore[assignment]
    try:
        raises(lambda: engine.save_checkpoint(folder), "rank 0", "1,000 bytes free")
    finally:
        shutil.disk_usage = plain
    dist.barrier()
    assert list(Path(folder).iterdir()) == []
    engine.destroy()


def test_space_is_looked_at_before_writing(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, full_disk_body, str(tmp_path))


def without_optimizer_body(folder: str) -> None:
    settings = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 10**9}
    engine = runs.start(settings)
    engine.save_checkpoint(folder)
    other = runs.start(settings, seed=9)
    other.load_checkpoint(folder)
    runs.same(runs.whole(engine.module), runs.whole(other.module))
    trained = runs.start(runs.config(1), seed=8)
    raises(lambda: trained.load_checkpoint(folder), "holds no optimizer state", "load_module_only=True")
    trained.load_checkpoint(folder, load_module_only=True)
    runs.same(runs.whole(engine.module), runs.whole(trained.module))
    for used in (engine, other, trained):
        used.destroy()


def test_engines_without_optimizer(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, without_optimizer_body, str(tmp_path))
