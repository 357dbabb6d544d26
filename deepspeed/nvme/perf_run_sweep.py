"""`ds_nvme_tune`: which `aio` settings read and write a disk fastest, in at most twenty seconds.

Every setting is tried once with few bytes; the best ones again, in turns, with more, until the time is used.

Owns: the search and its logs. Does not own: a single measurement (`io_job.py`), what is printed at the end
(`perf_generate_param.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.nvme.ds_aio_args import refine_integer_value
from deepspeed.nvme.perf_generate_param import (
    BENCH_LOG_DIR,
    FINALISTS,
    LOG_NAME,
    READ_LOG_DIR,
    WRITE_LOG_DIR,
    generate_main,
)
from deepspeed.ops.aio.engine import AioEngine
from deepspeed.ops.aio.files import AioFile
from deepspeed.runtime.swap_tensor.swap_folder import SwapFolder
from deepspeed.utils.host_buffer import PAGE, HostBuffer

__all__ = ["DEFAULT_SWEEP_CONFIG", "parse_sweep_arguments", "sweep_main", "tune_main"]

DEFAULT_SWEEP_CONFIG: dict[str, list[Any]] = {
    "block_size": ["1M", "8M"],
    "queue_depth": [32, 128],
    "sequential_requests": [True, False],
    "single_submit": [False, True],
    "io_parallel": [1, 2, 4, 8],
}

_BUDGET_S = 13.0  # of all measuring; the rest of the time is for making files and for Python to start
_SMALLEST = 4 << 20
_LARGEST = 64 << 20  # more bytes say no more about a setting


def parse_sweep_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of `ds_nvme_tune`."""
    parser = argparse.ArgumentParser(prog="ds_nvme_tune", description="Searches the best `aio` settings for a disk.")
    parser.add_argument("--nvme_dir", nargs="+", required=True, help="a folder on each disk that is used at once")
    parser.add_argument("--sweep_config", help="JSON file with lists of values in place of the built-in ones")
    parser.add_argument("--no_read", action="store_true", help="writes only")
    parser.add_argument("--no_write", action="store_true", help="reads only")
    parser.add_argument("--io_size", default="400M", help="most bytes of one transfer")
    parser.add_argument("--gpu", action="store_true", help="to and from memory of the accelerator")
    parser.add_argument("--gds", action="store_true", help="GPUDirect Storage")
    parser.add_argument("--flush_page_cache", action="store_true", help="empty the page cache first (super user)")
    parser.add_argument("--log_dir", default=BENCH_LOG_DIR, help="where results are kept")
    parser.add_argument("--loops", type=int, default=1, help="transfers per measurement")
    parser.add_argument("--verbose", action="store_true", help="print every measurement")
    return parser.parse_args(args)


@dataclass
class _Candidate:
    """One setting, and bytes per second of each measurement."""

    setting: dict[str, Any]
    rates: list[float] = field(default_factory=list)


def _candidates(path: str | None) -> list[_Candidate]:
    """Raises ValueError: a file that is no JSON object of lists, or an unknown key."""
    lists = dict(DEFAULT_SWEEP_CONFIG)
    if path is not None:
        try:
            given = json.loads(Path(path).read_text())
        except (OSError, ValueError) as problem:
            raise ValueError(f"--sweep_config {path}: {problem}") from problem
        if not isinstance(given, dict) or not all(isinstance(value, list) and value for value in given.values()):
            raise ValueError(f"--sweep_config {path}: expected an object of lists, such as {json.dumps(lists)}")
        unknown = sorted(set(given) - set(lists))
        if unknown:
            raise ValueError(f"--sweep_config {path}: unknown {', '.join(unknown)}; there are: {', '.join(lists)}")
        lists |= given
    values = itertools.product(*lists.values())
    return [_Candidate(dict(zip(lists, value, strict=True))) for value in values]


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError."""
    missing = [folder for folder in args.nvme_dir if not os.path.isdir(folder)]
    if missing:
        raise ValueError(f"--nvme_dir: {', '.join(missing)} is not a folder")
    if args.no_read and args.no_write:
        raise ValueError("--no_read with --no_write leaves nothing to measure")
    if args.gds:
        raise ValueError("--gds: GPUDirect Storage is not available in this version; leave it out")
    if refine_integer_value(args.io_size) < 1 or args.loops < 1:
        raise ValueError("--io_size and --loops: expected at least 1")


def _drop_page_cache() -> None:
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as switch:
        switch.write("1\n")


class _Disk:
    """One folder's file and memory, kept over all measurements."""

    def __init__(self, folder: str, nbytes: int, device: Any) -> None:
        self._folder = SwapFolder(Path(folder), 0)
        self._file = AioFile(self._folder.path / "tune.swap", write=True, create=True)
        self._file.reserve(0, nbytes, extend=True)
        self._memory = HostBuffer(for_device=device is not None, private=True).room(nbytes)[:nbytes].random_(0, 256)
        self._device = None if device is None else self._memory.to(device)
        engine = AioEngine(1 << 20, 32, 1)
        engine.start(True, self._file, self._memory, 0).wait()  # blocks of the file exist
        engine.close()

    def rate(self, setting: dict[str, Any], read: bool, nbytes: int, loops: int) -> float:
        """Bytes per second."""
        engine = AioEngine(
            refine_integer_value(setting["block_size"]),
            int(setting["queue_depth"]),
            int(setting["io_parallel"]),
            single_submit=bool(setting["single_submit"]),
            overlap_events=not setting["sequential_requests"],
        )
        memory = self._memory[:nbytes]
        try:
            began = time.perf_counter()
            for _ in range(loops):
                if self._device is not None and not read:
                    memory.copy_(self._device[:nbytes])
                engine.start(not read, self._file, memory, 0).wait()
                if self._device is not None and read:
                    self._device[:nbytes].copy_(memory)
            return nbytes * loops / (time.perf_counter() - began)
        finally:
            engine.close()

    def close(self) -> None:
        self._file.close()
        self._folder.close()


def _search(args: argparse.Namespace, read: bool, budget_s: float) -> list[_Candidate]:
    """Candidates that were measured, the best first."""
    from deepspeed.accelerator.real_accelerator import get_accelerator

    candidates = _candidates(args.sweep_config)
    largest = max(PAGE, min(refine_integer_value(args.io_size), _LARGEST) // PAGE * PAGE)
    ends = time.monotonic() + budget_s
    device = get_accelerator().device_name() if args.gpu else None
    disks: list[_Disk] = []
    try:
        disks += [_Disk(folder, largest, device) for folder in args.nvme_dir]

        def measure(candidate: _Candidate, nbytes: int) -> None:
            rate = sum(disk.rate(candidate.setting, read, nbytes, args.loops) for disk in disks)
            candidate.rates.append(rate)
            if args.verbose:
                print(f"{'read' if read else 'write'} {rate / 1e9:.2f} GB/s {candidate.setting}", flush=True)

        measure(candidates[0], largest)
        share = candidates[0].rates[0] * budget_s / 3 / (len(candidates) * args.loops * len(disks))
        size = int(min(largest, max(min(largest, _SMALLEST), share))) // PAGE * PAGE
        turn, rest = iter(candidates), candidates
        while time.monotonic() < ends:
            candidate = next(turn, None)
            if candidate is None:
                rest, size = _best_first(rest)[:FINALISTS], largest
                turn = iter(rest)
            else:
                measure(candidate, size)
        return _best_first([candidate for candidate in candidates if candidate.rates])
    finally:
        for disk in disks:
            disk.close()


def _best_first(candidates: list[_Candidate]) -> list[_Candidate]:
    """Those that were measured more often come first: their figures are worth more."""
    return sorted(
        candidates, key=lambda candidate: (-min(len(candidate.rates), 2), -statistics.median(candidate.rates))
    )


def sweep_main(args: argparse.Namespace) -> None:
    """Measure, and keep the results below `args.log_dir`. Prints progress.

    Raises ValueError: flags that cannot be. AioError (an OSError): what a disk refuses.
    """
    _check(args)
    if args.flush_page_cache:
        _drop_page_cache()
    kinds = [read for read, left_out in ((True, args.no_read), (False, args.no_write)) if not left_out]
    for read in kinds:
        print(f"measuring {'reads' if read else 'writes'} in {', '.join(args.nvme_dir)} ...", flush=True)
        found = _search(args, read, _BUDGET_S / len(kinds))
        folder = Path(args.log_dir) / (READ_LOG_DIR if read else WRITE_LOG_DIR)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{**one.setting, "bytes_per_second": statistics.median(one.rates)} for one in found]
        (folder / LOG_NAME).write_text(json.dumps(rows, indent=1) + "\n")


def tune_main(args: Sequence[str] | None = None) -> None:
    """Entry of ds_nvme_tune. Ends the process with code 2 for wrong flags, 1 when a file cannot be read or written."""
    options = parse_sweep_arguments(args)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that files go when somebody ends it
    try:
        sweep_main(options)
        generate_main(options.log_dir)
    except ValueError as problem:
        print(f"ds_nvme_tune: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as problem:
        print(f"ds_nvme_tune: {problem}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    """`python -m deepspeed.nvme.perf_run_sweep`."""
    tune_main()


if __name__ == "__main__":
    main()
