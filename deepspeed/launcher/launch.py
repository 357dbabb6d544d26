"""Starts the workers of one node: ranks, devices, environment, command lines.

Owns: from "which slots on which hosts" to one `WorkerSpec` per local rank. Does not own keeping them alive
(supervisor.py) or choosing hosts and slots (runner.py). The front end calls `run_node` in its own process on a single
node; multi-node back ends start this module on every host:

    python -u -m deepspeed.launcher.launch --world_info=... --node_rank=N --master_addr=... script args...
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed.launcher import environment
from deepspeed.launcher.capacity import check_number_of_workers
from deepspeed.launcher.console import Console
from deepspeed.launcher.constants import DEFAULT_MASTER_PORT
from deepspeed.launcher.devices import Devices, find_devices
from deepspeed.launcher.errors import REFUSED, StartError, UsageError
from deepspeed.launcher.hostfile import Slot, decode_world_info
from deepspeed.launcher.options import LOG_OPTIONS, CommandLine, switch, value
from deepspeed.launcher.processes import new_run_id
from deepspeed.launcher.worker import WorkerSpec

PID_FILE_BASEPATH = "/tmp"
NO_RANK_LOG = "None"

WORKER_OPTIONS = (
    switch("--module", help="the script is a module, as in python -m"),
    switch("--no_python", help="run the script directly, without python in front"),
    switch("--no_local_rank", help="do not add --local_rank=N to the script's arguments"),
    value(
        "--enable_each_rank_log",
        default=NO_RANK_LOG,
        metavar="DIR",
        help="write the output of each rank to DIR/<time>_rank<N>.log instead of showing it",
    ),
    switch("--bind_cores_to_rank", help="give each rank of a node its own CPU cores"),
    value("--bind_core_list", default=None, metavar="CORES", help="cores to share out, such as 1,3-5,7; default: all"),
)
"""Options of the workers themselves; the front end has them too and hands them on."""

_COMMAND_LINE = CommandLine(
    program="python -m deepspeed.launcher.launch",
    options=(
        value("--node_rank", type=int, default=0, help="which of the hosts of --world_info this is"),
        value("--master_addr", default="127.0.0.1", help="address of rank 0"),
        value("--master_port", type=int, default=DEFAULT_MASTER_PORT, help="port of rank 0"),
        value("--world_info", default="None", help="base64 text of the JSON object {host: [slot, ...]}"),
        *WORKER_OPTIONS,
        switch("--end_with_stdin", help="end the workers when the standard input closes"),
        value("--save_pid", type=int, default=0, metavar="PID", help=f"write {PID_FILE_BASEPATH}/PID.deepspeed"),
        *LOG_OPTIONS,
    ),
    script="training_script",
    arguments="training_script_args",
    description="Starts the workers of one node. Normally started by `deepspeed`, once per host.",
)


@dataclass(frozen=True)
class UserCommand:
    """What each worker runs."""

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    no_local_rank: bool = False

    def argv(self, local_rank: int) -> tuple[str, ...]:
        head = () if self.no_python else (sys.executable, "-u", *(("-m",) if self.module else ()))
        rank = () if self.no_local_rank else (f"--local_rank={local_rank}",)
        return (*head, self.script, *rank, *self.arguments)

    def check(self) -> None:
        """Refuse, before anything starts, what cannot run."""
        if self.module and self.no_python:
            raise UsageError("--module and --no_python exclude each other: a module is run by python")
        if not self.module and not self.no_python and not os.path.exists(self.script):
            raise UsageError(f"{self.script}: no such script (current folder: {os.getcwd()})")


@dataclass(frozen=True)
class NodePlan:
    """Everything the start of one node needs.

    world: slots of every host of the run, in rank order; node_rank: which of them this host is.
    core_list: cores to bind ranks to ("" for all), None for no binding. pid_file: path, None for none.
    end_with_stdin: the standard input is held open by the front end on another host; end the workers when it closes.
    """

    world: Mapping[str, Sequence[Slot]]
    node_rank: int
    master_addr: str
    master_port: int
    command: UserCommand
    log_folder: str | None = None
    core_list: str | None = None
    pid_file: str | None = None
    end_with_stdin: bool = False

    @property
    def local_slots(self) -> Sequence[Slot]:
        return self.world[list(self.world)[self.node_rank]]

    @property
    def first_rank(self) -> int:
        return sum(len(slots) for slots in list(self.world.values())[: self.node_rank])

    @property
    def world_size(self) -> int:
        return sum(len(slots) for slots in self.world.values())


def run_node(
    plan: NodePlan, devices: Devices, console: Console, base_environment: Mapping[str, str] | None = None
) -> int:
    """Start the workers of this node, wait for them, return the exit code to hand on.

    Raises:
        UsageError: the script does not exist, or a slot names a device this host does not have.
    """
    # Imported here so that this module, and the front end with it, can be imported where there are no POSIX signals.
    from deepspeed.launcher.diagnosis import FailureContext
    from deepspeed.launcher.supervisor import Supervisor

    plan.command.check()
    _check_slots(plan, devices)
    base = os.environ if base_environment is None else base_environment
    host = list(plan.world)[plan.node_rank]
    check_number_of_workers(len(plan.local_slots), f"slots of {host}", devices, base)
    run_id = new_run_id(base.get(environment.RUN_ID_VARIABLE))
    specs = _worker_specs(plan, devices, console, base, run_id)
    supervisor = Supervisor(
        specs,
        console,
        run_id=run_id,
        context=FailureContext(os.uname().nodename, adds_local_rank=not plan.command.no_local_rank),
        forward_to_groups=plan.command.no_python,
        end_with_stdin=plan.end_with_stdin,
    )
    if plan.pid_file is None:
        return supervisor.run()
    with open(plan.pid_file, "w", encoding="ascii") as text:
        text.write(str(os.getpid()))
    try:
        return supervisor.run()
    finally:
        os.unlink(plan.pid_file)


def pid_file_path(pid: int) -> str:
    """File that holds the number of the process to signal; named after the process the user started."""
    return os.path.join(PID_FILE_BASEPATH, f"{pid}.deepspeed")


def _check_slots(plan: NodePlan, devices: Devices) -> None:
    if not 0 <= plan.node_rank < len(plan.world):
        raise UsageError(f"--node_rank {plan.node_rank}: the run has {len(plan.world)} nodes, numbered from 0")
    host = list(plan.world)[plan.node_rank]
    if not plan.local_slots:
        raise UsageError(f"host {host!r} has no slot in this run")
    if devices.unbounded or devices.ids is None:
        return
    missing = [slot for slot in plan.local_slots if isinstance(slot, int) and slot not in devices.ids]
    if missing:
        raise UsageError(
            f"host {host!r} is to use {devices.accelerator} device {', '.join(map(str, missing))}, but it has "
            f"{', '.join(map(str, devices.ids)) or 'none'}; correct the hostfile or the filter"
        )


def _worker_specs(
    plan: NodePlan, devices: Devices, console: Console, base: Mapping[str, str], run_id: str
) -> list[WorkerSpec]:
    slots, device = plan.local_slots, devices.accelerator
    shared = dict(base)
    shared.update(
        MASTER_ADDR=plan.master_addr,
        MASTER_PORT=str(plan.master_port),
        WORLD_SIZE=str(plan.world_size),
        CROSS_RANK=str(plan.node_rank),
        CROSS_SIZE=str(len(plan.world)),
        LOCAL_SIZE=str(len(slots)),
    )
    shared[environment.RUN_ID_VARIABLE] = run_id
    # A user who hides the GPUs to train on the CPU must find them hidden in the workers too.
    if not devices.unbounded or devices.visible_variable not in base:
        shared[devices.visible_variable] = ",".join(map(str, slots))
    if len(slots) > 1 and plan.core_list is None and "OMP_NUM_THREADS" not in base:
        shared["OMP_NUM_THREADS"] = str(environment.threads_per_rank(len(slots)))
    stamp = time.strftime("%Y%m%d%H%M%S")
    if plan.log_folder is not None:
        os.makedirs(plan.log_folder, exist_ok=True)
    specs = []
    for local_rank, slot in enumerate(slots):
        rank = plan.first_rank + local_rank
        binding = _binding(plan, local_rank, console)
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        if binding is not None:
            own["OMP_NUM_THREADS"] = str(binding.num_cores)
        log_path = None
        if plan.log_folder is not None:
            log_path = os.path.join(plan.log_folder, f"{stamp}_rank{rank}.log")
        specs.append(
            WorkerSpec(
                name=f"rank {rank}",
                place=f"local rank {local_rank}, {device if devices.unbounded else f'{device} device {slot}'}",
                argv=(*(binding.prefix if binding is not None else ()), *plan.command.argv(local_rank)),
                environment={**shared, **own},
                log_path=log_path,
                stdin="empty" if plan.end_with_stdin else "inherit",
                cores=binding.cores if binding is not None else (),
            )
        )
    return specs


@dataclass(frozen=True)
class _Binding:
    """Cores of one rank: through ``numactl`` in front of the command, or, without it, by number."""

    num_cores: int
    prefix: tuple[str, ...]
    cores: tuple[int, ...]


def _binding(plan: NodePlan, local_rank: int, console: Console) -> _Binding | None:
    if plan.core_list is None:
        return None
    import contextlib
    import io
    import shutil

    from deepspeed.utils import numa

    # Its advice to install numactl is for callers that cannot do without; we can.
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            num_cores, prefix = numa.get_numactl_cmd(plan.core_list or None, len(plan.local_slots), local_rank)
    except ValueError as problem:
        raise UsageError(f"--bind_cores_to_rank: {problem}") from None
    if shutil.which("numactl") is not None:
        return _Binding(num_cores, tuple(prefix), ())
    if not hasattr(os, "sched_setaffinity"):
        raise StartError("--bind_cores_to_rank: this system can bind only with numactl, which is not installed")
    if local_rank == 0:
        console.info("numactl is not installed: ranks are bound to cores, but their memory is not bound to a NUMA node")
    cores = tuple(numa.parse_range_list(prefix[prefix.index("-C") + 1]))
    outside = sorted(set(cores) - os.sched_getaffinity(0))
    if outside:
        raise UsageError(
            f"--bind_core_list {plan.core_list}: this process may not use core {', '.join(map(str, outside))}"
        )
    return _Binding(num_cores, (), cores)


def terminate_process_tree(pid: int) -> None:
    """End a process and all its descendants: SIGTERM, and SIGKILL for those that are still there after a second."""
    import psutil

    try:
        root = psutil.Process(pid)
        tree = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        try:
            process.terminate()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(tree, timeout=1)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line of one node (cut `sys.argv` when ``args`` is None)."""
    return _COMMAND_LINE.parse(sys.argv[1:] if args is None else args)


def main(args: Sequence[str] | None = None) -> None:
    """Entry of ``python -m deepspeed.launcher.launch``. Leaves with the workers' exit code when it is not 0."""
    options = parse_args(args)
    console = Console(options.log_level)
    if options.world_info == "None":
        raise UsageError("--world_info is missing: which slots of which hosts take part in the run")
    plan = NodePlan(
        world=decode_world_info(options.world_info),
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
        command=UserCommand(
            script=options.training_script,
            arguments=tuple(options.training_script_args),
            module=options.module,
            no_python=options.no_python,
            no_local_rank=options.no_local_rank,
        ),
        log_folder=None if options.enable_each_rank_log == NO_RANK_LOG else options.enable_each_rank_log,
        core_list=(options.bind_core_list or "") if options.bind_cores_to_rank else None,
        pid_file=pid_file_path(options.save_pid) if options.save_pid else None,
        end_with_stdin=options.end_with_stdin,
    )
    code = run_node(plan, find_devices(os.environ), console)
    if code:
        sys.exit(code)


def _cli() -> None:
    try:
        main()
    except (UsageError, StartError) as problem:
        Console().error(str(problem))
        sys.exit(REFUSED)


if __name__ == "__main__":
    _cli()
