from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.launcher.launching import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)
