"""The quickstart's modules, importable as its script imports them: by their bare names, from their own folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
MODULES = ("checks", "data", "model", "options", "progress", "report", "train")


@pytest.fixture(autouse=True)
def quickstart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(QUICKSTART))
    yield QUICKSTART
    for name in MODULES:  # such general names must not reach other tests
        sys.modules.pop(name, None)
