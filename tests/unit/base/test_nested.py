"""Values with tensors somewhere inside."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from deepspeed.runtime.utils import compare_tensors_in_structures, copy_to_device, move_to_device


class Pair(NamedTuple):
    a: Any
    b: Any


class Output(dict):
    """A dict that carries something beside its items."""

    note = "none"


def test_move_keeps_structure_and_other_objects() -> None:
    marker = object()
    value = {
        "list": [torch.ones(1), None, 3],
        "pair": Pair(torch.ones(2), "text"),
        "tuple": (torch.ones(1),),
        5: marker,
    }
    moved = move_to_device(value, "meta")
    assert moved["list"][0].device.type == moved["pair"].a.device.type == moved["tuple"][0].device.type == "meta"
    assert moved["list"][1:] == [None, 3]
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].b == "text"
    assert isinstance(moved["tuple"], tuple)
    assert moved[5] is marker
    assert value["list"][0].device.type == "cpu"


def test_move_keeps_dict_classes_and_their_extras() -> None:
    output = Output(x=torch.ones(1))
    output.note = "kept"
    moved = move_to_device(output, "meta")
    assert type(moved) is Output
    assert moved.note == "kept"
    ordered = move_to_device(collections.OrderedDict(b=torch.ones(1), a=1), "meta")
    assert list(ordered) == ["b", "a"]
    default = move_to_device(collections.defaultdict(list, k=torch.ones(1)), "meta")
    assert default["new"] == []


def test_move_of_objects_that_move_themselves() -> None:
    packed = move_to_device({"x": [pack_sequence([torch.ones(3, 1)])]}, torch.float64)["x"][0]
    assert packed.data.dtype == torch.float64  # `to` takes a dtype too, and the batch sizes may not leave the host
    assert move_to_device(nn.Linear(1, 1), "meta").weight.device.type == "meta"
    assert move_to_device(torch.Tensor, "meta") is torch.Tensor  # the class, not a tensor


def test_criterion_chooses() -> None:
    a, b = torch.ones(1), torch.ones(2)
    moved = move_to_device({"a": a, "b": [b]}, "meta", lambda tensor: tensor.numel() == 2)
    assert moved["a"] is a
    assert moved["b"][0].device.type == "meta"
    assert move_to_device(a, "meta", lambda tensor: False) is a


def test_copy_copies_chosen_tensors_even_in_place() -> None:
    a, b = torch.ones(1), torch.ones(2)
    copied = copy_to_device([a, (b, "x")], "cpu", lambda tensor: tensor.numel() == 2)
    assert copied[0] is a
    assert copied[1][0] is not b
    assert copied[1][0].data_ptr() != b.data_ptr()
    assert copied[1][1] == "x"
    single = copy_to_device(b, "cpu", lambda tensor: True)
    assert torch.equal(single, b)
    assert single.data_ptr() != b.data_ptr()


ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    (
        ([ONE], [torch.ones(2)], True),
        ([ONE], [torch.ones(2) + 1e-6], False),
        ([ONE], [torch.ones(2, dtype=torch.float64)], False),
        ([ONE], (ONE,), False),
        ([ONE], [ONE, ONE], False),
        ({"a": ONE, "b": [1, None]}, {"b": [1, None], "a": torch.ones(2)}, True),
        ({"a": ONE}, {"b": ONE}, False),
        ({"a": ONE}, {"a": torch.zeros(2)}, False),
        ([1], [2], False),
        ([ONE], [1], False),
    ),
)
def test_compare(first: Any, second: Any, equal: bool) -> None:
    assert compare_tensors_in_structures(first, second) is equal
