"""Reading runs no code: plain data comes back, anything else is an inert object that remembers what it was."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import os
import pathlib
import types
import uuid
from typing import Any

import numpy
import pytest
import torch

from deepspeed.checkpoint import trusted
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.utils import torch_file

HARMLESS: dict[str, Any] = {
    "number": numpy.float64(1.5),
    "flag": numpy.bool_(True),
    "path": pathlib.Path("x/y"),
    "arguments": argparse.Namespace(k=1),
    "simple": types.SimpleNamespace(a=[2]),
    "dtype": torch.bfloat16,
    "queue": collections.deque([1, 2], maxlen=3),
    "counts": collections.Counter("aab"),
    "lists": collections.defaultdict(list, {1: [2]}),
    "when": datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc),
    "exact": decimal.Decimal("1.50"),
    "id": uuid.UUID(int=5),
    "set": {1, 2},
    "frozen": frozenset([3]),
    "bytes": b"\x00\xff",
    "range": range(3),
    "nothing": None,
}


class Custom:
    def __init__(self) -> None:
        self.value = 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("attacked",))


@pytest.fixture
def path(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "file.pt"


def save(content: Any, path: pathlib.Path) -> None:
    with open(path, "wb") as file:
        torch_file.save(content, file)


@pytest.mark.parametrize("key", HARMLESS)
def test_harmless_values_come_back(path: pathlib.Path, key: str) -> None:
    save({key: HARMLESS[key]}, path)
    found = trusted.load_file(path)[key]
    assert found == HARMLESS[key]
    assert type(found) is type(HARMLESS[key])


def test_arrays_come_back(path: pathlib.Path) -> None:
    save({"a": numpy.arange(6).reshape(2, 3), "t": numpy.array(["x", "yy"])}, path)
    found = trusted.load_file(path)
    assert numpy.array_equal(found["a"], numpy.arange(6).reshape(2, 3))
    assert found["t"].tolist() == ["x", "yy"]


def test_other_classes_are_inert_and_leave_tensors_readable(path: pathlib.Path) -> None:
    save({"weight": torch.arange(3.0), "mine": [Custom()], "evil": Attack(), "plain": 1}, path)
    found = trusted.load_file(path)
    assert not pathlib.Path("attacked").exists()
    assert torch.equal(found["weight"], torch.arange(3.0))
    assert found["plain"] == 1
    asked = trusted.untrusted_paths(found)
    assert sorted(asked) == sorted([f"{Custom.__module__}.Custom", f"{os.mkdir.__module__}.mkdir"])


def test_classes_the_user_registered_are_made(path: pathlib.Path) -> None:
    save({"mine": Custom()}, path)
    before = set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([Custom]):
        assert trusted.load_file(path)["mine"] == Custom()
        assert set(torch.serialization.get_safe_globals()) == before | {Custom}
    assert trusted.untrusted_paths(trusted.load_file(path))
    assert set(torch.serialization.get_safe_globals()) == before


def test_old_class_paths_become_data(path: pathlib.Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.utils.tensor_fragment import fragment_address

    scaler = DynamicLossScaler(2.0**8, 100, 1.0, 2, False)
    torch.save({"scaler": scaler, "where": fragment_address(numel=5, start=3)}, path)
    found = trusted.load_file(path)
    assert found["scaler"].cur_scale == 2.0**8
    assert found["where"].start == 3
    assert isinstance(found["scaler"], trusted.PlainObject)
    assert trusted.untrusted_paths(found) == []


def test_what_a_load_would_ask_for_is_known_before_saving() -> None:
    def pickled(value: Any) -> bytes:
        return torch_file.TorchFile(value).pickled

    assert trusted.foreign_classes({"t": torch.ones(2), **HARMLESS}, pickled) == []
    assert trusted.foreign_classes([{"x": Custom()}, torch.nn.Parameter(torch.ones(1))], pickled) == [
        f"{Custom.__module__}.Custom"
    ]


def test_files_that_are_no_archives_are_read(path: pathlib.Path) -> None:
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(trusted.load_file(path)["w"], torch.ones(2))


def test_missing_torn_and_foreign_files_are_named(path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"file\.pt is missing"):
        trusted.load_file(path)
    save({"w": torch.ones(1000)}, path)
    raw = path.read_bytes()
    for bad in (b"", b"hello " * 50, raw[: len(raw) // 2], raw[:-1]):
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"file\.pt cannot be read"):
            trusted.load_file(path)


def test_tensors_are_mapped(path: pathlib.Path) -> None:
    save({"w": torch.zeros(4)}, path)
    found = trusted.load_file(path)["w"]
    found += 1  # in memory only
    assert torch.equal(trusted.load_file(path)["w"], torch.zeros(4))
