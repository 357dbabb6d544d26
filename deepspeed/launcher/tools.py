"""The small commands beside `deepspeed`: `ds_ssh`, and those whose feature this version does not have yet."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from deepspeed.launcher.console import Console
from deepspeed.launcher.constants import DEFAULT_HOSTFILE
from deepspeed.launcher.errors import REFUSED, UsageError
from deepspeed.launcher.hostfile import fetch_hostfile
from deepspeed.launcher.options import CommandLine, value

_SSH_COMMAND_LINE = CommandLine(
    program="ds_ssh",
    options=(value("-f", "--hostfile", default=DEFAULT_HOSTFILE, help="file with lines 'NAME slots=N'"),),
    script="command",
    arguments="command_args",
    description="Runs a command on every host of a hostfile, through pdsh.",
)


def ds_ssh(args: Sequence[str] | None = None) -> NoReturn:
    """Entry of the console script ds_ssh. Replaces this process by pdsh, so its exit code is pdsh's."""
    options = _SSH_COMMAND_LINE.parse(sys.argv[1:] if args is None else args)
    console = Console()
    if shutil.which("pdsh") is None:
        console.error("ds_ssh: pdsh is not installed on this host (apt install pdsh, dnf install pdsh)")
        sys.exit(1)
    try:
        pool = fetch_hostfile(options.hostfile)
    except UsageError as problem:
        console.error(f"ds_ssh: {problem}")
        sys.exit(REFUSED)
    if pool is None:
        console.error(f"ds_ssh: hostfile {options.hostfile} does not exist; name one with -f")
        sys.exit(1)
    environment = {"PDSH_RCMD_TYPE": "ssh", **os.environ}
    os.execvpe("pdsh", ["pdsh", "-w", ",".join(pool), options.command, *options.command_args], environment)


def _refuse(command: str, instead: str) -> NoReturn:
    Console().error(f"{command} is not available in this version; {instead}")
    sys.exit(REFUSED)


def ds_elastic() -> NoReturn:
    """Entry of ds_elastic."""
    _refuse("ds_elastic", "choose train_batch_size so that every number of workers you may get divides it")


def ds_bench() -> NoReturn:
    """Entry of ds_bench."""
    _refuse("ds_bench", "the benchmarks are in the source tree: make bench")
