"""Docstrings of installed packages, each with the package it is from: real text with an honest label.

Owns: finding them without importing anything, the split. Does not own: tokens and the model.
Invariant: the same packages give the same texts in the same order, on every rank.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Each of these says something of its own in its docstrings; all stand wherever the project is installed.
PACKAGES = ("asyncio", "email", "unittest", "numpy", "torch/nn", "torch/distributed")
PER_PACKAGE = 150
HELD_OUT = 30  # of them


def folder_of(package: str) -> Path:
    name, _, inner = package.partition("/")
    spec = importlib.util.find_spec(name)
    folder = Path(spec.origin).parent / inner if spec is not None and spec.origin is not None else None
    if folder is None or not folder.is_dir():
        raise FileNotFoundError(f"no package {package} where Python looks for modules: {sys.path}")
    return folder


def docstrings_in(node: ast.AST) -> Iterator[str]:
    """Docstrings of a module and all that it defines, as they stand. Expressions are passed by: they define nothing."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        found = ast.get_docstring(node, clean=False)
        if found:
            yield found
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(node, part, ()):
            yield from docstrings_in(inner)


def docstrings(package: str) -> list[str]:
    """Beginnings of docstrings of ``package``, without its name, in an order that mixes them; some hundred."""
    name = re.compile(r"\b(" + "|".join(re.escape(part) for part in package.split("/")) + r")\b", re.IGNORECASE)
    folder = folder_of(package)
    texts: set[str] = set()
    for path in sorted(folder.rglob("*.py"), key=lambda path: _hash(path.relative_to(folder).as_posix())):
        if "tests" in path.parts:
            continue
        if len(texts) > 2 * PER_PACKAGE:
            break
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for docstring in docstrings_in(tree):
            text = name.sub("it", " ".join(docstring.split())[:300])
            if len(text) >= 60:
                texts.add(text)
    return sorted(texts, key=_hash)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def rows() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(training, held out): texts with the number of their package, as many of each, mixed."""
    training, held_out = [], []
    for label, package in enumerate(PACKAGES):
        texts = docstrings(package)[:PER_PACKAGE]
        held_out += [(text, label) for text in texts[:HELD_OUT]]
        training += [(text, label) for text in texts[HELD_OUT:]]
    return _mixed(training), _mixed(held_out)


def _mixed(texts: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(texts, key=lambda row: _hash(row[0]))
