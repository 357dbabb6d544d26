"""Which slots of this host a single-node run uses, and the one line that says why.

One order of precedence, first match wins (printed with every start):

    1. --include / --exclude      names devices; they must be visible
    2. --num_gpus N               the first N visible devices
    3. CUDA_VISIBLE_DEVICES       or the accelerator's own variable: all it names, in its order, gaps allowed
    4. all devices of the host

The visible devices are those of the hostfile line or of the host, cut down to what the variable of step 3 names: a
scheduler that hands out GPUs through that variable is obeyed whatever the flags say. The CPU has no fixed number of
devices: there the flags decide alone, and the variable counts only when no flag is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed.launcher.devices import Devices, visible_ids
from deepspeed.launcher.errors import StartError, UsageError
from deepspeed.launcher.hostfile import Slot, parse_node_config_list, parse_resource_filter

LOCAL_HOST = "localhost"


@dataclass(frozen=True)
class Request:
    """What the command line says about devices. ``num_devices`` is -1 when not given.

    host: name of the only host of the run; hostfile_slots: its slots in the hostfile, None without one.
    aliases: other names of this host that filters may use.
    """

    include: str = ""
    exclude: str = ""
    num_devices: int = -1
    host: str = LOCAL_HOST
    hostfile_slots: int | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Selection:
    """Chosen slots in rank order, and why, in words."""

    slots: tuple[Slot, ...]
    reason: str


@dataclass(frozen=True)
class _Universe:
    """The visible slots and where they come from. ``open_ended``: more may be asked for than are listed."""

    slots: tuple[Slot, ...]
    source: str
    open_ended: bool


def select_local_slots(request: Request, devices: Devices, environ: Mapping[str, str]) -> Selection:
    """Apply the order of precedence above.

    Raises:
        UsageError: more than is visible is asked for, an unknown slot is named, or the variable is malformed.
        StartError: the host offers nothing, or its number of devices is unknown and none was given.
    """
    universe = _visible(request, devices, environ)
    if request.include or request.exclude:
        selection = _by_filter(request, universe)
    elif request.num_devices != -1:
        selection = _by_count(request.num_devices, universe)
    else:
        per_node = "one for each NUMA node; " if universe.open_ended and universe.slots == devices.ids else ""
        selection = Selection(universe.slots, per_node + universe.source)
    if not selection.slots:
        raise StartError(
            f"no {devices.accelerator} device to start on: {universe.source}; name a number with --num_gpus"
            if devices.ids is None
            else f"no {devices.accelerator} device is left to start on ({selection.reason})"
        )
    return selection


def _visible(request: Request, devices: Devices, environ: Mapping[str, str]) -> _Universe:
    variable = devices.visible_variable
    value = environ.get(variable)
    named = visible_ids(value) if value is not None else []
    if len(set(named)) != len(named):
        raise UsageError(f"{variable}={value}: a device is named twice; name each once")
    flags_given = bool(request.include or request.exclude or request.num_devices != -1)
    if named and not (devices.unbounded and flags_given):
        _check_exists(variable, value, named, devices)
        return _Universe(tuple(named), f"{variable}={value}", devices.unbounded)
    ignored = f"; {variable}={value} does not limit the CPU" if named else ""
    if request.hostfile_slots is not None:
        slots: tuple[Slot, ...] = tuple(range(request.hostfile_slots))
        _check_exists("hostfile", f"slots={request.hostfile_slots}", slots, devices)
        return _Universe(slots, f"{len(slots)} slots of {request.host} in the hostfile{ignored}", devices.unbounded)
    if devices.ids is None:
        why = f"the number of {devices.accelerator} devices is not known without its library"
        return _Universe((), why, open_ended=True)
    if devices.unbounded:
        return _Universe(devices.ids, f"{devices.why}{ignored}", open_ended=True)
    return _Universe(devices.ids, f"all of this host: {devices.why}", open_ended=False)


def _check_exists(origin: str, value: str | None, slots: Sequence[Slot], devices: Devices) -> None:
    if devices.unbounded or devices.ids is None:
        return
    missing = [slot for slot in slots if isinstance(slot, int) and slot not in devices.ids]
    if missing:
        raise UsageError(
            f"{origin} {value}: this host has no {devices.accelerator} device {_listed(missing)}; "
            f"it has {_listed(devices.ids)}"
        )


def _by_count(number: int, universe: _Universe) -> Selection:
    if number < 1:
        raise UsageError(f"--num_gpus {number}: at least one worker is needed; leave it out to use every device")
    if number > len(universe.slots):
        if not universe.open_ended:
            raise UsageError(
                f"--num_gpus {number}: only {len(universe.slots)} visible ({_listed(universe.slots)}; "
                f"{universe.source}); ask for fewer, or widen what is visible"
            )
        return Selection(tuple(range(number)), f"--num_gpus {number}; {universe.source}")
    first = "; " if universe.open_ended else ", the first of "
    return Selection(universe.slots[:number], f"--num_gpus {number}{first}{universe.source}")


def _by_filter(request: Request, universe: _Universe) -> Selection:
    option, text = ("--include", request.include) if request.include else ("--exclude", request.exclude)
    if request.include and request.exclude:
        raise UsageError("--include and --exclude exclude each other; give one of them")
    named = parse_node_config_list(text)
    for host in named:
        if host != request.host and host not in request.aliases:
            raise UsageError(f"{option}: host {host!r} is not part of this run, which has {request.host!r} alone")
    slots = [slot for host_slots in named.values() for slot in host_slots]
    available = universe.slots
    if request.include and universe.open_ended:
        # A CPU worker needs no device of its own, so any slot may be named.
        available = tuple(dict.fromkeys([*sorted(set(slots)), *([] if slots else universe.slots)]))
    spec = request.host + (":" + ",".join(map(str, slots)) if slots else "")
    pool = {request.host: list(available)}
    try:
        kept = parse_resource_filter(pool, spec if request.include else "", spec if request.exclude else "")
    except UsageError as problem:
        raise UsageError(f"{problem} ({universe.source})") from None
    joint = "; " if universe.open_ended else " of "
    return Selection(tuple(kept.get(request.host, ())), f"{option} {text}{joint}{universe.source}")


def _listed(slots: Sequence[Slot]) -> str:
    return ",".join(map(str, slots)) if slots else "none"
