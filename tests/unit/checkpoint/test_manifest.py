"""A tag counts only with a manifest whose files are all there, and damage is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspeed.checkpoint import names
from deepspeed.checkpoint.disk import manifest
from tests.unit.checkpoint.test_durable import complete

FILE = names.model_file(0)


def read(folder: Path) -> manifest.Manifest:
    found = manifest.read_manifest(folder)
    assert found is not None
    return found


def test_it_is_read_back(tmp_path: Path) -> None:
    found = read(complete(tmp_path / "step", "x", 7))
    assert (found.number, found.world_size, list(found.files)) == (7, 1, [FILE])
    assert found.nbytes == (tmp_path / "step" / FILE).stat().st_size


def test_whole_folders_pass(tmp_path: Path) -> None:
    folder = complete(tmp_path / "step", "x")
    assert manifest.is_complete(folder)
    assert manifest.wrong_checksums(folder, read(folder), [FILE]) == []


def test_missing_and_cut_files_are_named(tmp_path: Path) -> None:
    folder = complete(tmp_path / "step", "x")
    found = read(folder)
    path = folder / FILE
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    assert manifest.wrong_sizes(folder, found) == [f"{FILE} has {len(raw) - 1} bytes, {len(raw)} were saved"]
    path.unlink()
    assert manifest.wrong_sizes(folder, found) == [f"{FILE} is missing"]
    assert not manifest.is_complete(folder)


@pytest.mark.parametrize("at", (0, 40, -1))
def test_one_flipped_bit_is_found(tmp_path: Path, at: int) -> None:
    folder = complete(tmp_path / "step", "x")
    raw = bytearray((folder / FILE).read_bytes())
    raw[at] ^= 1
    (folder / FILE).write_bytes(raw)
    problems = manifest.wrong_checksums(folder, read(folder), [FILE])
    assert len(problems) == 1
    assert FILE in problems[0]


def test_no_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    folder = complete(tmp_path / "step", "x")
    (folder / names.MANIFEST).unlink()
    assert manifest.read_manifest(folder) is None
    assert not manifest.is_complete(folder)


@pytest.mark.parametrize("text", ("", "{", "[]", '{"version": 1}', '{"version": 99, "files": {}}'))
def test_damaged_manifests_are_named(tmp_path: Path, text: str) -> None:
    folder = complete(tmp_path / "step", "x")
    (folder / names.MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        manifest.read_manifest(folder)
    assert not manifest.is_complete(folder)


def test_tags_are_listed_by_number_not_by_clock(tmp_path: Path) -> None:
    for number, tag in ((3, "a"), (1, "b"), (2, "c")):
        complete(tmp_path / tag, tag, number)
    (tmp_path / "foreign").mkdir()
    complete(tmp_path / ".c.saving-01", "hidden", 9)
    assert manifest.complete_tags(tmp_path) == [(1, "b"), (2, "c"), (3, "a")]


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    record = json.loads((complete(tmp_path / "step", "x") / names.MANIFEST).read_text())
    assert set(record) == {"version", "files", "number", "global_steps", "world_size", "ds_version", "save"}
