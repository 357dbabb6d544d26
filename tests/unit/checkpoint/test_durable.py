"""A crash at any moment leaves the old state or the new one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from deepspeed.checkpoint import names
from deepspeed.checkpoint.disk import durable
from deepspeed.checkpoint.disk.manifest import Manifest, is_complete
from deepspeed.utils.torch_file import TorchFile

TOKEN = "0badcafe"


def complete(folder: Path, text: str, number: int = 1) -> Path:
    """A folder with a manifest and one file that says ``text``."""
    folder.mkdir(parents=True, exist_ok=True)
    written = durable.write_torch(folder / names.model_file(0), TorchFile({"text": text}))
    Manifest({names.model_file(0): written}, number, 0, 1, "test").write(folder)
    return folder


def text_of(folder: Path) -> str:
    return str(torch.load(folder / names.model_file(0), weights_only=True)["text"])


class FailingFile:
    """A file whose disk is full after some bytes."""

    def __init__(self, file: BinaryIO, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(28, "No space left on device")
        return self._file.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def __enter__(self) -> FailingFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@pytest.mark.parametrize("room", (0, 10, 1000))
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    path = tmp_path / "file.pt"
    durable.write_torch(path, TorchFile(torch.ones(3)))
    before = path.read_bytes()
    plain = durable.open_for_writing
    monkeypatch.setattr(durable, "open_for_writing", lambda path: FailingFile(plain(path), room))
    with pytest.raises(OSError, match="No space left"):
        durable.write_torch(path, TorchFile(torch.ones(1000)))
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.pt"]


def test_text_is_replaced_whole(tmp_path: Path) -> None:
    durable.write_text(tmp_path / "latest", "a")
    durable.write_text(tmp_path / "latest", "step10")
    assert (tmp_path / "latest").read_text() == "step10"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("can_exchange", (True, False))
def test_publishing_replaces_and_keeps_foreign_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(durable, "_exchange", lambda first, second: False)
    final = complete(tmp_path / "step", "old")
    (final / "notes.txt").write_text("mine")
    (final / names.optim_file(5, 0, bf16=False)).write_text("of a run with more ranks")
    aside = durable.saving_folder(final, TOKEN)
    complete(aside, "new", 2)
    durable.publish_folder(aside, final, TOKEN)
    assert text_of(final) == "new"
    assert sorted(entry.name for entry in final.iterdir()) == [names.MANIFEST, names.model_file(0), "notes.txt"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


def test_a_crash_between_the_two_renames_is_undone(tmp_path: Path) -> None:
    final = tmp_path / "step"
    hidden = tmp_path / str(names.HiddenName("step", names.Transit.REPLACED, TOKEN))
    complete(hidden, "old")
    assert durable.recover(final, is_complete)
    assert text_of(final) == "old"
    assert not durable.recover(final, is_complete)


def test_a_torn_folder_is_not_put_back(tmp_path: Path) -> None:
    hidden = tmp_path / str(names.HiddenName("step", names.Transit.REPLACED, TOKEN))
    complete(hidden, "old")
    (hidden / names.model_file(0)).write_bytes(b"cut")
    assert not durable.recover(tmp_path / "step", is_complete)


def test_leftovers_of_dead_processes_are_cleared(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    token = durable.new_token()
    dead = durable.saving_folder(tmp_path / "dead", f"{token[:8]}{ended.pid:08x}{token[16:]}")
    other = durable.saving_folder(tmp_path / "other", f"{token[:16]}{1:012x}{token[28:]}")  # same number, earlier start
    mine = durable.saving_folder(tmp_path / "mine", token)
    for folder in (dead, other, mine):
        folder.mkdir()
    deleted = tmp_path / str(names.HiddenName("gone", names.Transit.DELETED, TOKEN))
    complete(deleted, "x")
    replaced = tmp_path / str(names.HiddenName("lost", names.Transit.REPLACED, TOKEN))
    complete(replaced, "kept")
    removed = durable.clear_leftovers(tmp_path, is_complete)
    assert sorted(removed) == sorted([dead.name, other.name, deleted.name])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [mine.name, "lost"]
    assert text_of(tmp_path / "lost") == "kept"


def test_leftovers_of_other_hosts_need_to_be_old(tmp_path: Path) -> None:
    aside = durable.saving_folder(tmp_path / "step", f"{0:08x}{durable.new_token()[8:]}")
    complete(aside, "x")
    assert durable.clear_leftovers(tmp_path, is_complete) == []
    for entry in [*aside.iterdir(), aside]:
        os.utime(entry, (1, 1))
    assert durable.clear_leftovers(tmp_path, is_complete) == [aside.name]


def test_deleting_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = complete(tmp_path / "step", "x")
    monkeypatch.setattr(durable.shutil, "rmtree", lambda *args, **kwargs: None)  # killed before anything was removed
    durable.delete_folder(folder, "step", TOKEN)
    assert not folder.exists()
    monkeypatch.undo()
    assert durable.clear_leftovers(tmp_path, is_complete) == [".step.deleted-0badcafe"]
    assert list(tmp_path.iterdir()) == []
