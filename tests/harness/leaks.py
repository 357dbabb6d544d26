"""What a test must leave as it found it.

Owns: a snapshot of the process-wide state that training code is tempted to change, and the list of differences.
Does not own: cleaning up (the pool's worker and the fixtures do that first, then ask here what is left).
Invariant: taking a snapshot changes nothing and imports nothing.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Set by torch when it imports its compiler, which the first optimizer step of a process does.
_LASTING_VARIABLES = frozenset({"TORCHINDUCTOR_CACHE_DIR"})

# Threads that a library keeps for the rest of the process once it has been used.
_LASTING_THREADS = ("tqdm_monitor", "pymp", "ThreadPoolExecutor", "asyncio")

# Constructors and entry points that training code is known to replace, by where they live below the torch package.
_WATCHED = {
    "": (
        "empty", "zeros", "ones", "full", "arange", "tensor", "rand", "randn", "randint", "eye", "linspace",
        "empty_like", "zeros_like", "full_like", "save", "load",
    ),
    "nn.Module": (
        "__init__", "__init_subclass__", "__call__", "apply", "to", "__getattr__", "__setattr__", "state_dict",
        "load_state_dict",
    ),
    "nn.Linear": ("__init__", "forward"),
    "nn.Embedding": ("__init__", "forward"),
    "nn.LayerNorm": ("__init__", "forward"),
    "nn.functional": ("linear", "embedding"),
    "nn.utils": ("clip_grad_norm_",),
    "Tensor": ("__new__", "backward", "register_hook"),
    "autograd": ("backward", "grad"),
    "utils.checkpoint": ("checkpoint",),
    "distributed": ("all_reduce", "all_gather", "broadcast", "barrier", "init_process_group", "new_group"),
    "optim.Optimizer": ("step",),
}  # fmt: skip

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_module_registration_hooks",
    "_global_buffer_registration_hooks",
    "_global_parameter_registration_hooks",
)

# Descriptors a test may leave open although it closed all that it opened: torch and the interpreter keep a few per
# process (urandom, kernel thread pools, compile caches), each opened once.
_FD_SLACK = 3


@dataclass(frozen=True)
class Snapshot:
    """Process-wide state at one moment. Compare two with `differences`."""

    environment: dict[str, str]
    threads: frozenset[int]
    groups: int
    modes: dict[str, Any]
    watched: dict[str, Any] = field(repr=False)
    global_hooks: dict[str, int] = field(repr=False)
    signals: dict[int, Any] = field(repr=False)
    open_files: dict[int, str] = field(default_factory=dict, repr=False)  # descriptor -> what it is


def _lookup(path: str, name: str) -> Any:
    holder: Any = torch
    for part in filter(None, path.split(".")):
        holder = getattr(holder, part)
    if not isinstance(holder, type):
        return getattr(holder, name)
    # From the class dictionaries, because getattr makes a new bound object of a class method at each look.
    return next((vars(base)[name] for base in holder.__mro__ if name in vars(base)), None)


def _live_threads() -> frozenset[int]:
    return frozenset(
        thread.ident or 0
        for thread in threading.enumerate()
        if thread.is_alive() and not thread.name.startswith(_LASTING_THREADS)
    )


def _modes() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "cpu autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch threads": torch.get_num_threads(),
        "working folder": os.getcwd(),
        "sys.path": tuple(sys.path),
        "threading.excepthook": threading.excepthook,
        "root log level": logging.getLogger().level,
        "root log handlers": len(logging.getLogger().handlers),
    }


def open_files() -> dict[int, str]:
    """Open descriptors of this process and what they are; empty where the system does not say."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself is closed again
                found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    return found


def take_snapshot() -> Snapshot:
    """The state now."""
    return Snapshot(
        environment=dict(os.environ),
        threads=_live_threads(),
        groups=len(dist.distributed_c10d._world.pg_map),
        modes=_modes(),
        watched={
            f"torch.{path}.{name}".replace("..", "."): _lookup(path, name)
            for path, names in _WATCHED.items()
            for name in names
        },
        global_hooks={name: len(getattr(nn.modules.module, name)) for name in _GLOBAL_HOOKS},
        signals={number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)},
        open_files=open_files(),
    )


def differences(
    before: Snapshot, after: Snapshot, *, ignore_environment: Iterable[str] = (), ignore_files: bool = False
) -> list[str]:
    """One line for each thing that was not put back; empty when nothing leaked."""
    lines = _environment_differences(before.environment, after.environment, frozenset(ignore_environment))
    new_threads = after.threads - before.threads
    names = [thread.name for thread in threading.enumerate() if thread.ident in new_threads]
    if names:
        lines.append(f"threads still running: {', '.join(sorted(names))}")
    if after.groups > before.groups:
        lines.append(f"torch.distributed groups still open: {after.groups - before.groups}")
    lines += [
        f"{name} changed from {value!r} to {after.modes[name]!r}"
        for name, value in before.modes.items()
        if after.modes[name] != value
    ]
    lines += [f"{name} is still patched" for name, value in before.watched.items() if after.watched[name] is not value]
    lines += [
        f"torch.nn.modules.module.{name} grew from {count} to {after.global_hooks[name]}"
        for name, count in before.global_hooks.items()
        if after.global_hooks[name] > count
    ]
    lines += [
        f"handler of {signal.Signals(number).name} was replaced"
        for number, handler in before.signals.items()
        if after.signals[number] is not handler
    ]
    if not ignore_files and len(after.open_files) > len(before.open_files) + _FD_SLACK:
        new = [what for number, what in after.open_files.items() if before.open_files.get(number) != what]
        lines.append(
            f"open files grew from {len(before.open_files)} to {len(after.open_files)}, new: {', '.join(sorted(new))}"
        )
    return lines


def _environment_differences(before: dict[str, str], after: dict[str, str], ignore: frozenset[str]) -> list[str]:
    lines = []
    for name in sorted((before.keys() | after.keys()) - ignore - _LASTING_VARIABLES):
        if before.get(name) != after.get(name):
            lines.append(f"environment variable {name} changed from {before.get(name)!r} to {after.get(name)!r}")
    return lines


def settle(before: Snapshot, *, ignore_environment: Iterable[str] = (), ignore_files: bool = False) -> list[str]:
    """Differences to now, after giving garbage in cycles (engines, autograd graphs) the chance to be collected."""
    for collect in (False, True):
        if collect:
            gc.collect()
        lines = differences(
            before, take_snapshot(), ignore_environment=ignore_environment, ignore_files=ignore_files
        )
        if not lines:
            break
    return lines
