"""Which hosts and slots a run uses: the hostfile and the include / exclude grammar. Pure text and integers.

A *slot* is one place for a worker on a host: the number of an accelerator, or just a count on the CPU. Pools are
mappings host -> number of slots; selections are mappings host -> slots in use. Order of hosts is rank order.

    hostfile   NAME slots=N [anything]     one host a line; blank lines and lines starting with # are skipped
    filter     SPEC[@SPEC...]              SPEC = NAME[:SLOT[,SLOT...]]; without slots: all slots of the host
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence

from deepspeed.launcher.errors import UsageError

Slot = int | str
"""Number of a device, or its identifier where the environment names devices by one (``GPU-...``, ``MIG-...``)."""

_MOST_SLOTS = 1 << 16
_HOST_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def parse_hostfile(lines: Iterable[str]) -> dict[str, int]:
    """Read hostfile lines into a pool. UsageError (a ValueError) names the line that cannot be read."""
    pool: dict[str, int] = {}
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _HOST_LINE.match(line)
        if match is None:
            raise UsageError(f"hostfile line {number}: found {line!r}, expected 'NAME slots=N'")
        name, slots = match[1], int(match[2])
        if name in pool:
            raise UsageError(f"hostfile line {number}: host {name!r} is listed twice; give each host one line")
        if slots > _MOST_SLOTS:  # they are listed one by one
            raise UsageError(f"hostfile line {number}: {slots} slots of host {name!r}; at most {_MOST_SLOTS}")
        pool[name] = slots
    if not pool:
        raise UsageError("hostfile: it names no host; expected lines of the form 'NAME slots=N'")
    return pool


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Pool of a hostfile, or None when there is no such file."""
    if not os.path.isfile(hostfile_path):
        return None
    with open(hostfile_path, encoding="utf-8") as lines:
        try:
            return parse_hostfile(lines)
        except UsageError as problem:
            raise UsageError(f"{hostfile_path}: {problem}") from None


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """``"host:0,2"`` -> ("host", [0, 2]); ``"host"`` -> ("host", []) which means all slots."""
    name, colon, slots = node_config.partition(":")
    if not colon:
        return name, []
    try:
        return name, [int(slot) for slot in slots.split(",")]
    except ValueError:
        raise UsageError(
            f"include / exclude: found {node_config!r}, expected NAME or NAME:SLOT[,SLOT...] with whole numbers"
        ) from None


def parse_node_config_list(node_config_list: str) -> dict[str, list[int]]:
    """``"a:0@b@a:2"`` -> {"a": [0, 2], "b": []}: one entry a host, slots in the order given."""
    selected: dict[str, list[int]] = {}
    for spec in node_config_list.split("@"):
        name, slots = parse_node_config(spec.strip())
        selected.setdefault(name, []).extend(slots)
    return selected


def parse_resource_filter(
    host_info: Mapping[str, Sequence[Slot]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[Slot]]:
    """Keep what ``include_str`` names, or drop what ``exclude_str`` names. Hosts and slots keep the pool's order.

    A host that is left without slots disappears. UsageError: both are given, or an unknown host or slot is named.
    """
    if include_str and exclude_str:
        raise UsageError("--include and --exclude exclude each other; give one of them")
    everything = {host: list(slots) for host, slots in host_info.items()}
    if not include_str and not exclude_str:
        return everything
    option = "--include" if include_str else "--exclude"
    named = parse_node_config_list(include_str or exclude_str)
    for host, slots in named.items():
        _check_named(option, host, slots, everything)
    kept: dict[str, list[Slot]] = {}
    for host, available in everything.items():
        # A host that is named without slots is meant as a whole.
        touched = [slot for slot in available if not named[host] or slot in named[host]] if host in named else []
        remaining = touched if include_str else [slot for slot in available if slot not in touched]
        if remaining:
            kept[host] = remaining
    return kept


def _check_named(option: str, host: str, slots: Sequence[Slot], pool: Mapping[str, Sequence[Slot]]) -> None:
    if host not in pool:
        raise UsageError(f"{option}: host {host!r} is not in the pool; known hosts: {', '.join(pool)}")
    unknown = [slot for slot in slots if slot not in pool[host]]
    if unknown:
        raise UsageError(
            f"{option}: host {host!r} has no slot {', '.join(map(str, unknown))}; "
            f"its slots: {', '.join(map(str, pool[host]))}"
        )


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> dict[str, list[Slot]]:
    """Filter a pool (host -> number of slots) into a selection (host -> slots)."""
    host_info: dict[str, list[Slot]] = {host: list(range(slots)) for host, slots in resource_pool.items()}
    return parse_resource_filter(host_info, include_str=inclusion, exclude_str=exclusion)


def apply_num_nodes_and_gpus(
    active_resources: Mapping[str, Sequence[Slot]], num_nodes: int, num_gpus: int
) -> dict[str, list[Slot]]:
    """First ``num_nodes`` hosts, first ``num_gpus`` slots of each; a number below 1 keeps all.

    UsageError when more is asked for than the selection has, naming the host.
    """
    if num_nodes > len(active_resources):
        raise UsageError(
            f"--num_nodes {num_nodes}: only {len(active_resources)} available: {', '.join(active_resources)}"
        )
    kept = {host: list(slots) for host, slots in active_resources.items()}
    if num_nodes > 0:
        kept = {host: kept[host] for host in list(kept)[:num_nodes]}
    if num_gpus > 0:
        for host, slots in kept.items():
            if num_gpus > len(slots):
                raise UsageError(
                    f"--num_gpus {num_gpus}: host {host!r} offers {len(slots)} slots ({', '.join(map(str, slots))})"
                )
        kept = {host: slots[:num_gpus] for host, slots in kept.items()}
    return kept


def encode_world_info(world_info: Mapping[str, object]) -> str:
    """Base64 (url alphabet) of the JSON text of ``{host: slots}``: one shell-safe word."""
    import base64
    import json

    return base64.urlsafe_b64encode(json.dumps(world_info).encode("utf-8")).decode("ascii")


def decode_world_info(encoded: str) -> dict[str, list[Slot]]:
    """Inverse of `encode_world_info`; a plain count of slots stands for the first ones."""
    import base64
    import json

    try:
        world = json.loads(base64.urlsafe_b64decode(encoded))
        return {host: list(range(slots)) if isinstance(slots, int) else list(slots) for host, slots in world.items()}
    except (ValueError, TypeError, AttributeError):
        raise UsageError(
            f"--world_info: found {encoded!r}, expected the base64 text of a JSON object {{host: [slot, ...]}}"
        ) from None
