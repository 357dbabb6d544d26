"""How much host memory this process may use and does use, container limits included.

Owns: reading the kernel's counters (``/proc``, control groups) with psutil as the portable fallback. All numbers are
bytes. Never imports torch.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

__all__ = ["available_memory", "peak_resident_memory", "reset_peak_resident_memory", "resident_memory", "total_memory"]

# Kernels report "no limit" as a page-aligned number near 2**63.
_NO_LIMIT = 1 << 60


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None


def _cgroup_folders() -> list[tuple[Path, str, str]]:
    """(folder, name of the limit file, name of the usage file) of each memory control group of this process, the
    innermost first. A limit of any enclosing group counts too."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, str, str]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Inside a container the path may belong to the host's view; the mounted root is then the group itself.
        folder = root / path.lstrip("/")
        if not folder.is_dir():
            folder = root
        while True:
            found.append((folder, *names))
            if folder == root:
                break
            folder = folder.parent
    return found


def _reclaimable(folder: Path) -> int:
    """File cache of a control group that the kernel drops before it refuses memory."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split() for line in lines)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, current use without reclaimable cache) of each control group that has a memory limit."""
    limits = []
    for folder, limit_name, usage_name in _cgroup_folders():
        limit = _read_int(folder / limit_name)
        if limit is not None and limit < _NO_LIMIT:
            limits.append((limit, max(0, (_read_int(folder / usage_name) or 0) - _reclaimable(folder))))
    return limits


def total_memory() -> int:
    """Memory of this machine, or the container's limit if that is smaller."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _cgroup_limits())])


def available_memory() -> int:
    """Memory that can still be allocated: what the machine has free, capped by what the container's limit leaves."""
    left = [max(0, limit - used) for limit, used in _cgroup_limits()]
    return min([psutil.virtual_memory().available, *left])


def resident_memory() -> int:
    """Memory this process holds now (resident set)."""
    return psutil.Process().memory_info().rss


def _status_field(name: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith(name):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def peak_resident_memory() -> int:
    """Largest resident set of this process since its start or the last `reset_peak_resident_memory`."""
    peak = _status_field("VmHWM:")
    if peak is None:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return max(peak, resident_memory())


def reset_peak_resident_memory() -> bool:
    """Start a new peak measurement. False where the system cannot (then the peak stays that of the whole life)."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as control:
            control.write("5")
    except OSError:
        return False
    return True
