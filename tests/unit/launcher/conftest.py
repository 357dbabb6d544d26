from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.launcher import launching
from tests.unit.launcher.launching import Folder


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    launching.bytecode_folder = tmp_path_factory.mktemp("bytecode")
    yield
    launching.bytecode_folder = None


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)
