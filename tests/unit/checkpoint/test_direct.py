"""Files written past the page cache hold what was written, in whatever pieces it came and wherever it went back to."""

from __future__ import annotations

import io
import os
import random
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint.disk import direct, durable
from deepspeed.utils.host_buffer import HostBuffer, RunCopier
from deepspeed.utils.torch_file import Pack, TorchFile

SMALL = direct.Writing(nbytes=8 * 4096, buffers=2)


@pytest.fixture(autouse=True)
def _small_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_DIRECT_FROM_NBYTES", 0)


def random_writes(file: Any, seed: int, nbytes: int) -> None:
    """Appends of every size, and now and then something rewritten further up."""
    draw = random.Random(seed)
    end = 0
    while end < nbytes:
        piece = draw.randbytes(draw.choice((1, 30, 4096, 5000, 40_000)))
        file.write(piece)
        end += len(piece)
        if end > 100 and draw.random() < 0.5:
            back = draw.randrange(end - 50)
            file.seek(back)
            file.write(draw.randbytes(50))
            file.seek(end)


@pytest.mark.parametrize("buffers", (1, 2, 3))
@pytest.mark.parametrize("nbytes", (10, 4096, 8 * 4096, 300_000))
def test_any_order_of_writes(tmp_path: Path, nbytes: int, buffers: int) -> None:
    how = direct.Writing(nbytes=8 * 4096, buffers=buffers)
    for seed in range(5):
        plain = io.BytesIO()
        random_writes(plain, seed, nbytes)
        with open(tmp_path / "file", "wb", buffering=0) as file, direct.writer(file, 1 << 20, how) as target:
            random_writes(target, seed, nbytes)
        assert (tmp_path / "file").read_bytes() == plain.getvalue()


def test_large_files_go_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    plain = direct.DirectFile._write_all
    monkeypatch.setattr(
        direct.DirectFile, "_write_all", lambda self, *rest: (used.append(self._handle), plain(self, *rest))[1]
    )
    content = {"a": torch.arange(100_000), "b": torch.ones(3)}
    for how, expected in ((direct.PLAIN, False), (SMALL, True)):
        written = durable.write_torch(tmp_path / "file.pt", TorchFile(content), how)
        assert bool(used) == expected
        data = (tmp_path / "file.pt").read_bytes()
        assert (written.nbytes, written.crc32) == (len(data), zlib.crc32(data))
        assert torch.equal(torch.load(tmp_path / "file.pt", weights_only=True)["a"], content["a"])


@pytest.mark.parametrize("after", (0, 1))
def test_file_systems_that_refuse_are_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """``after``: 0 the flag is refused, 1 the first write is."""
    plain = os.pwrite

    def refusing(handle: int, data: Any, offset: int) -> int:
        if direct._is_set(handle, os.O_DIRECT):
            raise OSError(22, "Invalid argument")
        return plain(handle, data, offset)

    if after == 0:
        set_flag = direct._set_flag
        monkeypatch.setattr(direct, "_set_flag", lambda handle, flag, on: not on and set_flag(handle, flag, on))
    else:
        monkeypatch.setattr(os, "pwrite", refusing)
    content = torch.randn(100_000)
    durable.write_torch(tmp_path / "file.pt", TorchFile(content), SMALL)
    assert torch.equal(torch.load(tmp_path / "file.pt", weights_only=True), content)


def test_parts_refused_at_the_same_moment_all_go_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both parts in flight are refused before either has switched the flag, which they share, off."""
    plain, refused = os.pwrite, threading.Barrier(2)

    def refusing(handle: int, data: Any, offset: int) -> int:
        if direct._is_set(handle, os.O_DIRECT):
            turn = refused.wait(timeout=30)
            for _ in range(3000 * turn):  # the second is told of it only when the first has switched the flag off
                if not direct._is_set(handle, os.O_DIRECT):
                    break
                time.sleep(0.01)
            raise OSError(22, "Invalid argument")
        return plain(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    content = torch.randn(100_000)
    durable.write_torch(tmp_path / "file.pt", TorchFile(content), SMALL)
    assert torch.equal(torch.load(tmp_path / "file.pt", weights_only=True), content)


def test_a_failing_disk_is_an_error_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable.write_torch(tmp_path / "file.pt", TorchFile(torch.zeros(5)), SMALL)
    plain, count = os.pwrite, [0]

    def failing(handle: int, data: Any, offset: int) -> int:
        count[0] += 1
        if count[0] == 3:
            raise OSError(5, "Input/output error")
        return plain(handle, data[: max(1, len(data) // 3)], offset)  # short writes are gone on from

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OSError, match="Input/output"):
        durable.write_torch(tmp_path / "file.pt", TorchFile(torch.randn(100_000)), SMALL)
    assert torch.equal(torch.load(tmp_path / "file.pt", weights_only=True), torch.zeros(5))
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.pt"]


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    with (
        open("/dev/full", "wb", buffering=0) as full,
        pytest.raises(OSError, match="No space left"),
        direct.writer(full, 1, SMALL) as target,
    ):
        target.write(bytes(100_000))


def test_settings_of_the_writer_section() -> None:
    from deepspeed.runtime.model_checkpointing.config import CheckpointWriterConfig

    assert direct.writing_of(None).direct
    section = CheckpointWriterConfig(type="python", io_buffer_size=1 << 20, io_multiplier=3)
    assert direct.writing_of(section) == direct.Writing(False, 1 << 20, 6)
    assert direct.writing_of(CheckpointWriterConfig(io_buffer_double=False)) == direct.Writing(True, 64 << 20, 1)


# ---- the kept copy -------------------------------------------------------------------------------------------------


def test_a_copy_is_of_its_moment(tmp_path: Path) -> None:
    flat = torch.randn(1000)
    pack = Pack(torch.float32)
    for part in (flat[:300], flat[300:301], flat[500:], torch.randn(7), torch.randn(8, 6).t()):
        pack.add(part)
    cast = Pack(torch.bfloat16)
    cast.add(flat[:10])
    tied = torch.arange(12).view(3, 4)
    obj = {"pack": pack.whole(), "cast": cast.whole(), "tied": [tied, tied], "empty": torch.zeros(0), "number": 3}
    durable.write_torch(tmp_path / "before.pt", TorchFile(obj))
    content = TorchFile(obj)
    buffer = HostBuffer()
    room = buffer.room(content.room_nbytes)
    content.move_to(room)
    flat.zero_()
    tied.zero_()
    durable.write_torch(tmp_path / "after.pt", content)
    before, after = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("before", "after"))
    for key in ("pack", "cast", "empty"):
        assert torch.equal(before[key], after[key])
    assert after["tied"][0].data_ptr() == after["tied"][1].data_ptr()
    assert torch.equal(after["tied"][0], torch.arange(12).view(3, 4))


def test_the_buffer_is_kept_and_grows() -> None:
    buffer = HostBuffer()
    first = buffer.room(5000)
    assert first.numel() >= 5000
    assert first.data_ptr() % 4096 == 0
    assert buffer.room(100).data_ptr() == first.data_ptr()
    assert buffer.room(3 << 20).numel() >= 3 << 20
    buffer.release()
    assert buffer.nbytes == 0


def test_neighbours_are_copied_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    calls = []
    plain = ctypes.memmove
    monkeypatch.setattr(ctypes, "memmove", lambda *args: (calls.append(args[2]), plain(*args))[1])
    source, target = torch.arange(100.0), torch.zeros(100)
    copier = RunCopier()
    for start in (0, 10, 50):
        copier.add(target[start : start + 10], source[start : start + 10])
    copier.finish()
    assert calls == [80, 40]
    assert torch.equal(target[:20], source[:20])
    assert torch.equal(target[50:60], source[50:60])
    assert not target[20:50].any()
