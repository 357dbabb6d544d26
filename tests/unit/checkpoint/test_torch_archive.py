"""Torch files read and written without torch hold what torch reads and writes; the rest is left to torch."""

from __future__ import annotations

import collections
import copy
import functools
import io
import os
import pathlib
import pickle
import struct
import threading
import types
import zipfile
import zlib
from typing import Any

import pytest
import torch

from deepspeed.checkpoint import trusted
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.universal.sums import SourceSums
from deepspeed.utils import torch_file
from deepspeed.utils.torch_archive import archive, bridge, load, packs, tensors
from deepspeed.utils.torch_archive.cast import cast
from deepspeed.utils.torch_archive.save import PlainFile
from deepspeed.utils.torch_archive.tensors import DTYPES, PlainTensor, Size, scalar, zeros
from tests.unit.checkpoint.test_torch_file import check_equal, many_kinds

ONLY_TORCHS = ("sparse",)  # kinds that a plain tensor is not


def plain(path: pathlib.Path) -> Any:
    return load.load(path, trusted.table().find_plain)


def write(obj: Any, path: pathlib.Path, kind: Any = torch_file.TorchFile) -> bytes:
    with open(path, "wb") as file:
        kind(obj).write(file)
    return path.read_bytes()


def content() -> dict[str, Any]:
    found = many_kinds()
    return {key: value for key, value in found.items() if key not in ONLY_TORCHS}


@pytest.mark.parametrize("writer", ("torch", "ours"))
def test_every_kind_goes_through_unchanged(tmp_path: pathlib.Path, writer: str) -> None:
    right, path = content(), tmp_path / "file.pt"
    right["grad"] = torch.ones(3, requires_grad=True)
    right["plain"] = {"a": (1, 2.5, True, None, "text", 3 + 1j), 4: [b"bytes"]}
    del right["conjugated"]  # torch's own writer marks it, see below
    if writer == "ours":
        write(right, path)
    else:
        torch.save(right, path)
    found = plain(path)
    check_equal(bridge.to_torch(found), right)
    again = write(found, tmp_path / "again.pt", PlainFile)
    if writer == "ours":
        assert again == path.read_bytes()
    assert zipfile.ZipFile(tmp_path / "again.pt").testzip() is None
    for mmap in (False, True):
        read = torch.load(tmp_path / "again.pt", weights_only=True, mmap=mmap)
        check_equal(read, right)
        assert read["grad"].requires_grad


def test_wide_archives_are_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_ZIP64_LIMIT", 30)
    monkeypatch.setattr(archive, "_ZIP64_COUNT", 3)
    monkeypatch.setattr(archive, "_SMALL_NBYTES", 8)
    right = content()
    write(right, tmp_path / "file.pt")
    check_equal(bridge.to_torch(plain(tmp_path / "file.pt")), right)


def test_what_is_no_plain_tensor_is_read_and_written_by_torch(tmp_path: pathlib.Path) -> None:
    from deepspeed.checkpoint.universal.write import _pickled

    right, path = {**many_kinds(), "grid": torch.ones(3)}, tmp_path / "file.pt"
    for save in (write, torch.save):
        save(right, path)
        with pytest.raises(load.NeedsTorch):
            plain(path)
        found = trusted.load_plain(path)
        assert isinstance(found["grid"], PlainTensor)
        check_equal(bridge.to_torch(found), right)
        write(found, tmp_path / "again.pt", _pickled)
        check_equal(torch.load(tmp_path / "again.pt", weights_only=True), right)
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert bytes(trusted.load_plain(path)["w"].bytes()) == struct.pack("=2f", 1, 1)


def test_views_answer_as_torchs_do(tmp_path: pathlib.Path) -> None:
    flat = torch.arange(24, dtype=torch.int32)
    torch.save(
        {"m": flat.view(4, 6), "t": flat.view(4, 6).t(), "s": flat[::3], "z": torch.tensor(1.5).bfloat16()},
        tmp_path / "f",
    )
    found = plain(tmp_path / "f")
    right = torch.load(tmp_path / "f", weights_only=True)
    for key in ("m", "t", "s"):
        one, other = found[key], right[key]
        assert (one.shape, one.stride(), one.dim(), one.numel()) == (
            other.shape,
            other.stride(),
            other.dim(),
            other.numel(),
        )
        assert one.is_contiguous() == other.is_contiguous()
        check_equal(bridge.tensor_to_torch(one), other.contiguous())
        check_equal(bridge.tensor_to_torch(one.reshape(-1)), other.reshape(-1))
        check_equal(bridge.tensor_to_torch(one[1:3]), other[1:3].contiguous())
        check_equal(bridge.tensor_to_torch(one[-1]), other[-1].contiguous())
    assert found["m"].data_ptr() == found["t"].data_ptr()
    assert found["m"][1].data_ptr() - found["m"].data_ptr() == 24
    assert (float(found["z"]), int(found["m"].reshape(-1)[7]), len(found["m"])) == (1.5, 7, 4)
    with pytest.raises(ValueError, match="elements 2 to 5"):
        found["m"].narrow(0, 2, 3)
    with pytest.raises(ValueError, match="cannot take the shape"):
        found["m"].reshape(5, 5)
    with pytest.raises(ValueError, match="is not one number"):
        found["m"].item()
    assert copy.deepcopy(found)["m"] is found["m"]
    assert repr(found["m"]) == repr(found["m"].reshape(24).reshape(4, 6))
    assert repr(found["m"]) != repr(found["t"].reshape(4, 6))
    assert (repr(scalar(2.0)), repr(Size((2, 3))), Size((2, 3)).numel()) == (
        "tensor(2.0, shape=(), dtype=torch.float32)", "torch.Size([2, 3])", 6
    )  # fmt: skip
    assert tensors.is_tensor(found["m"])
    assert tensors.is_tensor(flat)
    assert not tensors.is_tensor([1])


BITS16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
FLOATS = {
    "float16": BITS16.view(torch.float16),
    "bfloat16": BITS16.view(torch.bfloat16),
    "float32": torch.cat(
        [
            (torch.randn(5000) * 10.0 ** torch.randint(-44, 39, (5000,))).float(),
            BITS16.view(torch.bfloat16).float(),
            torch.tensor([3.3895e38, 65519.996, 65520.0, 2.0**-25, 1.5 * 2.0**-25]),
        ]
    ),
    "float64": torch.randn(3000, dtype=torch.float64) * 10.0 ** torch.randint(-300, 300, (3000,)),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("target", ("float32", "float16", "bfloat16", "float8_e4m3fn"))
def test_casts_are_torchs(name: str, target: str) -> None:
    source, dtype = FLOATS[name], getattr(torch, target)
    right = source.to(dtype)
    made = PlainTensor(cast(bridge.tensor_from_torch(source), DTYPES[target]), DTYPES[target], source.shape)
    found = bridge.tensor_to_torch(made)
    nan = right.float().isnan()
    assert torch.equal(found.float().isnan(), nan)
    assert torch.equal(found[~nan].view(torch.uint8), right[~nan].view(torch.uint8))


def test_parts_are_cast_while_they_are_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "_PIECE_NBYTES", 64)
    source = torch.randn(100).bfloat16()
    pack = packs.Pack(DTYPES["float32"])
    pack.add(bridge.tensor_from_torch(source))
    write(pack.whole(), tmp_path / "f", PlainFile)
    assert torch.equal(torch.load(tmp_path / "f", weights_only=True), source.float())


# ---- nothing of a file is believed ---------------------------------------------------------------------------------


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("attacked",))


class Claim:
    """A tensor that says it lies where its storage is not."""

    def __init__(self, *where: Any) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        storage = packs.StorageReference(self.pack)
        return torch._utils._rebuild_tensor_v2, (storage, *self.where, False, {})

    pack: Any = None


CLAIMS = {"beyond": (0, (9,), (1,)), "before": (-4, (4,), (1,)), "backwards": (3, (4,), (-1,)), "far": (7, (2,), (1,))}


@pytest.mark.parametrize("how", CLAIMS)
def test_a_tensor_lies_in_its_storage(tmp_path: pathlib.Path, how: str) -> None:
    pack = packs.Pack(torch.float32)
    pack.add(torch.ones(8))
    claim = Claim(*CLAIMS[how])
    claim.pack = pack
    write({"w": claim}, tmp_path / "f.pt")
    with pytest.raises(CheckpointError, match=r"f\.pt cannot be read.*(does not lie in|is none)"):
        trusted.load_plain(tmp_path / "f.pt")


def test_no_code_of_a_file_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write({"w": torch.ones(2), "evil": Attack()}, tmp_path / "f.pt")
    found = trusted.load_plain(tmp_path / "f.pt")
    assert trusted.untrusted_paths(found) == [f"{os.mkdir.__module__}.mkdir"]
    assert not (tmp_path / "attacked").exists()
    with pytest.raises(pickle.PicklingError):
        PlainFile(found)


def test_torn_files_are_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "f.pt"
    with pytest.raises(CheckpointError, match=r"f\.pt is missing"):
        trusted.load_plain(path)
    raw = write({"w": torch.ones(20_000)}, path)
    assert len(raw) > archive._SMALL_NBYTES
    flipped = raw.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_vx")
    for bad in (b"", b"hello " * 50, raw[: len(raw) // 2], raw[:-1], flipped, b"PK" + raw[2:5]):
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"f\.pt cannot be read, it is torn or not a checkpoint file"):
            trusted.load_plain(path)


def test_compressed_archives_are_refused(tmp_path: pathlib.Path) -> None:
    with zipfile.ZipFile(tmp_path / "f.pt", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", pickle.dumps({}) * 100)
    with pytest.raises(CheckpointError, match="compressed"):
        trusted.load_plain(tmp_path / "f.pt")


# ---- checksums -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("small", (1, 1 << 16))
def test_the_sum_of_a_file_is_made_of_its_pieces(
    tmp_path: pathlib.Path, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "_SMALL_NBYTES", small)
    monkeypatch.setattr(packs, "_PIECE_NBYTES", 512)
    source = tmp_path / "source.pt"
    raw = write({"a": torch.randn(1000), "unused": torch.randn(50), "b": torch.randn(300)}, source)
    found, sums = plain(source), SourceSums()
    for part in (found["a"][100:900], found["b"], found["a"][100:300], zeros((3,))):
        pack = packs.Pack(DTYPES["float32"])
        pack.add(part)
        PlainFile(pack.whole()).write(io.BytesIO(), sums.seen)
    assert sums.of_file(source) == zlib.crc32(raw)
    PlainFile(found["a"][900:]).write(io.BytesIO(), lambda data, where, crc: sums.seen(data, where, crc ^ 1))
    assert sums.of_file(source) != zlib.crc32(raw)
    (tmp_path / "other").write_bytes(b"untouched")
    assert sums.of_file(tmp_path / "other") == zlib.crc32(b"untouched")


def test_containers_keep_their_class_on_the_way_through_torch(tmp_path: pathlib.Path) -> None:
    """A sparse tensor makes the file torch's to read; what lies beside it is the same afterwards."""
    from deepspeed.checkpoint.universal.write import _pickled

    right = {
        "sparse": torch.eye(2).to_sparse(),
        "counter": collections.Counter("aab"),
        "default": collections.defaultdict(list, {"a": [torch.ones(1)]}),
        "last": collections.deque([torch.ones(2)], maxlen=3),
        "space": types.SimpleNamespace(weight=torch.ones(2), kinds={torch.float16}),
        "ordered": collections.OrderedDict(b=torch.ones(2), a=frozenset({torch.bool, torch.Size([2])})),
    }
    torch.save(right, tmp_path / "file.pt")
    found = trusted.load_plain(tmp_path / "file.pt")
    assert isinstance(found["space"].weight, PlainTensor)
    assert isinstance(found["last"][0], PlainTensor)
    write(found, tmp_path / "again.pt", _pickled)
    again = trusted.load_file(tmp_path / "again.pt")
    assert (again["counter"], again["default"].default_factory, again["last"].maxlen) == (right["counter"], list, 3)
    assert torch.equal(again["last"][0], torch.ones(2))
    assert torch.equal(again["default"]["a"][0], torch.ones(1))
    assert torch.equal(again["space"].weight, torch.ones(2))
    assert again["space"].kinds == {torch.float16}
    assert list(again["ordered"]) == ["b", "a"]
    assert again["ordered"]["a"] == right["ordered"]["a"]  # type: ignore[index]


@pytest.mark.filterwarnings("ignore")  # torch warns of half of these kinds
def test_rare_tensors_and_storages(tmp_path: pathlib.Path) -> None:
    from deepspeed.checkpoint.universal.write import _pickled

    right = {
        "one of many": torch.arange(8.0)[::2][1:2],  # one element with a stride
        "negated": torch.tensor([1 + 2j]).conj().imag,
        "half complex": torch.zeros(2, dtype=torch.complex32),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "bits": torch.empty(2, dtype=torch.bits8),
    }
    for key in right:
        write({key: right[key]}, tmp_path / "file.pt")
        write(trusted.load_plain(tmp_path / "file.pt"), tmp_path / "again.pt", _pickled)
        again = torch.load(tmp_path / "again.pt", weights_only=True)[key]
        assert (again.dtype, again.shape) == (right[key].dtype, right[key].shape), key
        if key != "bits":
            assert str(again) == str(right[key]), key
    torch.save({"storage": torch.arange(3).storage()}, tmp_path / "file.pt")
    write(trusted.load_plain(tmp_path / "file.pt"), tmp_path / "again.pt", _pickled)
    assert list(torch.load(tmp_path / "again.pt", weights_only=True)["storage"]) == [0, 1, 2]
    torch.save(
        {"nested": torch.nested.nested_tensor([torch.ones(2)]), "meta": torch.empty(2, device="meta")}, tmp_path / "f"
    )
    assert trusted.load_plain(tmp_path / "f")["meta"].is_meta


def test_what_has_not_begun_is_dropped_at_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.checkpoint.universal import write as universal

    begun, held = [], threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        held.wait(20)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        threading.Timer(0.2, held.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(universal, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        universal.run_together([functools.partial(work, number) for number in range(50)], 2)
    assert len(begun) <= 2


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_of_one_name_are_refused(tmp_path: pathlib.Path) -> None:
    """torch takes the first, other readers the last."""
    torch.save({"w": torch.ones(4)}, tmp_path / "file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt", "a") as file:
        file.writestr("file/data/0", bytes(16))
    with pytest.raises(CheckpointError, match=r"file\.pt cannot be read.*two of its records are named file/data/0"):
        trusted.load_plain(tmp_path / "file.pt")
