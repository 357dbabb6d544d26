"""Universal folders: made of any tag, loaded by any engine, complete or an error."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.checkpoint import CheckpointError, constants, enable_universal_checkpoint
from deepspeed.checkpoint.ds_to_universal import main, parse_arguments
from deepspeed.checkpoint.universal import write as universal_write
from tests.distributed.checkpoint import runs
from tests.distributed.checkpoint.test_layouts import OPTIMIZERS, load_run, same_full, save_run
from tests.harness.pool import WorkerPool
from tests.harness.width import wide

UNIVERSAL = {"checkpoint": {"load_universal": True}}


def convert(folder: Path, *flags: str, tag: str = "global_step3") -> Path:
    """Run the command on a tag; the universal folder, beside it."""
    output = folder / "universal"
    main(parse_arguments(["--input_folder", str(folder / tag), "--output_folder", str(output), *flags]))
    return output


def universal_config(stage: int, precision: str = "fp32", **top: Any) -> dict[str, Any]:
    return runs.config(stage, precision, **UNIVERSAL, **top)


LAYOUTS = (
    ((2, 0, "fp32"), (1, 3, "fp32")), ((2, 1, "fp16"), (2, 2, "fp16")), ((1, 2, "bf16"), (2, 3, "bf16")),
    ((2, 3, "bf16"), (3, 1, "bf16")), wide((2, 3, "fp16"), (2, 0, "fp16")), wide((3, 1, "fp32"), (2, 0, "fp32")),
    wide((1, 0, "bf16"), (2, 2, "bf16")), wide((2, 2, "fp32"), (3, 2, "fp32")),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new"), LAYOUTS)
def test_every_bit_survives(
    pool: WorkerPool, tmp_path: Path, old: tuple[int, int, str], new: tuple[int, int, str]
) -> None:
    saved = pool.run(old[0], save_run, str(tmp_path), runs.config(old[1], old[2]))[0]
    convert(tmp_path)
    for found in pool.run(new[0], load_run, str(tmp_path), universal_config(new[1], new[2])):
        same_full(saved, found)
        assert found.get("scaler") == saved.get("scaler")


@pytest.mark.parametrize("form", ("1", "3"))
def test_both_forms_hold_everything(pool: WorkerPool, tmp_path: Path, form: str) -> None:
    saved = pool.run(1, save_run, str(tmp_path), runs.config(2, "bf16"))[0]
    output = convert(tmp_path, "--for_stage", form)
    found = torch.load(output / "zero" / "mix.weight" / "exp_avg.pt", weights_only=True)
    assert (found.shape == (13 * 7,)) if form == "3" else (found["param"].shape == (13, 7) and found["cat_dim"] == 0)
    # What never had a gradient has zeros for DeepSpeed, which are not taken for a state here.
    never = torch.load(output / "zero" / "idle.bias" / "exp_avg.pt", weights_only=True)
    assert not torch.as_tensor(never if form == "3" else never["param"]).any()
    (loaded,) = pool.run(1, load_run, str(tmp_path), universal_config(2, "bf16"))
    same_full(saved, loaded)


def continue_run(folder: str, settings: dict[str, Any]) -> list[float]:
    engine = runs.start(settings, seed=9)
    engine.load_checkpoint(folder)
    losses = [runs.step(engine, index, dist.get_rank()) for index in (3, 4)]
    engine.destroy()
    return losses


def test_a_resumed_run_goes_on_as_from_the_tag(pool: WorkerPool, tmp_path: Path) -> None:
    """Random states, schedule and counters too: dropout falls on the same elements."""
    pool.run(2, save_run, str(tmp_path), runs.config(2, "bf16"))
    convert(tmp_path)
    ordinary = pool.run(2, continue_run, str(tmp_path), runs.config(2, "bf16"))
    assert pool.run(2, continue_run, str(tmp_path), universal_config(2, "bf16")) == ordinary


@pytest.mark.parametrize("optimizer", [name if name in ("lion", "momentum") else wide(name) for name in OPTIMIZERS])
def test_states_of_every_optimizer(pool: WorkerPool, tmp_path: Path, optimizer: str) -> None:
    section = OPTIMIZERS[optimizer]
    saved = pool.run(2, save_run, str(tmp_path), runs.config(1, "bf16", optimizer=section))
    convert(tmp_path)
    loaded = pool.run(2, load_run, str(tmp_path), universal_config(1, "bf16", optimizer=section))
    for before, after in zip(saved, loaded, strict=True):
        same_full(before, after, ("weights", "masters", "states", "groups", "own"))


# ---- complete or an error ------------------------------------------------------------------------------------------


def refused(folder: str, settings: dict[str, Any], **kwargs: Any) -> str:
    """The error of a load that must leave the engine as it was."""
    engine = runs.start(settings, seed=9)
    before = runs.snapshot(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder, **kwargs)
    runs.same(before, runs.snapshot(engine))
    engine.destroy()
    return str(caught.value)


def test_what_is_missing_is_named(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, save_run, str(tmp_path), runs.config(1))
    settings = universal_config(1)
    (text,) = pool.run(1, refused, str(tmp_path), settings)
    assert "latest_universal" in text
    assert "global_step3" in text
    (text,) = pool.run(1, refused, str(tmp_path), settings, tag="global_step3")
    assert "zero/optimizer_state.pt" in text
    assert "ds_to_universal" in text
    lost = convert(tmp_path) / "zero" / "mix.weight" / "exp_avg.pt"
    data = lost.read_bytes()
    lost.unlink()
    for world in (1, 2):
        assert "zero/mix.weight/exp_avg.pt is missing" in pool.run(world, refused, str(tmp_path), settings)[0]
    lost.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    assert "zero/mix.weight/exp_avg.pt is damaged" in pool.run(1, refused, str(tmp_path), settings)[0]
    lost.write_bytes(data)
    (tmp_path / "universal" / "manifest.json").unlink()
    assert "manifest.json" in pool.run(1, refused, str(tmp_path), settings)[0]


def as_foreign(output: Path) -> None:
    """Make a universal folder one of another release: nothing in it but the historical keys."""
    (output / "manifest.json").unlink()
    for path in output.glob("rng_state_*.pt"):
        path.unlink()
    for path in (output / "zero" / "optimizer_state.pt", *output.glob("*model_states.pt")):
        content = torch.load(path, weights_only=False)
        for key in (constants.UNIVERSAL_RECORD, constants.ENGINE_STATE, constants.LAYOUT_RECORD):
            content.pop(key, None)
        torch.save(content, path)


def without_optimizer(output: Path) -> None:
    """As saved by a script that made its optimizer itself."""
    for path in output.glob("*model_states.pt"):
        content = torch.load(path, weights_only=False)
        content[constants.DS_CONFIG] = {k: v for k, v in content[constants.DS_CONFIG].items() if k != "optimizer"}
        torch.save(content, path)


class Plain(runs.Everything):
    """Nothing frozen, and no parameter without gradient: files of other releases hold zeros for those."""

    def __init__(self) -> None:
        super().__init__()
        del self.idle, self.nothing, self.frozen
        self.frozen = torch.nn.Identity()


def foreign_save(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    return save_run(folder, settings, module=runs.build(0, Plain))


def foreign_load(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    engine = runs.start(settings, module=runs.build(9, Plain))
    engine.load_checkpoint(folder)
    found = runs.snapshot(engine)
    engine.destroy()
    return found


def foreign_refused(folder: str, settings: dict[str, Any]) -> str:
    engine = runs.start(settings, module=runs.build(9, Plain))
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("form", ("1", "3"))
def test_folders_without_a_record(pool: WorkerPool, tmp_path: Path, form: str) -> None:
    saved = pool.run(2, foreign_save, str(tmp_path), runs.config(2, "bf16"))[0]
    output = convert(tmp_path, "--for_stage", form)
    as_foreign(output)
    for found in pool.run(2, foreign_load, str(tmp_path), universal_config(3, "bf16")):
        same_full(saved, found, ("weights", "masters", "states", "groups", "schedule"))
    # Also where the config does not say whose states these are: they are not Lion's, which has one of the two.
    lion = {**universal_config(0, "bf16"), "optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}
    for named in (True, False):
        if not named:
            without_optimizer(output)
        (text,) = pool.run(1, foreign_refused, str(tmp_path), lion)
        assert "holds the state of optimizer 'adam', this engine runs 'lion'" in text
    (output / "zero" / "back.bias" / "exp_avg_sq.pt").unlink()
    (text,) = pool.run(1, foreign_refused, str(tmp_path), universal_config(0, "bf16"))
    assert "exp_avg_sq.pt is missing" in text
    assert "'back.bias'" in text
    shutil.rmtree(output / "zero" / "back.bias")
    (text,) = pool.run(1, foreign_refused, str(tmp_path), universal_config(0, "bf16"))
    assert "zero/back.bias/fp32.pt is missing" in text


# ---- the command ---------------------------------------------------------------------------------------------------


def test_a_conversion_replaces_its_own_kind_and_nothing_else(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(1, save_run, str(tmp_path), runs.config(1))
    tag = tmp_path / "global_step3"
    with pytest.raises(CheckpointError, match="same folder"):
        universal_write.convert(tag, tag)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    with pytest.raises(CheckpointError, match="is not a universal checkpoint"):
        universal_write.convert(tag, tmp_path / "mine")
    output = convert(tmp_path)
    (output / "notes.txt").write_text("kept")
    before = sorted(path.relative_to(output) for path in output.rglob("*"))

    def torn(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(universal_write, "_write_file", torn)
        with pytest.raises(CheckpointError, match="No space left"):
            convert(tmp_path)
    assert sorted(path.relative_to(output) for path in output.rglob("*")) == before
    convert(tmp_path)
    assert sorted(path.relative_to(output) for path in output.rglob("*")) == before
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert (tmp_path / "latest_universal").read_text() == "universal"


def test_a_damaged_tag_is_not_converted(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, save_run, str(tmp_path), runs.config(2))
    path = tmp_path / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    data[-900] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"optim_states\.pt is damaged"):
        convert(tmp_path)
    assert not (tmp_path / "universal").exists()


def save_as(folder: str, settings: dict[str, Any], tag: str) -> str:
    engine = runs.start(settings)
    runs.step(engine, 0, 0)
    engine.save_checkpoint(folder, tag=tag)
    path, _ = engine.load_checkpoint(folder, tag=tag)
    engine.destroy()
    return str(path)


def test_a_tag_saved_over_a_universal_folder_is_a_tag(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, save_run, str(tmp_path), runs.config(1))
    output = convert(tmp_path)
    (path,) = pool.run(1, save_as, str(tmp_path), runs.config(1), "universal")
    assert path == str(output / "mp_rank_00_model_states.pt")
    assert not (output / "zero").exists()


def load_one_by_one(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """With the historical functions: every parameter by itself, then the weights."""
    engine = runs.start(settings, seed=9)
    params = [(name, param) for name, param in engine.module.named_parameters() if param.requires_grad]
    enable_universal_checkpoint(param for _, param in params)
    steps = {name: param.load_hp_checkpoint_state(f"{folder}/zero/{name}", 0, 1) for name, param in params}
    engine.optimizer.publish_masters()
    found = runs.snapshot(engine)
    engine.destroy()
    return {**found, "steps": steps}


def test_parameters_one_by_one(pool: WorkerPool, tmp_path: Path) -> None:
    saved = pool.run(2, save_run, str(tmp_path), runs.config(2))[0]
    output = convert(tmp_path)
    for found in pool.run(2, load_one_by_one, str(output), runs.config(1)):
        runs.same(saved["masters"], found["masters"])
        runs.same(saved["states"]["mix.weight"], found["states"]["mix.weight"])
        assert found["steps"]["mix.weight"] == 3.0


def save_twice(folder: str, settings: dict[str, Any]) -> None:
    engine = runs.start(settings)
    for tag in ("first", "second"):
        runs.step(engine, 0, 0)
        engine.save_checkpoint(folder, tag=tag)
    engine.destroy()


def test_retention_leaves_universal_folders_alone(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, save_run, str(tmp_path), runs.config(1))
    convert(tmp_path)
    pool.run(1, save_twice, str(tmp_path), runs.config(1, checkpoint={"keep_last": 1}))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["second", "universal"]


def test_the_size_is_that_of_the_state(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, save_run, str(tmp_path), runs.config(3, "bf16"))
    output = convert(tmp_path)
    state: dict[str, Tensor] = dict(runs.build().named_parameters())
    trained = sum(value.numel() for value in state.values() if value.requires_grad)
    files = [path for path in output.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 12 * trained + 2048 * len(files) + 40_000
