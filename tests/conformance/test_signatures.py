"""Whatever exists here under a name of the reference takes what it takes there: names, order, defaults of parameters.

`data/signatures.json` holds the reference's (`scripts/reference_signatures.py` made it), `signature_differences.toml`
the differences that are meant, each with its reason. Compared is every public name of every module that both have,
and every public member of every class: a name that starts to exist here is compared from then on by itself.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest

import deepspeed
from deepspeed.unbuilt import feature_of
from tests.conformance.signature_text import OPAQUE, default_text, differences, signature_text
from tests.conformance.test_client_imports import ATTRIBUTES
from tests.conformance.test_client_imports import ROWS as IMPORTS
from tests.harness.project import ROOT, read_toml

HERE = ROOT / "tests" / "conformance"
REFERENCE: dict[str, dict[str, Any]] = json.loads((HERE / "data" / "signatures.json").read_text())["modules"]
MEANT: list[dict[str, Any]] = read_toml(HERE / "signature_differences.toml")["meant"]
CONTRACT: dict[str, Any] = read_toml(HERE / "contract.toml")
ABSENT = object()


def row_at(path: str) -> tuple[str, Any]:
    """Where the reference defines what it has at `path`, and its row."""
    module, _, name = path.rpartition(".")
    row = REFERENCE.get(module, {}).get(name)
    return row_at(row[3:]) if isinstance(row, str) and row.startswith("-> ") else (path, row)


def ours_at(module: str, name: str) -> Any:
    """What is here at `module.name`, or ABSENT. `deepspeed.checkpointing` is an attribute, no module of that name."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return getattr(getattr(deepspeed, module.removeprefix("deepspeed."), None), name, ABSENT)


def members_of(home: str, row: dict[str, Any]) -> dict[str, str]:
    """The public members of a class of the reference, those of its bases included."""
    found: dict[str, str] = {}
    for path in (home, *row.get("bases", ())):
        for name, text in (row_at(path)[1] or {}).get("members", {}).items():
            found.setdefault(name, text)
    return found


def our_member(cls: type, name: str) -> Any:
    """The raw attribute of a class (`Nested.name` too), or ABSENT."""
    owner: Any = cls
    *nested, last = name.split(".")
    for part in nested:
        owner = getattr(owner, part, None)
    return ABSENT if owner is None else inspect.getattr_static(owner, last, ABSENT)


def compare_member(raw: Any, theirs: str) -> list[str]:
    if isinstance(raw, (staticmethod, classmethod)):
        return differences(signature_text(raw.__func__, bound=isinstance(raw, classmethod)), theirs)
    if theirs == "property" or not callable(raw):
        return [] if theirs == "property" and not inspect.isfunction(raw) else ["is a property on one side alone"]
    return differences(signature_text(raw, bound=inspect.isfunction(raw)), theirs)


def compare(ours: Any, home: str, row: Any) -> Iterator[tuple[str, str, list[str]]]:
    """(dotted name, what the reference says, what differs) for a function, or for a class and each of its members."""
    if isinstance(row, str) and row.startswith("= "):
        yield home, row, [] if default_text(ours) == row[2:] else [f"is {default_text(ours)}, wanted {row[2:]}"]
    elif isinstance(row, str):
        yield home, row, differences(signature_text(ours), row) if callable(ours) else ["cannot be called"]
    elif not inspect.isclass(ours):
        yield home, "class", ["is no class"]
    else:
        call = row.get("call", OPAQUE)  # sections are built from keys, which test_config_keys.py compares
        yield home, call, [] if call == OPAQUE else differences(signature_text(ours), call)
        for name, theirs in members_of(home, row).items():
            raw = our_member(ours, name)
            if raw is not ABSENT:
                yield f"{home}.{name}", theirs, compare_member(raw, theirs)


@cache
def compared() -> dict[str, tuple[str, list[str]]]:
    """Dotted name -> (what the reference says, what differs), for all that both have."""
    found: dict[str, tuple[str, list[str]]] = {}
    seen: set[tuple[int, str]] = set()
    for module, rows in REFERENCE.items():
        if feature_of(module) is not None:
            continue
        for name in rows:
            ours = ours_at(module, name)
            home, row = row_at(f"{module}.{name}")
            if ours is ABSENT or row is None or (id(ours), home) in seen:
                continue
            seen.add((id(ours), home))
            for path, theirs, problems in compare(ours, home, row):
                before = found.get(path, ("", []))[1]
                found[path] = (theirs, before + [text for text in problems if text not in before])
    return found


def reason(path: str, problems: list[str]) -> str | None:
    """Why the differences at `path` are meant, or None."""
    for meant in MEANT:
        fits = any(fnmatchcase(path, pattern) for pattern in meant["names"])
        if fits and ("construction" in meant["differences"] or set(problems) <= set(meant["differences"])):
            return str(meant["reason"])
    return None


def test_every_signature() -> None:
    found = compared()
    meant = {path for path, (_, problems) in found.items() if problems and reason(path, problems)}
    opaque = sum(theirs == OPAQUE for theirs, _ in found.values())
    print(f"{len(found)} names compared ({opaque} say nothing in the reference), {len(meant)} meant differences")
    assert {path: problems for path, (_, problems) in found.items() if problems and path not in meant} == {}
    assert len(found) - opaque > 1400


def test_meant_differences_are_there() -> None:
    """A row whose difference is gone is dropped."""
    differing = [path for path, (_, problems) in compared().items() if problems]
    unused = [
        pattern
        for meant in MEANT
        for pattern in meant["names"]
        if not any(fnmatchcase(path, pattern) for path in differing)
    ]
    assert unused == []


def client_names() -> set[tuple[str, str]]:
    """(module, name) of what the contract says works and of what clients import."""
    names = {(module, name) for module, found in CONTRACT["works"].items() for name in found}
    for _, line in IMPORTS:
        for node in ast.walk(ast.parse(line.removeprefix("-"))):
            if isinstance(node, ast.ImportFrom):
                names |= {(str(node.module), alias.name) for alias in node.names}
    for path in ATTRIBUTES.split():
        module, _, name = f"deepspeed.{path.removeprefix('-')}".rpartition(".")
        names.add((module, name))
    return names


def test_every_name_of_clients_is_compared() -> None:
    """What can be called and is in no row of the reference's is a name of ours alone, and listed as such."""
    alone = CONTRACT["ours_alone"]
    missing = []
    for module, name in sorted(client_names()):
        known = row_at(f"{module}.{name}")[1] is not None
        if not known and callable(ours_at(module, name)) and name not in alone.get(module, []):
            missing.append(f"{module}.{name}")
    engine = "deepspeed.runtime.engine.DeepSpeedEngine"
    found = compared()
    for name in CONTRACT["engine"]["works"]:
        if f"{engine}.{name}" not in found and name not in alone[engine]:
            missing.append(f"{engine}.{name}")
    assert missing == []


@pytest.mark.parametrize(
    ("ours", "theirs", "problems"),
    (
        ("(a, b=2)", "(a, b=2)", []),
        ("(a, b=2, c=3, *, d=4)", "(a, b=2)", []),
        ("(a=1)", "(a)", []),
        ("(a=None)", "(a={})", []),
        ("(a=('x', 'y'))", "(a=['x', 'y'])", []),
        ("(a=('x',))", "(a=['x', 'y'])", ["a defaults to ('x',), wanted ['x', 'y']"]),
        ("(a, b=3)", "(a, b=2)", ["b defaults to 3, wanted 2"]),
        ("(a, b)", "(a, b=2)", ["b defaults to nothing, wanted 2"]),
        ("(b, a)", "(a, b)", ["parameter 0 is b, wanted a", "parameter 1 is a, wanted b"]),
        ("(a, *, b=2)", "(a, b=2)", ["takes b by keyword alone"]),
        ("(a, **rest)", "(a, b=2)", ["takes b by keyword alone"]),
        ("(a)", "(a, b=2)", ["takes no b"]),
        ("(a, b)", "(a)", ["needs b"]),
        ("(a, *, b)", "(a)", ["needs b"]),
        ("(a)", "(a, *rest, **more)", ["takes no further positions", "takes no further keywords"]),
        ("(op=ReduceOp.MAX)", "(op=ReduceOp.SUM)", ["op defaults to ReduceOp.MAX, wanted ReduceOp.SUM"]),
        ("(a)", OPAQUE, []),
    ),
)
def test_differences_are_found(ours: str, theirs: str, problems: list[str]) -> None:
    assert differences(ours, theirs) == problems
