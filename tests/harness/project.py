"""Where the checkout is and what its project file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "deepspeed"


def read_toml(path: Path) -> dict[str, Any]:
    """The parsed file at `path`."""
    return tomllib.loads(path.read_text())


def project_file() -> dict[str, Any]:
    """`pyproject.toml`."""
    return read_toml(ROOT / "pyproject.toml")
