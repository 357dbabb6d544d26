"""Marks on modules that stage 3 fetches whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

import deepspeed.utils
from deepspeed.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(Block(), nn.Sequential(nn.ReLU(), Block()), nn.Linear(1, 1))


def test_by_class_with_subclasses(model: nn.Sequential) -> None:
    assert set_z3_leaf_modules(model, [Block]) == [model[0], model[1][1]] == get_z3_leaf_modules(model)
    assert set_z3_leaf_modules(model, [nn.Linear]) == [model[0], model[1][1], model[2]]
    assert z3_leaf_module(model[2])
    assert not z3_leaf_module(model)


@pytest.mark.parametrize("name", ("ReLU", "torch.nn.modules.activation.ReLU"))
def test_by_class_name(model: nn.Sequential, name: str) -> None:
    assert set_z3_leaf_modules(model, [name]) == [model[1][0]]


def test_unset(model: nn.Sequential) -> None:
    set_z3_leaf_modules(model, [Block, nn.ReLU])
    assert unset_z3_leaf_modules(model, [Block]) == [model[0], model[1][1]]
    assert get_z3_leaf_modules(model) == [model[1][0]]


def test_class_without_a_module_is_an_error_naming_what_there_is(model: nn.Sequential) -> None:
    with pytest.raises(ValueError, match=r"no module of Sequential has class .*Tanh.*it has: Block, Linear, ReLU"):
        set_z3_leaf_modules(model, [nn.Tanh])
    assert set_z3_leaf_modules(model, [nn.Tanh], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="expected classes or class names, found 3"):
        set_z3_leaf_modules(model, [3])  # type: ignore[list-item]


def test_by_name(model: nn.Sequential) -> None:
    assert set_z3_leaf_modules_by_name(model, ["1.0", "x"], raise_if_not_found=False) == ([model[1][0]], ["x"])
    with pytest.raises(ValueError, match=r"has name \['x'\]; it has: 0, 1, 1.0"):
        set_z3_leaf_modules_by_name(model, ["1.0", "x"])
    assert set_z3_leaf_modules_by_name(model, ["1.0"], flag=False) == ([model[1][0]], [])
    assert get_z3_leaf_modules(model) == []


def test_by_suffix(model: nn.Sequential) -> None:
    assert set_z3_leaf_modules_by_suffix(model, ["1"]) == ([model[1], model[1][1]], [])
    with pytest.raises(ValueError, match="a name ending in"):
        set_z3_leaf_modules_by_suffix(model, ["experts"])


def test_one_module(model: nn.Sequential) -> None:
    set_z3_leaf_module(model, True)
    assert z3_leaf_module(model)
    set_z3_leaf_module(model, False)
    assert not z3_leaf_module(model)
    assert not z3_leaf_parameter(model[0].weight)


def section(**given: list[str]) -> SimpleNamespace:
    lists = {"classes": ["some.Default"], "names": [], "name_suffixes": []}
    return SimpleNamespace(**{**lists, **given}, model_fields_set=set(given))


def test_config_section(model: nn.Sequential, capsys: pytest.CaptureFixture[str]) -> None:
    assert apply_zero_leaf_module_config(model, None) == []
    found = apply_zero_leaf_module_config(model, section(classes=["Block"], names=["0", "2"], name_suffixes=["1.0"]))
    assert found == [model[0], model[1][1], model[2], model[1][0]]
    assert capsys.readouterr().out == ""


def test_config_entries_without_a_module_are_named_defaults_are_not(
    model: nn.Sequential, capsys: pytest.CaptureFixture[str]
) -> None:
    assert apply_zero_leaf_module_config(model, section(names=["nope"])) == []
    out = capsys.readouterr().out
    assert "zero_optimization.leaf_module.names: no module of the model matches ['nope']" in out
    assert "classes" not in out


def test_function_and_submodule_share_a_name() -> None:
    import deepspeed.utils.z3_leaf_module as by_import

    assert callable(deepspeed.utils.z3_leaf_module)
    assert by_import is deepspeed.utils.z3_leaf_module
