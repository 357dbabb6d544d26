"""Starts a run on several hosts: the checks before it, the variables it takes along, and its end.

Owns: everything around the command that a back end (multinode_runner.py) builds.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed.launcher.console import Console
from deepspeed.launcher.constants import (
    IMPI_LAUNCHER,
    MPICH_LAUNCHER,
    PDSH_LAUNCHER,
    SLURM_LAUNCHER,
    SSH_LAUNCHER,
)
from deepspeed.launcher.devices import EXPORTED_PREFIXES, find_devices
from deepspeed.launcher.diagnosis import FailureContext
from deepspeed.launcher.environment import PATH_LISTS, RUN_ID_VARIABLE, join_paths
from deepspeed.launcher.errors import StartError, UsageError
from deepspeed.launcher.hostfile import Slot, encode_world_info
from deepspeed.launcher.multinode_runner import (
    LAUNCHER_CLASSES,
    MultiNodeRunner,
    PDSHRunner,
    SSHRunner,
)
from deepspeed.launcher.processes import new_run_id, signal_process
from deepspeed.launcher.supervisor import Supervisor
from deepspeed.launcher.wakeups import TERMINATING, Wakeups
from deepspeed.launcher.worker import Worker, WorkerSpec, signal_name

# An unreachable host must not hold up the start for ever.
_SSH_SECONDS = 60
# Always taken along: our own switches, and the transport of GPUs even where the head node has none.
_PREFIXES = ("DS_", "NCCL")
_NAME = re.compile(r"[A-Za-z_]\w*")
_OVER_SSH = (PDSH_LAUNCHER, SSH_LAUNCHER)


@dataclass(frozen=True)
class Exports:
    """Which variables reach the other hosts: beginnings of names, names that are held back when a variable is set, and
    the contents of the user's environment files (which win)."""

    prefixes: tuple[str, ...]
    excluded: Mapping[str, tuple[str, ...]]
    from_files: Mapping[str, str]

    def choose(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables to set on the other hosts. The current folder comes first on PYTHONPATH, then the path of the
        environment file, then that of this process."""
        prefixes = (*self.prefixes, *_PREFIXES, *EXPORTED_PREFIXES.get(find_devices(environ).accelerator, ()))
        held_back = {name for switch, names in self.excluded.items() if switch in environ for name in names}
        chosen = {
            name: content
            for name, content in environ.items()
            if name.startswith(prefixes) and name not in held_back and _NAME.fullmatch(name)
        }
        chosen.update(self.from_files)
        for name in PATH_LISTS:
            here = (os.path.abspath("."), self.from_files.get(name, ""), environ.get(name, ""))
            chosen[name] = join_paths(here)
        return chosen


def run(
    options: argparse.Namespace,
    pool: dict[str, int],
    active: dict[str, list[Slot]],
    exports: Exports,
    console: Console,
) -> int:
    """Start ``active`` (host -> slots) through the chosen back end and wait. Returns the exit code.

    Raises:
        NotImplementedError: no such launcher. StartError: it is not installed, or a host cannot be reached.
        UsageError: it cannot do what the options ask for.
    """
    backend = _backend_class(options)
    over_ssh = options.launcher in _OVER_SSH
    first = next(iter(active))
    if over_ssh and not options.no_ssh_check:
        _check_ssh(first, options.ssh_port)
    options.master_addr = options.master_addr or _master_address(options, first, console)
    world_info = encode_world_info(active)
    if issubclass(backend, PDSHRunner | SSHRunner):
        runner: MultiNodeRunner = backend(options, world_info)
    else:
        runner = backend(options, world_info, pool)  # type: ignore[call-arg]
    _refuse_unsupported(options)
    if not runner.backend_exists():
        raise StartError(f"--launcher {options.launcher}: it is not installed on this host; {_ALTERNATIVES}")
    for name, content in exports.choose(os.environ).items():
        runner.add_export(name, content)
    num_ranks = sum(len(slots) for slots in active.values())
    console.info(
        f"{num_ranks} ranks on {len(active)} hosts ({', '.join(active)}) through {options.launcher}; "
        f"rank 0 at {options.master_addr}:{options.master_port}"
    )
    for name, used in (("MASTER_ADDR", options.master_addr), ("MASTER_PORT", str(options.master_port))):
        if os.environ.get(name, used) != used:
            console.info(f"{name}={os.environ[name]} of the environment is not used; --{name.lower()} sets it")
    environment = dict(os.environ)
    if isinstance(runner, SSHRunner):
        return _run_ssh(runner.get_cmd(environment, active), list(active), environment, console)
    if isinstance(runner, PDSHRunner):
        command, end_command, _ = runner.get_cmd(environment, active)
        return _run_backend(command, environment, console, end_command)
    command = runner.get_cmd(environment, active)  # type: ignore[assignment]
    return _run_backend(command, environment, console, None)


_ALTERNATIVES = (
    "--launcher ssh needs only ssh, and --no_ssh (with --node_rank and --master_addr, the command on every node) "
    "needs nothing"
)


def _backend_class(options: argparse.Namespace) -> type[MultiNodeRunner]:
    if options.launcher not in LAUNCHER_CLASSES:
        raise NotImplementedError(
            f"--launcher {options.launcher}: unknown; known are {', '.join(LAUNCHER_CLASSES)}"
        )
    return LAUNCHER_CLASSES[options.launcher]


def _refuse_unsupported(options: argparse.Namespace) -> None:
    """An option that the back end cannot honour is refused by name."""
    if options.launcher in _OVER_SSH:
        return
    binds = options.launcher in (MPICH_LAUNCHER, IMPI_LAUNCHER)
    refused = [
        flag
        for flag, given in (
            ("--enable_each_rank_log", options.enable_each_rank_log != "None"),
            ("--save_pid", options.save_pid),
            ("--venv_script", options.venv_script is not None),
            ("--bind_cores_to_rank", options.bind_cores_to_rank and not binds),
        )
        if given
    ]
    if refused:
        raise UsageError(
            f"{', '.join(refused)}: the {options.launcher} launcher starts the workers itself and cannot do this; "
            "leave it out, or use --launcher pdsh or ssh"
        )


def _ssh_command(host: str, port: int | None, *words: str, options: Sequence[str] = ()) -> list[str]:
    return ["ssh", *options, *(["-p", str(port)] if port is not None else []), host, *words]


def _ssh_answer(command: Sequence[str]) -> str:
    """Output of a short ssh command; StartError with ssh's own words when it fails."""
    shown = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SSH_SECONDS, check=False)
    except FileNotFoundError:
        raise StartError(f"ssh is not installed on this host; {_ALTERNATIVES}") from None
    except subprocess.TimeoutExpired:
        raise StartError(f"no answer within {_SSH_SECONDS} s from: {shown}") from None
    if done.returncode != 0:
        raise StartError(
            f"this failed with code {done.returncode}: {shown}\n{done.stderr.strip()}\n"
            f"the launcher needs ssh to every host without a password; {_ALTERNATIVES}"
        )
    return done.stdout


def _check_ssh(host: str, port: int | None) -> None:
    _ssh_answer(_ssh_command(host, port, "hostname", options=("-o", "PasswordAuthentication=no")))


def _master_address(options: argparse.Namespace, first: str, console: Console) -> str:
    """Address of the first host: what it says itself, or its name where no ssh is meant to be used."""
    needs_ssh = options.launcher in _OVER_SSH or not options.no_ssh_check
    if options.launcher == SLURM_LAUNCHER or not needs_ssh:
        return first
    words = _ssh_answer(_ssh_command(first, options.ssh_port, "hostname", "-I")).split()
    if not words:
        raise StartError(f"host {first!r} told no address (hostname -I); give one with --master_addr")
    console.debug(f"--master_addr of {first}: {words[0]}")
    return words[0]


def _run_ssh(
    commands: Sequence[list[str]], hosts: Sequence[str], environment: dict[str, str], console: Console
) -> int:
    """One ssh client per host under the same supervision as local workers: when one ends badly, all are ended, and a
    client that ends makes its node end."""
    run_id = new_run_id(environment.get(RUN_ID_VARIABLE))
    environment = {**environment, RUN_ID_VARIABLE: run_id}
    specs = [
        WorkerSpec(
            name=f"node {number}",
            place=f"ssh to {host}",
            argv=tuple(command),
            environment=environment,
            stdin="open",
        )
        for number, (command, host) in enumerate(zip(commands, hosts, strict=True))
    ]
    context = FailureContext(os.uname().nodename, adds_local_rank=False, remote=True)
    return Supervisor(specs, console, run_id=run_id, context=context).run()


def _run_backend(
    command: list[str], environment: dict[str, str], console: Console, end_command: list[str] | None
) -> int:
    """Run a back end to its end; pass terminating signals on, and kill it on a second Ctrl-C."""
    console.debug(f"cmd = {' '.join(command)}")
    spec = WorkerSpec(name=command[0], place="", argv=tuple(command), environment=environment)
    interrupted = 0
    with Wakeups() as wakeups:
        worker = Worker(spec)
        while not worker.look():
            for signum in wakeups.wait(None):
                if signum not in TERMINATING:
                    signal_process(worker.pid, signum)
                    continue
                if interrupted:
                    signal_process(worker.pid, signal.SIGKILL)
                    continue
                interrupted = signum
                console.info(f"{signal_name(signum)} passed on to {command[0]}; a second Ctrl-C kills it")
                if end_command is not None:
                    subprocess.run(end_command, env=environment, check=False)
                signal_process(worker.pid, signum if end_command is None else signal.SIGTERM)
        worker.reap()
    assert worker.ending is not None, "it has ended"
    status = worker.ending.status
    if status and not interrupted:
        console.error(f"{command[0]} {worker.ending.describe()}; exit code {status}")
    return 128 + interrupted if interrupted and status else status

