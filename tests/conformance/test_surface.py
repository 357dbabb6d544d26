"""The public surface is frozen: `contract.toml` says what clients import and use, and what does not exist yet."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.harness.project import ROOT, read_toml

CONTRACT: dict[str, dict[str, list[str]]] = read_toml(ROOT / "tests" / "conformance" / "contract.toml")


def _pairs(part: str) -> list[tuple[str, str]]:
    return [(module, name) for module, names in CONTRACT[part].items() for name in names]


def _lookup(module: str, name: str) -> Any:
    """`from module import name`, which also finds sub-modules."""
    found = importlib.import_module(module)
    try:
        return getattr(found, name)
    except AttributeError:
        return importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize(("module", "name"), _pairs("works"), ids=lambda value: str(value))
def test_name_exists(module: str, name: str) -> None:
    assert _lookup(module, name) is not None


@pytest.mark.parametrize(("module", "name"), _pairs("planned"), ids=lambda value: str(value))
def test_planned_name_does_not_pretend_to_exist(module: str, name: str) -> None:
    """When this fails, the name works: move it to `works` in contract.toml."""
    with pytest.raises((ImportError, AttributeError, NotImplementedError)):
        _lookup(module, name)


def test_engine_members() -> None:
    from deepspeed import DeepSpeedEngine

    assert [name for name in CONTRACT["engine"]["works"] if not hasattr(DeepSpeedEngine, name)] == []
    assert [name for name in CONTRACT["engine"]["planned"] if hasattr(DeepSpeedEngine, name)] == []


def test_lists_hold_no_duplicates() -> None:
    pairs = _pairs("works") + _pairs("planned")
    assert len(pairs) == len(set(pairs))
