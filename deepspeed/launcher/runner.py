"""The front end: what the command `deepspeed` runs.

Owns: the command line, the choice between this host alone and several hosts, and what each of the two needs to start.
Does not own: starting workers (launch.py), the commands of multi-node back ends (multinode_runner.py). Never imports
torch, and on one node starts the workers itself: no second launcher process stands between it and them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepspeed.launcher import environment, hostfile
from deepspeed.launcher.capacity import check_number_of_workers
from deepspeed.launcher.console import Console
from deepspeed.launcher.constants import (
    DEFAULT_HOSTFILE,
    DEFAULT_MASTER_PORT,
    PDSH_LAUNCHER,
    PDSH_MAX_FAN_OUT,
)
from deepspeed.launcher.devices import Devices, find_devices
from deepspeed.launcher.errors import REFUSED, StartError, UsageError
from deepspeed.launcher.hostfile import (
    Slot,
    apply_num_nodes_and_gpus,
    encode_world_info,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_node_config,
    parse_node_config_list,
    parse_resource_filter,
)
from deepspeed.launcher.launch import NO_RANK_LOG, WORKER_OPTIONS, NodePlan, UserCommand, pid_file_path, run_node
from deepspeed.launcher.options import LOG_OPTIONS, CommandLine, switch, value
from deepspeed.launcher.rendezvous import is_local_address, local_rendezvous
from deepspeed.launcher.selection import LOCAL_HOST, Request, Selection, select_local_slots

if TYPE_CHECKING:
    from deepspeed.launcher.multinode_runner import MultiNodeRunner

    LAUNCHER_CLASSES: dict[str, type[MultiNodeRunner]]

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DEEPSPEED_ENVIRONMENT_PATHS",
    "DLTS_HOSTFILE",
    "EXCLUDE_ENVS",
    "EXPORT_ENVS",
    "LAUNCHER_CLASSES",
    "PDSH_MAX_FAN_OUT",
    "apply_num_nodes_and_gpus",
    "cli_main",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_node_config",
    "parse_node_config_list",
    "parse_resource_filter",
    "run_autotuning",
]

DLTS_HOSTFILE = DEFAULT_HOSTFILE
# Clients append to these or replace them after import, so they are read when a run starts.
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
EXCLUDE_ENVS = {"AISC_JOB_NAME": ["NCCL_IB_HCA", "UCX_NET_DEVICES"]}
DEEPSPEED_ENVIRONMENT_NAME = environment.environment_file_name()
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]

_EPILOG = """\
devices of one node, first match wins:
  1. --include / --exclude     devices by number; they must be visible
  2. --num_gpus N              the first N visible devices
  3. CUDA_VISIBLE_DEVICES      (or the accelerator's own variable) all it names
  4. every device of the host  on the CPU: one worker per NUMA node
On the CPU more workers than cores can be asked for, up to 8 a core (DS_LAUNCH_MAX_RANKS=N allows N).
MASTER_PORT: on one node a free port unless given.
SIGINT, SIGTERM, SIGHUP and SIGUSR1/2 are passed on to the workers, which have 30 s to end (DS_LAUNCH_GRACE=seconds);
a second Ctrl-C ends them at once. A worker that fails ends all others. Exit code: that of the first failed worker.
examples:
  deepspeed --num_gpus 2 train.py --deepspeed_config ds.json
  deepspeed --include localhost:1,3 --module my.package.train
  deepspeed --hostfile hosts --no_ssh --node_rank 1 --master_addr 10.0.0.1 train.py
"""

_COMMAND_LINE = CommandLine(
    program="deepspeed",
    options=(
        value("-H", "--hostfile", default=DEFAULT_HOSTFILE, help="file with lines 'NAME slots=N'"),
        value("-i", "--include", default="", help="hosts and slots to use: NAME[:SLOT,...][@NAME...]"),
        value("-e", "--exclude", default="", help="hosts and slots to leave out; same form"),
        value("--num_nodes", type=int, default=-1, help="use the first N hosts"),
        value("--min_elastic_nodes", type=int, default=-1, help="not available yet"),
        value("--max_elastic_nodes", type=int, default=-1, help="not available yet"),
        value("--num_gpus", "--num_accelerators", type=int, default=-1, help="workers on each host"),
        value("--master_port", type=int, default=None, help=f"port of rank 0 (several nodes: {DEFAULT_MASTER_PORT})"),
        value("--master_addr", default="", help="address of rank 0 (several nodes: the first host's)"),
        value("--node_rank", type=int, default=-1, help="with --no_ssh: number of this node"),
        value("--launcher", default=PDSH_LAUNCHER, help="pdsh, ssh, openmpi, mpich, impi, slurm or mvapich"),
        value("--launcher_args", default="", help="more arguments for that launcher, as one quoted text"),
        switch("--no_ssh", help="start only this node's workers; every node runs this command"),
        switch("--no_ssh_check", help="do not try ssh before the start"),
        switch("--force_multi", help="use the multi-node launcher even for one host"),
        switch("--save_pid", help="write the launcher's process number to /tmp/<pid>.deepspeed"),
        value("--autotuning", default="", choices=("tune", "run"), help="not available yet"),
        switch("--elastic_training", help="not available yet"),
        value("--ssh_port", type=int, default=None, help="port of the ssh servers"),
        value("--venv_script", default=None, help="script to source on every host before the start"),
        *WORKER_OPTIONS,
        *LOG_OPTIONS,
    ),
    script="user_script",
    arguments="user_args",
    description="Starts a script on every chosen device of this host, or of the hosts of a hostfile.",
    epilog=_EPILOG,
)


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line (that of the process when ``args`` is None). ``user_args`` is what follows the script, byte
    for byte; ``master_port_given`` tells a given port from the default."""
    options = _COMMAND_LINE.parse(sys.argv[1:] if args is None else args)
    options.master_port_given = options.master_port is not None
    if options.master_port is None:
        options.master_port = DEFAULT_MASTER_PORT
    options.launcher = options.launcher.lower()
    return options


def main(args: Sequence[str] | None = None) -> None:
    """Start a run and wait for it. Returns when every worker ended with code 0. POSIX systems only.

    Raises:
        SystemExit: with the code of the worker that failed, 128 + N after signal N.
        ValueError: the request cannot be fulfilled as it stands (`UsageError`).
        RuntimeError: this machine or cluster cannot fulfil it (`StartError`).
    """
    options = parse_args(args)
    code = _run(options, Console(options.log_level))
    if code:
        sys.exit(code)


def cli_main() -> None:
    """Entry of the console script: like `main`, with refusals as a message and exit code 2 instead of a traceback."""
    try:
        main()
    except (UsageError, StartError) as problem:
        Console().error(str(problem))
        sys.exit(REFUSED)
    except KeyboardInterrupt:
        sys.exit(130)


def run_autotuning(args: argparse.Namespace, active_resources: Mapping[str, Sequence[Slot]]) -> None:
    """Entry of the autotuner, which this version does not have."""
    raise UsageError(
        f"--autotuning {args.autotuning}: the autotuner is not available in this version; start without it and set "
        "train_micro_batch_size_per_gpu and zero_optimization.stage in the config yourself"
    )


def _run(options: argparse.Namespace, console: Console) -> int:
    _refuse_unavailable(options)
    _refuse_contradictions(options)
    if os.name != "posix":
        raise StartError(
            f"the launcher needs a POSIX system, this is {sys.platform}; start the script itself, once per rank, with "
            "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, or with torchrun"
        )
    pool = fetch_hostfile(options.hostfile)
    if pool is None:
        if options.hostfile != DEFAULT_HOSTFILE:
            console.warning(f"--hostfile {options.hostfile}: no such file; using this host alone")
        if options.no_ssh and options.num_nodes > 1:
            return _run_one_of_many(options, None, console)
        if options.num_nodes > 1:
            raise UsageError(
                f"--num_nodes {options.num_nodes} needs a hostfile ({options.hostfile} does not exist), or --no_ssh "
                "with --node_rank and --master_addr on every node"
            )
        if options.force_multi:
            return _run_multi_node(options, {LOCAL_HOST: 0}, console)
        return _run_here(options, console)
    active = parse_inclusion_exclusion(pool, options.include, options.exclude)
    active = apply_num_nodes_and_gpus(active, options.num_nodes, options.num_gpus)
    active = {host: slots for host, slots in active.items() if slots}
    if not active:
        raise UsageError("no host with a slot is left after --include / --exclude")
    if options.no_ssh:
        return _run_one_of_many(options, active, console)
    if len(active) > 1 or options.force_multi:
        return _run_multi_node(options, pool, console, active)
    (host,) = active
    return _run_here(options, console, host=host, hostfile_slots=pool[host])


def _refuse_unavailable(options: argparse.Namespace) -> None:
    if options.autotuning:
        run_autotuning(options, {})
    elastic = [
        flag
        for flag, given in (
            ("--elastic_training", options.elastic_training),
            ("--min_elastic_nodes", options.min_elastic_nodes != -1),
            ("--max_elastic_nodes", options.max_elastic_nodes != -1),
        )
        if given
    ]
    if elastic:
        raise UsageError(
            f"{', '.join(elastic)}: elastic training is not available in this version; start a fixed number of workers "
            "(--num_nodes, --num_gpus) and restart the command after a failure, which resumes from the last checkpoint"
        )


def _refuse_contradictions(options: argparse.Namespace) -> None:
    if options.include and options.exclude:
        raise UsageError("--include and --exclude exclude each other; give one of them")
    if (options.num_nodes >= 0 or options.num_gpus >= 0) and (options.include or options.exclude):
        raise UsageError("--num_nodes / --num_gpus count devices and --include / --exclude name them; give one kind")
    if options.num_nodes == 0 or options.num_nodes < -1:
        raise UsageError(f"--num_nodes {options.num_nodes}: at least one node is needed")
    if options.num_gpus == 0 or options.num_gpus < -1:
        raise UsageError(f"--num_gpus {options.num_gpus}: at least one worker is needed on each node")
    if options.module and options.no_python:
        raise UsageError("--module and --no_python exclude each other: a module is run by python")
    if options.bind_core_list is not None and not options.bind_cores_to_rank:
        raise UsageError("--bind_core_list names the cores for --bind_cores_to_rank; give that as well")
    if options.no_ssh and options.force_multi:
        raise UsageError("--no_ssh starts this node only and --force_multi starts nodes from here; give one of them")


# --- this host alone


def _run_here(
    options: argparse.Namespace, console: Console, *, host: str = LOCAL_HOST, hostfile_slots: int | None = None
) -> int:
    _name_unused(options, console)
    _user_command(options).check()
    here = _names_of_this_host()
    if host not in here and not is_local_address(host):
        console.warning(
            f"host {host!r} of the hostfile is the only one chosen and is taken to be this machine "
            f"({os.uname().nodename}); --force_multi starts it over ssh"
        )
    environ = _environment(console)
    devices = find_devices(environ)
    request = Request(
        include=options.include,
        exclude=options.exclude,
        num_devices=options.num_gpus,
        host=host,
        hostfile_slots=hostfile_slots,
        aliases=here if hostfile_slots is None else (),
    )
    _check_number(options, devices, environ)
    selection = select_local_slots(request, devices, environ)
    port = options.master_port if options.master_port_given else None
    with local_rendezvous(options.master_addr, port, environ, console) as meeting:
        console.info(
            f"{_count(len(selection.slots))} on {devices.accelerator} {_slot_list(selection)}({selection.reason}); "
            f"rank 0 at {meeting.address}:{meeting.port}. "
            f"Order: --include/--exclude, --num_gpus, {devices.visible_variable}, all"
        )
        plan = _plan(options, {host: selection.slots}, 0, meeting.address, meeting.port)
        return run_node(plan, devices, console, environ)


def _check_number(options: argparse.Namespace, devices: Devices, environ: Mapping[str, str]) -> None:
    """Before the slots are listed: a list of a billion of them would be the first thing to fill the memory."""
    if options.num_gpus > 0:
        check_number_of_workers(options.num_gpus, f"--num_gpus {options.num_gpus}", devices, environ)


def _names_of_this_host() -> tuple[str, ...]:
    name = os.uname().nodename
    return tuple(dict.fromkeys((LOCAL_HOST, "127.0.0.1", name, name.partition(".")[0])))


def _count(workers: int) -> str:
    return "1 rank" if workers == 1 else f"{workers} ranks"


def _slot_list(selection: Selection) -> str:
    return ",".join(map(str, selection.slots)) + " "


def _name_unused(options: argparse.Namespace, console: Console) -> None:
    """Nothing the user gives is dropped without a word."""
    unused = [
        flag
        for flag, given in (
            (f"--launcher {options.launcher}", options.launcher != PDSH_LAUNCHER),
            ("--launcher_args", bool(options.launcher_args)),
            ("--ssh_port", options.ssh_port is not None),
            ("--venv_script", options.venv_script is not None),
            ("--node_rank", options.node_rank > 0),
        )
        if given
    ]
    if unused:
        console.warning(f"{', '.join(unused)}: without effect, because this host is the only one of the run")


def _environment(console: Console) -> dict[str, str]:
    """The launcher's environment with the variables of the user's ``.deepspeed_env`` files on top."""
    extra = environment.read_environment_files(DEEPSPEED_ENVIRONMENT_PATHS, DEEPSPEED_ENVIRONMENT_NAME)
    if extra:
        changed = [key for key in extra if os.environ.get(key, extra[key]) != extra[key]]
        note = f"; in place of the environment's own: {', '.join(changed)}" if changed else ""
        console.info(f"{DEEPSPEED_ENVIRONMENT_NAME} sets {', '.join(extra)}{note}")
    return environment.merge_environment(os.environ, extra)


# --- several hosts


def _run_one_of_many(options: argparse.Namespace, active: Mapping[str, Sequence[Slot]] | None, console: Console) -> int:
    """``--no_ssh``: every node runs this command and starts its own workers. Needs no ssh, pdsh or MPI."""
    environ = _environment(console)
    devices = find_devices(environ)
    if active is None:
        # Without a hostfile every node is alike, as schedulers hand them out.
        _check_number(options, devices, environ)
        selection = select_local_slots(Request(num_devices=options.num_gpus), devices, environ)
        active = {f"node-{number}": selection.slots for number in range(options.num_nodes)}
    num_nodes = len(active)
    node_rank = 0 if num_nodes == 1 and options.node_rank == -1 else options.node_rank
    if not 0 <= node_rank < num_nodes:
        raise UsageError(
            f"--no_ssh on {num_nodes} nodes needs --node_rank, a number from 0 to {num_nodes - 1} that differs on "
            f"every node; found {options.node_rank}"
        )
    address = options.master_addr or environ.get("MASTER_ADDR") or ("127.0.0.1" if num_nodes == 1 else "")
    if not address:
        raise UsageError("--no_ssh on several nodes needs --master_addr (or MASTER_ADDR): the address of node 0")
    port = options.master_port
    if not options.master_port_given and environ.get("MASTER_PORT", "").isdigit():
        port = int(environ["MASTER_PORT"])
    slots = active[list(active)[node_rank]]
    console.info(
        f"node {node_rank} of {num_nodes}: {_count(len(slots))} on {devices.accelerator} {','.join(map(str, slots))}; "
        f"rank 0 at {address}:{port}"
    )
    return run_node(_plan(options, active, node_rank, address, port), devices, console, environ)


def _run_multi_node(
    options: argparse.Namespace,
    pool: Mapping[str, int],
    console: Console,
    active: Mapping[str, Sequence[Slot]] | None = None,
) -> int:
    from deepspeed.launcher import multinode

    environ = dict(os.environ)
    if active is None:
        devices = find_devices(environ)
        _check_number(options, devices, environ)
        request = Request(include=options.include, exclude=options.exclude, num_devices=options.num_gpus)
        selection = select_local_slots(request, devices, environ)
        active = {LOCAL_HOST: selection.slots}
        pool = {LOCAL_HOST: len(selection.slots)}
    return multinode.run(
        options,
        dict(pool),
        {host: list(slots) for host, slots in active.items()},
        multinode.Exports(
            prefixes=tuple(EXPORT_ENVS),
            excluded={key: tuple(names) for key, names in EXCLUDE_ENVS.items()},
            from_files=environment.read_environment_files(DEEPSPEED_ENVIRONMENT_PATHS, DEEPSPEED_ENVIRONMENT_NAME),
        ),
        console,
    )


def _plan(
    options: argparse.Namespace, world: Mapping[str, Sequence[Slot]], node_rank: int, address: str, port: int
) -> NodePlan:
    return NodePlan(
        world=world,
        node_rank=node_rank,
        master_addr=address,
        master_port=port,
        command=_user_command(options),
        log_folder=None if options.enable_each_rank_log == NO_RANK_LOG else options.enable_each_rank_log,
        core_list=(options.bind_core_list or "") if options.bind_cores_to_rank else None,
        pid_file=pid_file_path(os.getpid()) if options.save_pid else None,
    )


def _user_command(options: argparse.Namespace) -> UserCommand:
    return UserCommand(
        script=options.user_script,
        arguments=tuple(options.user_args),
        module=options.module,
        no_python=options.no_python,
        no_local_rank=options.no_local_rank,
    )


def __getattr__(name: str) -> Any:
    if name == "LAUNCHER_CLASSES":
        from deepspeed.launcher.multinode_runner import LAUNCHER_CLASSES

        return LAUNCHER_CLASSES
    if name == "_parse_hostfile":  # the name under which test suites of wrappers reach the parser
        return hostfile.parse_hostfile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    cli_main()
