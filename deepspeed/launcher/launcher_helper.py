"""What MPICH starts in the place of a worker: turns its rank variables into ours, then becomes the worker.

Started as a file by the mpich back end, on every host.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import MutableMapping, Sequence

if __name__ == "__main__":
    # Python put this folder on the module path because the file was started by its name; nothing here is a top-level
    # module, and a stray match would shadow a real one.
    sys.path.pop(0)

from deepspeed.launcher.constants import MPICH_LAUNCHER
from deepspeed.launcher.errors import UsageError
from deepspeed.launcher.options import CommandLine, switch, value

_RANK_NAMES = ("PMIX_RANK", "PMI_RANK")
_LOCAL_RANK_NAMES = ("PALS_LOCAL_RANKID", "MPI_LOCALRANKID")

_COMMAND_LINE = CommandLine(
    program="launcher_helper.py",
    options=(
        value("--launcher", default=MPICH_LAUNCHER, help="which starter's variables to translate"),
        switch("--module", help="the script is a module"),
        switch("--no_python", help="run the script directly"),
        switch("--bind_cores_to_rank", help="give each rank of a node its own cores, with numactl"),
        value("--bind_core_list", default=None, help="cores to share out"),
    ),
    script="user_script",
    arguments="user_args",
    description="Becomes one worker of a run that MPICH started.",
)


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    return _COMMAND_LINE.parse(sys.argv[1:] if args is None else args)


def env_mapping(
    env: MutableMapping[str, str],
    rank_name_list: Sequence[str] | None = None,
    local_rank_name_list: Sequence[str] | None = None,
) -> MutableMapping[str, str]:
    """Set RANK and LOCAL_RANK in ``env`` from the first of the given names that is there, and return it.

    UsageError when the names that are there do not agree on one value, or none is there.
    """
    for target, names in (("RANK", rank_name_list), ("LOCAL_RANK", local_rank_name_list)):
        if names is None:
            continue
        found = {name: env[name] for name in names if name in env}
        if not found:
            raise UsageError(f"{target}: none of {', '.join(names)} is set; was this started by mpirun?")
        if len(set(found.values())) > 1:
            raise UsageError(f"{target}: the starter's variables disagree: {found}")
        env[target] = next(iter(found.values()))
    return env


def main(args: Sequence[str] | None = None) -> None:
    """Replace this process by the worker. Does not return."""
    options = parse_args(args)
    if options.launcher.lower() != MPICH_LAUNCHER:
        raise UsageError(f"--launcher {options.launcher}: only {MPICH_LAUNCHER} needs this helper")
    env = env_mapping(dict(os.environ), _RANK_NAMES, _LOCAL_RANK_NAMES)
    command: list[str] = []
    if options.bind_cores_to_rank:
        from deepspeed.utils.numa import get_numactl_cmd

        num_cores, command = get_numactl_cmd(options.bind_core_list, int(env["LOCAL_SIZE"]), int(env["LOCAL_RANK"]))
        env["OMP_NUM_THREADS"] = str(num_cores)
    if not options.no_python:
        command = [*command, sys.executable, "-u", *(["-m"] if options.module else [])]
    command = [*command, options.user_script, *options.user_args]
    os.execvpe(command[0], command, env)


if __name__ == "__main__":
    main()
