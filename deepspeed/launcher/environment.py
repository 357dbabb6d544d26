"""Environment of the workers: what is added to the user's, and the user's own ``.deepspeed_env`` files.

The user's variables are passed on as they are. What the launcher sets is the documented rendezvous set below; a path
list (PYTHONPATH) is extended, never replaced.

    every worker   MASTER_ADDR MASTER_PORT WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE, the devices' variable,
                   OMP_NUM_THREADS (only if unset and several ranks share the host), DEEPSPEED_RUN_ID
    each worker    RANK LOCAL_RANK
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from deepspeed.launcher.errors import UsageError

ENVIRONMENT_FILE_VARIABLE = "DS_ENV_FILE"
DEFAULT_ENVIRONMENT_FILE = ".deepspeed_env"
RUN_ID_VARIABLE = "DEEPSPEED_RUN_ID"
"""Carried by every process of a run, so that all of them can be found and ended; see processes.py."""

PATH_LISTS = ("PYTHONPATH",)


def environment_file_name() -> str:
    return os.environ.get(ENVIRONMENT_FILE_VARIABLE, DEFAULT_ENVIRONMENT_FILE)


def parse_environment_lines(lines: Sequence[str], origin: str) -> Iterator[tuple[str, str]]:
    """``KEY=VALUE`` lines as pairs.

    Blank lines and lines starting with # are skipped; a leading ``export`` and one pair of quotes around the whole
    value are dropped, as a shell would; all else is kept byte for byte.
    """
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        key, equals, content = line.removeprefix("export ").partition("=")
        key = key.strip()
        if not equals or not key or any(character.isspace() for character in key):
            raise UsageError(f"{origin} line {number}: found {line!r}, expected KEY=VALUE")
        if len(content) >= 2 and content[0] == content[-1] and content[0] in "'\"":
            content = content[1:-1]
        yield key, content


def read_environment_files(folders: Sequence[str], name: str) -> dict[str, str]:
    """Variables of ``<folder>/<name>`` of each folder; later folders win. Files that do not exist are skipped."""
    variables: dict[str, str] = {}
    seen: set[str] = set()
    for folder in folders:
        path = os.path.realpath(os.path.join(folder, name))
        if path in seen or not os.path.isfile(path):
            continue
        seen.add(path)
        with open(path, encoding="utf-8") as text:
            variables.update(parse_environment_lines(text.read().splitlines(), path))
    return variables


def merge_environment(base: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """``base`` with ``extra`` on top; path lists of ``extra`` go in front of those of ``base``."""
    merged = {**base, **extra}
    for key in PATH_LISTS:
        if key in extra and base.get(key):
            merged[key] = join_paths([extra[key], base[key]])
    return merged


def join_paths(lists: Sequence[str]) -> str:
    """One path list out of several, each folder once, first place kept."""
    folders = [folder for paths in lists for folder in paths.split(os.pathsep) if folder]
    return os.pathsep.join(dict.fromkeys(folders))


def threads_per_rank(num_ranks: int) -> int:
    """Physical cores this process may use, shared out among the ranks of this host; at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cpus // (2 if _hyper_threading() else 1) // num_ranks)


def _hyper_threading() -> bool:
    try:
        with open("/sys/devices/system/cpu/smt/active", encoding="ascii") as text:
            return text.read().strip() == "1"
    except OSError:
        return False
