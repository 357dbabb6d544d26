"""Files written tensor by tensor are what torch.load reads, and their checksum is that of their bytes."""

from __future__ import annotations

import io
import os
import pathlib
import zipfile
import zlib
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.utils import torch_file
from deepspeed.utils.crc32 import join_crc32
from deepspeed.utils.torch_archive import archive, packs


def written(obj: Any, path: pathlib.Path) -> torch_file.Written:
    with open(path, "wb") as file:
        result = torch_file.save(obj, file)
    raw = path.read_bytes()
    assert (len(raw), zlib.crc32(raw)) == (result.nbytes, result.crc32)
    return result


def many_kinds() -> dict[str, Any]:
    base = torch.randn(6, 4)
    return {
        "view": base[2],
        "transposed": base.t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "ints": torch.arange(5, dtype=torch.int16),
        "flags": torch.tensor([True, False]),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "half": torch.randn(5).half(),
        "brain": torch.randn(5).bfloat16(),
        "eighth": torch.ones(5).to(torch.float8_e4m3fn),
        "unsigned": torch.ones(3, dtype=torch.uint16),
        "parameter": torch.nn.Parameter(base[:2]),
        "sparse": torch.eye(3).to_sparse(),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "nested": OrderedDict(a=[1, (2.5, None)], b={"c": base[0]}),
    }


def check_equal(found: Any, right: Any) -> None:
    if isinstance(right, torch.Tensor):
        assert (found.dtype, found.shape, type(found)) == (right.dtype, right.shape, type(right))
        if right.is_sparse:
            found, right = found.to_dense(), right.to_dense()
        bits = [t.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (found, right) if t.numel()]
        assert not bits or torch.equal(*bits)
    elif isinstance(right, dict):
        assert list(found) == list(right)
        for key in right:
            check_equal(found[key], right[key])
    elif isinstance(right, (list, tuple)):
        assert type(found) is type(right)
        for a, b in zip(found, right, strict=True):
            check_equal(a, b)
    else:
        assert found == right


@pytest.mark.parametrize("mmap", (True, False))
@pytest.mark.parametrize("limit", (0xFFFFFFFF, 30))  # 30: every field takes its 64-bit form
def test_every_kind_of_tensor_comes_back(
    tmp_path: pathlib.Path, mmap: bool, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "_ZIP64_LIMIT", limit)
    if limit == 30:
        monkeypatch.setattr(archive, "_SMALL_NBYTES", 8)
    path = tmp_path / "file.pt"
    content = many_kinds()
    written(content, path)
    assert zipfile.ZipFile(path).testzip() is None
    check_equal(torch.load(path, weights_only=True, mmap=mmap), content)


def test_only_the_elements_of_a_view_are_written(tmp_path: pathlib.Path) -> None:
    flat = torch.randn(1 << 16)
    size = written({"a": flat[:10], "b": flat[20:30]}, tmp_path / "file.pt").nbytes
    assert size < 4096


def test_tied_tensors_share_one_storage(tmp_path: pathlib.Path) -> None:
    weight = torch.randn(1000)
    size = written({"a": weight, "b": weight.view(1000), "other": weight[:500]}, tmp_path / "file.pt").nbytes
    assert size < 6000 + 2048
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert found["other"].data_ptr() != found["a"].data_ptr()


def test_empty_tensors_are_not_taken_for_one_another(tmp_path: pathlib.Path) -> None:
    written({"a": torch.empty(0, 2), "b": torch.empty(0, 2)}, tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    assert found["a"].shape == found["b"].shape == (0, 2)


def test_a_pack_is_one_storage_of_many_parts(tmp_path: pathlib.Path) -> None:
    parts = [torch.randn(3, 2), torch.tensor(7.0), torch.randn(5)[::2]]
    pack = torch_file.Pack(torch.float32)
    slices = [pack.add(part) for part in parts]
    written({"slices": slices, "whole": pack.whole()}, tmp_path / "file.pt")
    assert sum("/data/" in name for name in zipfile.ZipFile(tmp_path / "file.pt").namelist()) == 1
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    for got, part in zip(found["slices"], parts, strict=True):
        assert torch.equal(got, part)
    assert torch.equal(found["whole"], torch.cat([part.reshape(-1) for part in parts]))


def test_parts_are_cast_to_the_dtype_of_the_pack(tmp_path: pathlib.Path) -> None:
    source = torch.randn(100)
    pack = torch_file.Pack(torch.bfloat16)
    pack.add(source)
    written(pack.whole(), tmp_path / "file.pt")
    assert torch.equal(torch.load(tmp_path / "file.pt", weights_only=True), source.bfloat16())


def test_an_empty_pack(tmp_path: pathlib.Path) -> None:
    written(torch_file.Pack(torch.float32).whole(), tmp_path / "file.pt")
    assert torch.load(tmp_path / "file.pt", weights_only=True).shape == (0,)


def test_parts_longer_than_a_piece(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "_PIECE_NBYTES", 64)
    monkeypatch.setattr(archive, "_SMALL_NBYTES", 8)
    source = torch.randn(1001)
    written(source, tmp_path / "file.pt")
    assert torch.equal(torch.load(tmp_path / "file.pt", weights_only=True), source)


def test_more_records_than_a_plain_archive_can_count(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_ZIP64_COUNT", 3)
    content = [torch.tensor([float(i)]) for i in range(5)]
    written(content, tmp_path / "file.pt")
    check_equal(torch.load(tmp_path / "file.pt", weights_only=True), content)


def test_data_is_aligned_for_mapping(tmp_path: pathlib.Path) -> None:
    written([torch.ones(1, dtype=torch.uint8), torch.ones(3, dtype=torch.float64)], tmp_path / "file.pt")
    for tensor in torch.load(tmp_path / "file.pt", weights_only=True, mmap=True):
        assert tensor.data_ptr() % 64 == 0


def test_nothing_is_written_for_an_object_that_cannot_be_pickled() -> None:
    with pytest.raises((AttributeError, TypeError)):
        torch_file.TorchFile({"bad": lambda: None})


def test_the_announced_size_is_that_of_the_tensors() -> None:
    made = torch_file.TorchFile({"a": torch.ones(1000)})
    buffer = io.BytesIO()
    assert made.nbytes <= made.write(buffer).nbytes <= made.nbytes + 2048


@settings(deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_of_parts_give_the_checksum_of_the_whole(first: bytes, second: bytes) -> None:
    joined = join_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)


def test_joining_checksums_of_long_runs() -> None:
    second = os.urandom(3) + bytes(10_000_000)
    assert join_crc32(zlib.crc32(b"x"), zlib.crc32(second), len(second)) == zlib.crc32(b"x" + second)
