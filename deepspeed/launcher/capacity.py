"""How many workers this host can carry where nothing counts devices: on the CPU, and where only a vendor's library can.

Each worker is an interpreter that imports torch. Thousands of them on a small host stop everything on it for many
minutes, so a number far beyond its cores or its memory is refused before the first one starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from deepspeed.launcher.devices import Devices
from deepspeed.launcher.errors import UsageError

LIMIT_VARIABLE = "DS_LAUNCH_MAX_RANKS"
# More ranks than cores is what people do to try things out, so the line is drawn far from what works.
_RANKS_PER_CORE = 8
_ALWAYS_ALLOWED = 16
# What one interpreter with torch keeps for itself before it does any work.
_BYTES_PER_RANK = 128 << 20


def check_number_of_workers(number: int, origin: str, devices: Devices, environ: Mapping[str, str]) -> None:
    """Refuse more workers than this host can carry. ``origin``: where the number comes from, for the message.

    Raises:
        UsageError: ``number`` is beyond the limit of this host, or of ``DS_LAUNCH_MAX_RANKS``.
    """
    given = environ.get(LIMIT_VARIABLE)
    if given is not None and not (given.isascii() and given.isdigit() and int(given)):
        raise UsageError(f"{LIMIT_VARIABLE}={given}: expected the number of workers to allow on a host, 1 or more")
    if given is not None:
        if number > int(given):
            raise UsageError(f"{origin}: {number} workers on this host, but {LIMIT_VARIABLE}={given} allows {given}")
        return
    if number <= _ALWAYS_ALLOWED or not (devices.unbounded or devices.ids is None):
        return
    cores, memory = _usable_cores(), _memory()
    limit = max(_ALWAYS_ALLOWED, min(_RANKS_PER_CORE * cores, memory // _BYTES_PER_RANK))
    if number > limit:
        raise UsageError(
            f"{origin}: {number} workers on this host, each an interpreter of its own; it has {cores} "
            f"core{'s' * (cores > 1)} and {memory / 2**30:.1f} GiB of memory, enough for about {limit} "
            f"({_RANKS_PER_CORE} a core, {_BYTES_PER_RANK >> 20} MiB each). Ask for fewer, or set "
            f"{LIMIT_VARIABLE}={number} to start them all the same"
        )


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int:
    # Only a large number is compared with it: the usual start does not pay for the import.
    from deepspeed.utils.host_memory import total_memory

    return total_memory()
