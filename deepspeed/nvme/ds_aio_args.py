"""The command line of `ds_io`.

Owns: flags, their checks, sizes with suffixes. Does not own: the measurement (`io_job.py`).
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence

__all__ = [
    "MAPPING_DELIMITER", "VALID_ENGINES", "get_validated_args", "parse_arguments", "refine_args",
    "refine_integer_value", "validate_args",
]  # fmt: skip

MAPPING_DELIMITER = ":"
VALID_ENGINES = ["aio_handle", "aio_basic", "torch_io", "torch_fastio"]

_SIZE = re.compile(r"(\d+)([KMG]?)", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def refine_integer_value(value: str | int) -> int:
    """Bytes of a size such as 4096, 400M or 1g.

    Raises ValueError for other text.
    """
    found = _SIZE.fullmatch(str(value).strip())
    if found is None:
        raise ValueError(f"{value!r} is no size; expected a number of bytes, or one with K, M or G behind it")
    return int(found[1]) * _UNITS[found[2].upper()]


def parse_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags as they are written."""
    parser = argparse.ArgumentParser(prog="ds_io", description="Times reads or writes of files.")

    def switch(flag: str, text: str) -> None:
        parser.add_argument(flag, action="store_true", help=text)

    parser.add_argument("--folder", help="where the files are made")
    parser.add_argument(
        "--folder_to_device_mapping", nargs="+", default=[], metavar="FOLDER:DEVICE",
        help="folders, each with the index of an accelerator, in place of --folder",
    )  # fmt: skip
    parser.add_argument("--io_size", required=True, help="bytes of each transfer, such as 400M")
    parser.add_argument("--fast_io_size", default="64M", help="buffer of torch_fastio")
    switch("--read", "time reads (else writes)")
    parser.add_argument("--multi_process", type=int, default=1, help="processes, each with a file of its own")
    parser.add_argument("--block_size", default="1M", help="bytes of one request")
    parser.add_argument("--queue_depth", type=int, default=32, help="requests in flight")
    switch("--single_submit", "hand requests to the system one at a time")
    switch("--sequential_requests", "submit requests when the ones before have ended")
    switch("--validate", "compare with an ordinary read")
    parser.add_argument("--engine", default="aio_handle", help=f"one of {', '.join(VALID_ENGINES)}")
    parser.add_argument("--loops", type=int, default=3, help="transfers that are timed")
    parser.add_argument("--io_parallel", type=int, default=None, help="threads that share a transfer")
    switch("--gpu", "to and from memory of the accelerator, by way of the host")
    switch("--use_gds", "GPUDirect Storage (needs --gpu)")
    switch("--slow_bounce_buffer", "host buffer that is not page-locked")
    switch("--torch_legacy_save", "old format of torch.save")
    switch("--use_accelerator_pin_memory", "page-lock by the accelerator")
    parser.add_argument("--warmup_loops", type=int, default=1, help="transfers before those that are timed")
    switch("--include_warmup_time", "count the first transfers too")
    switch("--different_file_each_iteration", "a new file for each transfer")
    return parser.parse_args(args)


def refine_args(args: argparse.Namespace) -> argparse.Namespace:
    """Sizes become numbers. Raises ValueError."""
    for name in ("io_size", "fast_io_size", "block_size"):
        setattr(args, name, refine_integer_value(getattr(args, name)))
    args.io_parallel = args.io_parallel or 1
    return args


def validate_args(args: argparse.Namespace) -> None:
    """Raises ValueError: what is wrong, and what would be right. Changes nothing."""
    problems = []
    if bool(args.folder) == bool(args.folder_to_device_mapping):
        problems.append("give one of --folder and --folder_to_device_mapping")
    for mapping in args.folder_to_device_mapping:
        folder, _, device = mapping.rpartition(MAPPING_DELIMITER)
        if not folder or not device.isdigit():
            problems.append(f"--folder_to_device_mapping {mapping}: expected FOLDER:DEVICE, such as /local_nvme:0")
    folders = [args.folder] if args.folder else []
    folders += [mapping.rpartition(MAPPING_DELIMITER)[0] for mapping in args.folder_to_device_mapping]
    problems += [f"{folder} is not a folder" for folder in folders if folder and not os.path.isdir(folder)]
    if args.engine not in VALID_ENGINES:
        problems.append(f"--engine {args.engine}: expected one of {', '.join(VALID_ENGINES)}")
    if args.engine == "torch_fastio":
        problems.append("--engine torch_fastio is not available in this version; use aio_handle or torch_io")
    if args.use_gds:
        problems.append("--use_gds: GPUDirect Storage is not available in this version; leave it out")
    for name in ("io_size", "block_size", "queue_depth", "multi_process", "loops", "io_parallel"):
        if getattr(args, name) < 1:
            problems.append(f"--{name}: expected at least 1, found {getattr(args, name)}")
    if args.warmup_loops < 0:
        problems.append(f"--warmup_loops: expected at least 0, found {args.warmup_loops}")
    if problems:
        raise ValueError("; ".join(problems))


def get_validated_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags with sizes as numbers. Raises ValueError as :func:`validate_args`."""
    parsed = refine_args(parse_arguments(args))
    validate_args(parsed)
    return parsed
