"""Host memory limits of containers count."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed.utils import host_memory

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = SimpleNamespace(total=64 * GIB, available=40 * GIB)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: figures)


def group(folder: Path, limit: str, used: int, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def use(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    found = [(folder, "memory.max", "memory.current") for folder in folders]
    monkeypatch.setattr(host_memory, "_cgroup_folders", lambda: found)


def test_machine_without_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    group(tmp_path, "max", 5 * GIB)
    use(monkeypatch, tmp_path, tmp_path / "absent")
    assert host_memory.total_memory() == 64 * GIB
    assert host_memory.available_memory() == 40 * GIB


def test_number_that_means_no_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    group(tmp_path, str(2**63 - 4096), 5 * GIB)
    use(monkeypatch, tmp_path)
    assert host_memory.total_memory() == 64 * GIB


def test_smallest_limit_of_the_enclosing_groups_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outer, inner = tmp_path, tmp_path / "inner"
    group(outer, str(8 * GIB), 7 * GIB, inactive=2 * GIB)
    group(inner, str(16 * GIB), GIB)
    use(monkeypatch, inner, outer)
    assert host_memory.total_memory() == 8 * GIB
    assert host_memory.available_memory() == 3 * GIB  # reclaimable cache is available


def test_full_container_has_nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    group(tmp_path, str(GIB), 2 * GIB)
    use(monkeypatch, tmp_path)
    assert host_memory.available_memory() == 0


def test_this_process() -> None:
    assert host_memory.peak_resident_memory() >= host_memory.resident_memory() > 1 << 20
    assert all(isinstance(folder, Path) for folder, _, _ in host_memory._cgroup_folders())
