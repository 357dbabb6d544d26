"""The command ``python -m deepspeed.checkpoint.ds_to_universal``: a tag into a universal folder.

This release loads any tag at any number of ranks and any stage without it; the folder is for DeepSpeed, for tools that
want one file per parameter, and for scripts written around this step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.errors import CheckpointError

__all__ = ["main", "parse_arguments"]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of the command; ``argv`` None: those of the process."""
    parser = argparse.ArgumentParser(prog="ds_to_universal", description=__doc__)
    add = parser.add_argument
    add("--input_folder", type=str, required=True, help="a tag folder, like checkpoints/global_step10")
    add("--output_folder", type=str, required=True, help="folder to write; latest_universal is written beside it")
    add("--num_extract_workers", default=4, type=int, help="files copied at a time; the larger of both counts")
    add("--num_merge_workers", default=2, type=int, help="see --num_extract_workers: extracting and merging are one")
    add("--keep_temp_folder", action="store_true", help="accepted; there is no temporary folder to keep")
    add("--no_strict", dest="strict", action="store_false", help="patterns may match no parameter")
    add("--inject_missing_state", action="store_true",
        help="join tensor-parallel slices along dim 0 where the tag does not say how")  # fmt: skip
    add("--for_stage", type=int, choices=(1, 2, 3), default=None,
        help="the ZeRO stage of DeepSpeed that will load it (default: the one the tag was saved at)")  # fmt: skip
    return parser.parse_args(argv)


def main(args: Any) -> None:
    """Convert as ``args`` says, a namespace with the flags' names. Raises CheckpointError."""
    from deepspeed.checkpoint.universal.write import convert

    record = convert(
        Path(args.input_folder),
        Path(args.output_folder),
        workers=max(int(getattr(args, "num_extract_workers", 4)), int(getattr(args, "num_merge_workers", 2))),
        stage=getattr(args, "for_stage", None),
        strict=bool(getattr(args, "strict", True)),
        inject_missing_state=bool(getattr(args, "inject_missing_state", False)),
    )
    print(f"{args.output_folder}: {len(record.parameters)} parameters, form {record.form!r}")


def cli_main() -> int:
    """The command; its exit status."""
    try:
        main(parse_arguments())
    except (CheckpointError, OSError) as error:
        print(f"ds_to_universal: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(cli_main())
