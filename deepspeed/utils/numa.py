"""Binding of local ranks to CPU cores and memory nodes with ``numactl``.

Owns: the arithmetic from a list of cores to the ``numactl`` prefix of one local rank. Does not own: starting the
processes (the launcher does) or choosing OMP_NUM_THREADS (it gets the number of cores from here). Never imports torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence

import psutil

__all__ = ["check_for_numactl_pkg", "get_numa_cores", "get_numactl_cmd", "parse_range", "parse_range_list"]

_INSTALL_HINTS = (
    ("dpkg", "apt install numactl"),
    ("dnf", "dnf install numactl"),
    ("yum", "yum install numactl"),
    ("pacman", "pacman -S numactl"),
    ("zypper", "zypper install numactl"),
)


def check_for_numactl_pkg() -> bool:
    """Tell whether ``numactl`` is installed; if not, print how to get it."""
    if shutil.which("numactl"):
        return True
    hint = next((command for tool, command in _INSTALL_HINTS if shutil.which(tool)), "install the package numactl")
    print(f"numactl is not installed; binding of cores needs it: {hint}")
    return False


def parse_range(rng: str) -> range:
    """``"1-3"`` → range(1, 4); ``"5"`` → range(5, 6). ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", rng)
    if match is None:
        raise ValueError(f"bad core range {rng!r}: expected a number or two numbers with a dash, such as 4 or 0-3")
    first = int(match[1])
    last = int(match[2]) if match[2] is not None else first
    if last < first:
        raise ValueError(f"bad core range {rng!r}: the end is smaller than the start")
    return range(first, last + 1)


def parse_range_list(range_str: str) -> list[int]:
    """``"0,2-4,27"`` → [0, 2, 3, 4, 27]. The parts must ascend without overlap, else ValueError."""
    cores: list[int] = []
    for part in range_str.split(","):
        piece = parse_range(part)
        if cores and piece.start <= cores[-1]:
            raise ValueError(f"bad core list {range_str!r}: the parts must be in ascending order and not overlap")
        cores.extend(piece)
    return cores


def _kernel_node_cores() -> list[list[int]]:
    """Cores of each memory node, as the Linux kernel lists them; empty elsewhere."""
    root = "/sys/devices/system/node"
    try:
        nodes = sorted(int(name[4:]) for name in os.listdir(root) if re.fullmatch(r"node\d+", name))
    except OSError:
        return []
    found = []
    for node in nodes:
        with open(f"{root}/node{node}/cpulist", encoding="ascii") as text:
            listing = text.read().strip()
        found.append(parse_range_list(listing) if listing else [])
    return found


def get_numa_cores() -> list[list[int]]:
    """Return the cores of each NUMA node, by node number. A node with memory but no cores gives an empty list.

    Empty when neither the kernel's files nor ``numactl --hardware`` tell.
    """
    nodes = _kernel_node_cores()
    if nodes or shutil.which("numactl") is None:
        return nodes
    output = subprocess.run(["numactl", "--hardware"], capture_output=True, text=True, check=False).stdout
    by_node = re.findall(r"^node \d+ cpus:(.*)$", output, flags=re.MULTILINE)
    return [[int(core) for core in line.split()] for line in by_node]


def _as_list_text(cores: Sequence[int]) -> str:
    """[0, 1, 2, 5] → ``"0-2,5"``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _usable_cores() -> list[int]:
    """Physical cores this process may run on (as many as there are, counted from the lowest number)."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if not hasattr(os, "sched_getaffinity"):
        return list(range(physical))
    # Under a cpuset the numbers need not start at 0; hyper-thread siblings come after the physical cores.
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[: min(physical, len(allowed))]


def _memory_node_arguments(cores: Sequence[int]) -> list[str]:
    """``numactl`` memory policy for a rank on ``cores``: prefer the nodes that own them, on machines with several."""
    nodes = get_numa_cores()
    with_cores = [number for number, node in enumerate(nodes) if node]
    if len(with_cores) < 2:
        return []
    mine = [number for number in with_cores if set(nodes[number]) & set(cores)]
    # Memory-only nodes (high-bandwidth memory) are reached through the system's own policy.
    return ["-m", ",".join(map(str, mine))] if mine else []


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Return (cores per rank, ``numactl`` prefix) for one of ``num_local_procs`` ranks of this machine.

    Args:
        bind_core_list: cores to share out, such as ``"0-3,8"``; None for all physical cores of the machine.
        num_local_procs: ranks on this machine; each gets the same number of cores, spare ones stay unused.
        local_rank: which of them.

    Raises:
        ValueError: KMP_AFFINITY is set (it would undo the binding), the list is malformed, or there are fewer cores
            than ranks.
    """
    if "KMP_AFFINITY" in os.environ:
        raise ValueError(
            f"environment variable KMP_AFFINITY={os.environ['KMP_AFFINITY']!r} overrides core binding; unset it, "
            "or leave out --bind_cores_to_rank"
        )
    check_for_numactl_pkg()
    cores = _usable_cores() if bind_core_list is None else parse_range_list(bind_core_list)
    cores_per_rank = len(cores) // num_local_procs
    if cores_per_rank < 1:
        raise ValueError(
            f"core binding: {num_local_procs} ranks on this machine but only {len(cores)} cores "
            f"({_as_list_text(cores)}); start fewer ranks or list more cores in --bind_core_list"
        )
    mine = cores[cores_per_rank * local_rank : cores_per_rank * (local_rank + 1)]
    return cores_per_rank, ["numactl", "-C", _as_list_text(mine), *_memory_node_arguments(mine)]
