"""The public surface is frozen: `contract.toml` says what clients import and use, and what does not exist yet.

What each name takes is compared with the reference in `test_signatures.py`.
"""

from __future__ import annotations

import importlib
import json
import operator
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.unbuilt import UNBUILT, attribute_or_submodule, feature_of
from tests.harness.project import ROOT, read_toml

CONTRACT: dict[str, Any] = read_toml(ROOT / "tests" / "conformance" / "contract.toml")
WORKS: dict[str, list[str]] = CONTRACT["works"]
PLANNED: dict[str, list[str]] = CONTRACT["planned"]


def _module(name: str) -> Any:
    """The module `name`; `deepspeed.zero` is an attribute of the package and no module of its own."""
    return deepspeed.zero if name == "deepspeed.zero" else importlib.import_module(name)


def _lookup(module: str, name: str) -> Any:
    """`from module import name`, which also finds sub-modules."""
    found = _module(module)
    try:
        return getattr(found, name)
    except AttributeError:
        return importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize("module", WORKS)
def test_names_exist(module: str) -> None:
    for name in WORKS[module]:
        assert _lookup(module, name) is not None


@pytest.mark.parametrize("module", PLANNED)
def test_planned_names_are_refused_by_feature(module: str) -> None:
    """When this fails because a name exists, it works: move it to `works` in contract.toml."""
    for name in PLANNED[module]:
        with pytest.raises(ImportError, match="is not built yet in deepspeed"):
            exec(f"from {module} import {name}", {})


@pytest.mark.parametrize("name", UNBUILT)
def test_unbuilt_rows_name_nothing_that_exists(name: str) -> None:
    """When this fails, the feature is there: drop its row from `deepspeed/unbuilt.py`."""
    assert not hasattr(deepspeed, name.split(".")[0]) or "." in name
    with pytest.raises((ImportError, AttributeError), match=f"{name.split('.')[0]}.*is not built yet in deepspeed"):
        operator.attrgetter(name)(deepspeed)


def test_feature_of_finds_the_longest_row() -> None:
    assert feature_of("deepspeed.moe.layer.MoE") == feature_of("moe") == "mixture of experts"
    assert feature_of("deepspeed.runtime.pipe.topology") is None
    assert feature_of("deepspeed.mode") is None


def test_unknown_names_fail_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'deepspeed\.nonsense'"):
        importlib.import_module("deepspeed.nonsense")
    with pytest.raises(AttributeError, match=r"module 'deepspeed\.runtime' has no attribute 'nonsense'"):
        attribute_or_submodule("deepspeed.runtime", "nonsense")
    assert not hasattr(deepspeed, "moe")


def test_names_are_reachable_after_a_bare_import() -> None:
    """As attributes, with no sub-module imported before; each in the order given, in one new interpreter."""
    code = (
        "import json, operator, sys, deepspeed\n"
        "missing = []\n"
        "for path in json.loads(sys.argv[1]):\n"
        "    try: operator.attrgetter(path)(deepspeed)\n"
        "    except AttributeError as error: missing.append(str(error))\n"
        "print(json.dumps(missing))\n"
    )
    paths = json.dumps(CONTRACT["bare_import"]["works"])
    done = subprocess.run([sys.executable, "-c", code, paths], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_engine_members() -> None:
    from deepspeed import DeepSpeedEngine

    assert [name for name in CONTRACT["engine"]["works"] if not hasattr(DeepSpeedEngine, name)] == []
    assert [name for name in CONTRACT["engine"]["planned"] if hasattr(DeepSpeedEngine, name)] == []


def members(stage: int) -> list[str]:
    """Which members of a running engine, its optimizer and its parameters differ from the contract."""
    rows = CONTRACT["engine"]
    model = torch.nn.Linear(4, 4)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    engine: Any = deepspeed.initialize(model=model, config=settings)[0]
    asked = [(engine, rows["attributes"]), (engine.optimizer, rows["optimizer"])]
    if stage == 3:
        asked.append((engine.optimizer, rows["optimizer_stage3"]))
        asked.append((engine.optimizer.parameter_offload, rows["parameter_offload"]))
        asked += [(param, rows["parameter_stage3"]) for param in model.parameters()]
    else:
        asked.append((engine.optimizer, rows["optimizer_below_stage3"]))
    found = [f"{type(thing).__name__}.{name}" for thing, names in asked for name in names if not hasattr(thing, name)]
    for name in rows["planned"]:
        try:
            getattr(engine, name)
            found.append(f"{name} exists: move it to `works`")
        except AttributeError as error:
            if "is not built yet in deepspeed" not in str(error):
                found.append(f"{name}: {error}")
    engine.destroy()
    return found


@pytest.mark.world(1)
@pytest.mark.parametrize("stage", (0, 2, 3))
def test_members_of_a_running_engine(ranks: Callable[..., Any], stage: int) -> None:
    assert ranks(members, stage) == [[]]


def test_lists_hold_no_duplicates() -> None:
    pairs = [(module, name) for part in (WORKS, PLANNED) for module, names in part.items() for name in names]
    assert len(pairs) == len(set(pairs))
