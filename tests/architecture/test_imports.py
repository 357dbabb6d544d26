"""Who may import whom, and what an import may cost."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from scripts.import_contracts import LayerTable, find_problems
from tests.harness.project import PACKAGE, ROOT, project_file

SOURCES = sorted(PACKAGE.rglob("*.py"))

# `import deepspeed` after torch: modules it may load. The figure is part of the product (fast command lines).
MAX_IMPORTED_MODULES = 60


def _run_python(code: str) -> str:
    """Standard output of a new interpreter, which must not warn or print anything else."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def _graph(imports: dict[str, list[str]]) -> grimp.ImportGraph:
    graph = grimp.ImportGraph()
    for module in imports.keys() | {name for names in imports.values() for name in names}:
        graph.add_module(module)
    for importer, names in imports.items():
        for name in names:
            graph.add_import(importer=importer, imported=name, line_number=3, line_contents="")
    return graph


def test_layers_hold() -> None:
    contracts = project_file()["tool"]["importlinter"]["contracts"]
    contract = next(contract for contract in contracts if contract["id"] == "layers")
    graph = grimp.build_graph("deepspeed", exclude_type_checking_imports=True, cache_dir=None)
    assert find_problems(graph, LayerTable(contract["layers"], contract["capped"])) == []


TABLE = (["p.base p.x.*_facts", "p.x =p.y", "p.top p.front"], ["p.front 0"])


@pytest.mark.parametrize(
    ("imports", "problem"),
    (
        ({"p.base": ["p.x.a"]}, "p.base:3 (layer 0) may import up to layer 0, but imports p.x.a (layer 1)"),
        ({"p.x.some_facts": ["p.x.a"]}, "p.x.some_facts:3 (layer 0)"),
        ({"p.front.main": ["p.x.a"]}, "p.front.main:3 (layer 2) may import up to layer 0"),
        ({"p.x.a": ["p.x.b"], "p.x.b": ["p.x.a"]}, "import cycle between p.x.a, p.x.b"),
        ({"p.z": ["p.base"]}, "p.z has no layer"),
        ({"p.y.deep": ["p.base"]}, "p.y.deep has no layer"),
    ),
)
def test_broken_layers_are_named(imports: dict[str, list[str]], problem: str) -> None:
    problems = find_problems(_graph(imports), LayerTable(*TABLE))
    assert len(problems) == 1
    assert problems[0].startswith(problem)


def test_allowed_imports_are_silent() -> None:
    imports = {"p.top": ["p.x.a", "p.base"], "p.front.main": ["p.front.sub", "p.base"], "p.x.a": ["p.x.b", "p.empty"]}
    assert find_problems(_graph(imports), LayerTable(*TABLE)) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_rules(path: Path) -> None:
    """No `import *`, no import of the package root from inside, a docstring in every module that has code."""
    tree = ast.parse(path.read_text())
    submodules = {entry.stem for entry in PACKAGE.iterdir()}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.names[0].name != "*", f"line {node.lineno}: import *"
            if node.module == "deepspeed":
                outside = {alias.name for alias in node.names} - submodules
                assert not outside, f"line {node.lineno}: takes {outside} from the package root"
        if isinstance(node, ast.Import) and path.parent != PACKAGE / "launcher":
            assert "deepspeed" not in {alias.name for alias in node.names}, f"line {node.lineno}: imports the root"
    if tree.body:
        assert ast.get_docstring(tree), "no module docstring"


def test_importing_the_package_is_lazy_and_silent() -> None:
    code = (
        "import torch, sys, json; before = set(sys.modules); import deepspeed; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = json.loads(_run_python(code))
    assert "deepspeed" in loaded
    assert len(loaded) <= MAX_IMPORTED_MODULES, loaded


def test_the_launcher_never_imports_torch() -> None:
    code = (
        "import sys; import deepspeed.launcher.runner, deepspeed.launcher.launch; "
        "print([name for name in ('torch', 'pydantic', 'numpy', 'rich') if name in sys.modules])"
    )
    assert _run_python(code).strip() == "[]"


def test_every_module_imports_on_its_own() -> None:
    """In one process, each module first: no hidden dependency on an import made elsewhere, nothing printed."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES if path.name != "__init__.py"]
    if importlib.util.find_spec("triton") is None:
        # Modules of GPU kernels say so in their name, and whoever imports them has looked for triton first.
        names = [name for name in names if not name.endswith("_triton")]
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
    assert _run_python(code) == ""
