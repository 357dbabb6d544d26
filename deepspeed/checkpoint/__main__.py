"""``python -m deepspeed.checkpoint COMMAND``: questions to checkpoints, without an engine or a GPU.

    inspect DIR          what a checkpoint holds: run, files, every tensor and where its elements lie
    verify DIR           whether every byte is the one that was saved and every element is there
    diff DIR OTHER       how the tensors of two checkpoints differ, whatever layouts they have
    convert DIR ...      the same state in another layout
    merge DIR DIR ...    one checkpoint from the disks of several nodes

DIR is a checkpoint folder (its ``latest`` tag, or ``--tag``) or a tag folder. Exit status: 0 fine, 1 damaged or
different, 2 not to be read or wrong use. ``--json`` prints one object for programs.

Owns: the choice of a command and its exit status. Does not own: what commands do (``tool/``).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

from deepspeed.checkpoint.errors import CheckpointError

# name -> (module, one line). Only the module of the chosen command is imported; one that is absent is not listed.
COMMANDS = {
    "inspect": ("deepspeed.checkpoint.tool.inspect", "what a checkpoint holds and where each element lies"),
    "verify": ("deepspeed.checkpoint.tool.verify", "check sizes, checksums and completeness"),
    "diff": ("deepspeed.checkpoint.tool.diff", "compare the tensors of two checkpoints of any layout"),
    "convert": ("deepspeed.checkpoint.tool.convert", "write a checkpoint in another layout"),
    "merge": ("deepspeed.checkpoint.tool.merge", "put the disks of several nodes together"),
}
UNREADABLE = 2


def make_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser of the whole program; ``chosen``: the command whose own arguments it knows."""
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed.checkpoint",
        description="Look into, check, compare, convert and merge checkpoints.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, line) in COMMANDS.items():
        if importlib.util.find_spec(module) is None:
            continue
        command = commands.add_parser(name, help=line, description=f"{name}: {line}.")
        if name == chosen:
            found = importlib.import_module(module)
            found.add_arguments(command)
            command.set_defaults(run=found.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. Problems of the checkpoint itself are one line on stderr, no traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in given if word in COMMANDS), None)
    options = make_parser(chosen).parse_args(given)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # `... | head`: whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CheckpointError, ValueError, OSError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return UNREADABLE
    return status


if __name__ == "__main__":
    raise SystemExit(main())
