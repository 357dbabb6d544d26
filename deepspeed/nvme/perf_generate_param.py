"""What a sweep has found: the best setting of each direction, and the `aio` section for both.

Owns: reading the logs and the choice. Does not own: measuring (`perf_run_sweep.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.nvme.ds_aio_args import refine_integer_value

__all__ = ["BENCH_LOG_DIR", "FINALISTS", "LOG_NAME", "READ_LOG_DIR", "WRITE_LOG_DIR", "aio_section", "generate_main"]

BENCH_LOG_DIR = "_aio_bench_logs"
READ_LOG_DIR = "_aio_bench_read_logs"
WRITE_LOG_DIR = "_aio_bench_write_logs"
LOG_NAME = "results.json"
FINALISTS = 6
"""So many settings of each direction are measured more than once."""

_RATE = "bytes_per_second"


def _load(folder: Path) -> list[dict[str, Any]]:
    """The rows of one direction, the best first; none if it was not measured."""
    path = folder / LOG_NAME
    return json.loads(path.read_text()) if path.exists() else []


def _key(row: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in row.items() if name != _RATE}, sort_keys=True)


def aio_section(row: dict[str, Any]) -> dict[str, Any]:
    """A measured setting in the words of the config section `aio`."""
    return {
        "single_submit": bool(row["single_submit"]),
        "overlap_events": not row["sequential_requests"],
        "intra_op_parallelism": int(row["io_parallel"]),
        "queue_depth": int(row["queue_depth"]),
        "block_size": refine_integer_value(row["block_size"]),
    }


def _best(reads: list[dict[str, Any]], writes: list[dict[str, Any]]) -> dict[str, Any]:
    """A step reads what it writes: the setting with the least time for a byte each way.

    Compared are the finalists of either direction, as far as they have figures of both.
    """
    if not reads or not writes:
        return (reads or writes)[0]
    read_rate, write_rate = ({_key(row): row[_RATE] for row in rows} for rows in (reads, writes))
    finalists = {_key(row): row for row in reads[:FINALISTS] + writes[:FINALISTS]}
    both = [key for key in finalists if key in read_rate and key in write_rate]
    if not both:
        return reads[0]
    return finalists[min(both, key=lambda key: 1 / read_rate[key] + 1 / write_rate[key])]


def generate_main(log_dir: str | Path) -> None:
    """Print the best settings found below ``log_dir``, and the `aio` section to paste.

    Raises ValueError: there are no results.
    """
    reads, writes = _load(Path(log_dir) / READ_LOG_DIR), _load(Path(log_dir) / WRITE_LOG_DIR)
    if not reads and not writes:
        raise ValueError(f"no results in {log_dir}; ds_nvme_tune --nvme_dir DIR --log_dir {log_dir} makes some")
    for way, rows in (("read", reads), ("write", writes)):
        if rows:
            print(f"best {way}: {rows[0][_RATE] / 1e9:.2f} GB/s with {json.dumps(aio_section(rows[0]))}")
    print(json.dumps({"aio": aio_section(_best(reads, writes))}, indent=4))


def main(args: Sequence[str] | None = None) -> None:
    """`python -m deepspeed.nvme.perf_generate_param`."""
    parser = argparse.ArgumentParser(description="Prints the best settings of an earlier ds_nvme_tune.")
    parser.add_argument("--log_dir", type=Path, default=Path(BENCH_LOG_DIR))
    parser.add_argument("--verbose", action="store_true")
    generate_main(parser.parse_args(args).log_dir)


if __name__ == "__main__":
    main()
