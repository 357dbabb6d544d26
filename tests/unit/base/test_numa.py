"""Cores shared out to local ranks."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed.utils import numa
from deepspeed.utils.numa import get_numa_cores, get_numactl_cmd, parse_range, parse_range_list


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    monkeypatch.setattr(numa, "check_for_numactl_pkg", lambda: True)
    monkeypatch.setattr(numa, "_usable_cores", lambda: list(range(8)))
    monkeypatch.setattr(numa, "_kernel_node_cores", lambda: [list(range(8))])


def test_ranges() -> None:
    assert parse_range("1-3") == range(1, 4)
    assert parse_range(" 5 ") == range(5, 6)
    assert parse_range_list("0,2-4,27") == [0, 2, 3, 4, 27]


@pytest.mark.parametrize("text", ("3-1", "a", "", "1-", "1-2-3", "-1", "1.5"))
def test_bad_range(text: str) -> None:
    with pytest.raises(ValueError, match=f"bad core range {text!r}"):
        parse_range(text)


@pytest.mark.parametrize("text", ("4,2", "0-3,2", "1,1", "1,,2", ""))
def test_bad_list(text: str) -> None:
    with pytest.raises(ValueError, match="bad core"):
        parse_range_list(text)


@pytest.mark.parametrize("ranks", (1, 2, 3, 8))
def test_ranks_get_equal_disjoint_shares(ranks: int) -> None:
    commands = [get_numactl_cmd(None, ranks, rank) for rank in range(ranks)]
    assert {count for count, _ in commands} == {8 // ranks}
    shares = [parse_range_list(command[2]) for _, command in commands]
    assert [command[:2] for _, command in commands] == [["numactl", "-C"]] * ranks
    flat = [core for share in shares for core in share]
    assert flat == list(range(8 // ranks * ranks))


def test_given_cores_and_their_text() -> None:
    assert get_numactl_cmd("0,2-5,9", 2, 0) == (3, ["numactl", "-C", "0,2-3"])
    assert get_numactl_cmd("0,2-5,9", 2, 1) == (3, ["numactl", "-C", "4-5,9"])


def test_memory_stays_near_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two sockets and a node of memory alone.
    monkeypatch.setattr(numa, "_kernel_node_cores", lambda: [[0, 1, 2, 3], [4, 5, 6, 7], []])
    assert get_numactl_cmd(None, 2, 1)[1] == ["numactl", "-C", "4-7", "-m", "1"]
    assert get_numactl_cmd(None, 1, 0)[1] == ["numactl", "-C", "0-7", "-m", "0,1"]


def test_too_few_cores() -> None:
    with pytest.raises(ValueError, match=r"2 ranks on this machine but only 1 cores \(5\)"):
        get_numactl_cmd("5", 2, 0)


def test_conflicting_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    with pytest.raises(ValueError, match=r"KMP_AFFINITY='compact' overrides core binding; unset it"):
        get_numactl_cmd(None, 1, 0)


def test_usable_cores_obey_the_cpuset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(numa.psutil, "cpu_count", lambda logical: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {6, 7, 2}, raising=False)
    assert numa._usable_cores() == [2, 6, 7]


def test_nodes_from_the_tool_where_the_kernel_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "available: 2 nodes (0-1)\nnode 0 cpus: 0 1 4\nnode 0 size: 5 MB\nnode 1 cpus:\nnode 1 size: 7 MB\n"
    monkeypatch.setattr(numa, "_kernel_node_cores", list)
    monkeypatch.setattr(numa.shutil, "which", lambda name: "/usr/bin/numactl")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=text))
    assert get_numa_cores() == [[0, 1, 4], []]
    monkeypatch.setattr(numa.shutil, "which", lambda name: None)
    assert get_numa_cores() == []


def test_hint_when_the_tool_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.undo()
    have: dict[str, Any] = {"dnf": "/usr/bin/dnf"}
    monkeypatch.setattr(numa.shutil, "which", have.get)
    assert numa.check_for_numactl_pkg() is False
    assert "numactl is not installed; binding of cores needs it: dnf install numactl" in capsys.readouterr().out
    have["numactl"] = "/usr/bin/numactl"
    assert numa.check_for_numactl_pkg() is True
    assert capsys.readouterr().out == ""
