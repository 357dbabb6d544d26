"""``python -m deepspeed.checkpoint``: what it says of checkpoints is true, by files read without it."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint import CheckpointError, ds_to_universal
from deepspeed.checkpoint.__main__ import main
from deepspeed.utils import zero_to_fp32
from deepspeed.utils.torch_archive import packs
from tests.distributed.checkpoint import runs
from tests.harness.pool import WorkerPool

ANOTHER_LAYOUT = {"zero": {"reduce_bucket_size": 100, "stage3_max_live_parameters": 0}}


def saves_body(folder: str) -> None:
    """``first`` at stage 2, ``second`` the same state at stage 3, ``third`` one step later."""
    engine = runs.start(runs.config(2, "bf16"))
    for index in range(2):
        runs.step(engine, index, dist.get_rank())
    engine.save_checkpoint(folder, tag="first", client_state={"epoch": 3})
    other = runs.start(runs.config(3, "bf16", **ANOTHER_LAYOUT), seed=9)
    other.load_checkpoint(folder)
    other.save_checkpoint(folder, tag="second")
    runs.step(other, 2, dist.get_rank())
    other.save_checkpoint(folder, tag="third")
    for used in (engine, other):
        used.destroy()


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    pool.run(2, saves_body, str(folder))
    return folder


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    """Exit status and the object printed."""
    status = main([*map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("tag", "key"), (("first", "single_partition_of_fp32_groups"), ("second", "fp32_flat_groups")))
def test_pieces_lie_where_inspect_says(saved: Path, capsys: pytest.CaptureFixture[str], tag: str, key: str) -> None:
    status, facts = ask(capsys, "inspect", saved, "--tag", tag)
    assert status == 0
    assert (facts["zero_stage"], facts["ranks"], facts["optimizer"][0]) == (2 if tag == "first" else 3, 2, "adam")
    assert facts["client_state"] == (["epoch"] if tag == "first" else [])
    assert facts["counters"]["global_steps"] == 2
    files = {entry["name"]: entry["nbytes"] for entry in facts["files"]}
    assert files == {entry.name: entry.stat().st_size for entry in (saved / tag).iterdir()}
    content: dict[str, Any] = {}
    seen = 0
    for item in facts["tensors"]:
        if item["what"] != "fp32":
            continue
        seen += 1
        values = []
        for piece in item["pieces"]:
            file = content.setdefault(piece["file"], torch.load(saved / tag / piece["file"], weights_only=True))
            flat = file["optimizer_state_dict"][key][int(piece["key"].split()[1].split(".")[0])]
            values.append(flat[piece["offset"] : piece["offset"] + piece["numel"]])
        whole = torch.cat(values).view(item["shape"]) if values else torch.zeros(item["shape"])
        assert torch.equal(whole.bfloat16(), weights(saved)[item["name"]])
    assert seen == 9
    roles = {item["name"]: item["role"] for item in facts["tensors"] if item["what"] == "weight"}
    assert (roles["seen"], roles["frozen.bias"], roles["head.weight"]) == ("buffer", "frozen", "tied")


def weights(saved: Path) -> dict[str, torch.Tensor]:
    """What both tags hold, from the file of the first."""
    state: dict[str, torch.Tensor] = torch.load(saved / "first/mp_rank_00_model_states.pt", weights_only=True)["module"]
    return state


def test_text_names_tensors_and_files(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved / "second"), "--fragments", "--name", "mix"]) == 0
    text = capsys.readouterr().out
    for expected in ("13x7", "bfloat16", "exp_avg_sq", "optim_states.pt", "0:"):
        assert expected in text
    assert "embed.weight" not in text


def test_layouts_make_no_difference(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, facts = ask(capsys, "diff", saved / "first", saved / "second")
    assert (status, facts["tensors"], facts["values"]) == (0, [], [])
    assert facts["compared"] > 40


def test_differences_are_measured(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, facts = ask(capsys, "diff", saved, saved, "--tag", "first", "--other-tag", "third")
    assert status == 1
    assert "global_steps" in {entry["key"] for entry in facts["values"]}
    found = {(row["name"], row["what"]): row for row in facts["tensors"]}
    assert ("frozen.weight", "weight") not in found
    assert found["seen", "weight"]["max_difference"] == 10  # tokens of one step on one rank
    assert found["mix.bias", "exp_avg"]["differing"] == 13
    assert main(["diff", str(saved / "first"), str(saved / "third"), "--name", "seen", "--tolerance", "10"]) == 1
    text = capsys.readouterr().out
    assert "none differ" in text
    assert "global_steps: 2 and 3" in text


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit": (lambda tag: flip(tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"), "rank_1", "CRC-32"),
    "a short file": (lambda tag: (tag / "rng_state_0.pt").write_bytes(b"PK"), "rng_state_0.pt", "2 bytes"),
    "a missing file": (lambda tag: (tag / "rng_state_1.pt").unlink(), "rng_state_1.pt", "missing"),
    "a foreign file": (lambda tag: (tag / "rng_state_7.pt").touch(), "rng_state_7.pt", "did not write"),
    "a torn manifest": (lambda tag: (tag / "manifest.json").write_text("{"), "manifest.json", "damaged"),
    "no manifest": (lambda tag: (tag / "manifest.json").unlink(), "manifest.json", "did not finish"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_found(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    (tmp_path / "copy" / "second" / "notes.txt").write_text("users may keep files here")
    assert ask(capsys, "verify", tmp_path / "copy", "--all")[0] == 0
    work, *expected = DAMAGE[how]
    work(tmp_path / "copy" / "second")
    status, facts = ask(capsys, "verify", tmp_path / "copy", "--tag", "second")
    assert (status, facts["ok"]) == (1, False)
    assert len(facts["tags"][0]["problems"]) == 1
    for part in expected:
        assert part in facts["tags"][0]["problems"][0]
    assert main(["verify", str(tmp_path / "copy"), "--all"]) == 1
    assert capsys.readouterr().out.count("DAMAGED") == 1


@pytest.mark.parametrize("how", ("a missing file", "a torn manifest"))
def test_damaged_tags_are_not_converted(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    work, *expected = DAMAGE[how]
    work(tmp_path / "copy" / "second")
    words = ["--input_folder", str(tmp_path / "copy" / "second"), "--output_folder", str(tmp_path / "universal")]
    monkeypatch.setattr("sys.argv", ["ds_to_universal", *words])
    assert ds_to_universal.cli_main() == 1
    said = capsys.readouterr().err
    for part in expected:
        assert part in said
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


@pytest.mark.parametrize("tag", ("first", "second"))
def test_universal_folders_are_verified_and_not_converted(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tag: str
) -> None:
    universal = tmp_path / "universal"

    def convert(source: Path) -> None:
        words = ["--input_folder", str(source), "--output_folder", str(universal)]
        ds_to_universal.main(ds_to_universal.parse_arguments(words))

    with pytest.raises(CheckpointError, match=r"is a checkpoint folder; give one of its tags: .*first, .*second"):
        convert(saved)
    convert(saved / tag)
    assert main(["verify", str(universal)]) == 0
    for command in (["inspect", str(universal)], ["diff", str(universal), str(universal)]):
        assert main(command) == 2
        assert "is a universal folder, whose tensors are the files zero/PARAMETER/*.pt" in capsys.readouterr().err
    flip(next((universal / "zero").rglob("fp32.pt")))
    capsys.readouterr()
    status, facts = ask(capsys, "verify", universal)
    assert (status, len(facts["tags"][0]["problems"])) == (1, 1)
    assert "fp32.pt is damaged" in facts["tags"][0]["problems"][0]
    with pytest.raises(CheckpointError, match="is a universal folder already"):
        convert(universal)


def test_a_full_disk_is_told_by_the_name_of_the_file(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails says no name; nothing is left behind."""

    def full(archive: packs.ArchiveFile, file: BinaryIO, seen: Any = None) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packs.ArchiveFile, "write", full)
    words = ["convert", "--to", "deepspeed", "--tag", "second", str(saved), str(tmp_path / "out")]
    assert main(words) == 2
    assert "model_states.pt'" in capsys.readouterr().err
    assert zero_to_fp32.main([str(saved), str(tmp_path / "fp32")]) == 1
    assert "fp32/pytorch_model.bin'" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "fp32"]


def test_what_is_not_there(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (("inspect", tmp_path), "is empty"),
        (("verify", tmp_path / "no"), "does not exist"),
        (("verify", saved, "--tag", "no"), "first/, latest, second/"),
        (("diff", saved / "first", saved / "no"), "does not exist"),
        (("verify", saved, "--tag", "../out"), "name of a folder"),
    ):
        assert main(list(map(str, words))) == 2
        assert expected in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["inspect"])
    assert ended.value.code == 2
