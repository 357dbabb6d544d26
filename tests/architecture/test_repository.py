"""Rules for the repository as a whole: what tracked files may not contain, and what must agree with what."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from tests.harness.project import ROOT, project_file

# Written in pieces, so that this file does not find itself.
_HOSTS = ("py" + "pi.org", "python" + "hosted.org", "download." + "pytorch.org", "anaconda" + ".org")
_MACHINE_PATH = re.compile(r"(^|[^A-Za-z0-9_.])/(work|farm|root|home/[a-z]+|Users/[a-z]+)/[A-Za-z.]", re.MULTILINE)


def _tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout: there are no tracked files to look at")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def _texts() -> dict[str, str]:
    texts = {}
    for path in _tracked():
        data = path.read_bytes()
        if b"\0" not in data:
            texts[str(path.relative_to(ROOT))] = data.decode("utf-8")
    return texts


def test_no_path_of_a_machine_and_no_registry_host() -> None:
    found = []
    for name, text in _texts().items():
        found += [f"{name}: {match.group().strip()}" for match in _MACHINE_PATH.finditer(text)]
        found += [f"{name}: {host}" for host in _HOSTS if host in text]
    assert found == []


def test_no_left_overs() -> None:
    """No conflict markers, and no notes to self in place of code."""
    marker = re.compile(r"^(<{7} |>{7} )|\b(TODO|FIXME|XXX)\b", re.MULTILINE)
    found = [
        f"{name}: {match.group()}"
        for name, text in _texts().items()
        if name.endswith((".py", ".toml", ".md", ".cpp", ".h")) and name != "tests/architecture/test_repository.py"
        for match in marker.finditer(text)
    ]
    assert found == []


def test_every_test_folder_is_a_package() -> None:
    """The pool finds test functions by module name, so two folders may not hold the same top-level module name."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert sorted(str(folder) for folder in folders if not (folder / "__init__.py").exists()) == []


def test_versions_agree() -> None:
    project = project_file()["project"]
    import deepspeed

    assert deepspeed.__version__ == project["version"] == metadata.version("deepspeed")


def test_constraints_cover_the_dependencies() -> None:
    """Everything the project names is pinned, so that two machines test the same thing."""
    project = project_file()["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {re.split(r"[<>=!\[ ;]", line)[0].lower().replace("_", "-") for line in wanted} - {"deepspeed"}
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert names - pinned == set()
