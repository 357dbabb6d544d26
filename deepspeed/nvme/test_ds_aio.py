"""`ds_io`: times reads or writes of files, by one process or several at once.

Owns: the processes and the report. Does not own: flags (`ds_aio_args.py`), one process's part (`io_job.py`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from typing import Any

from deepspeed.nvme.ds_aio_args import MAPPING_DELIMITER, get_validated_args
from deepspeed.nvme.io_job import IoJob, run

__all__ = ["ds_io_main", "measure"]

_GIB = 1 << 30


def _jobs(args: argparse.Namespace) -> list[IoJob]:
    """One job per process; folders take turns."""
    places: list[tuple[str, int]] = [(args.folder, 0)]
    if args.folder_to_device_mapping:
        pairs = [mapping.rpartition(MAPPING_DELIMITER) for mapping in args.folder_to_device_mapping]
        places = [(folder, int(device)) for folder, _, device in pairs]
    count = max(args.multi_process, len(places))
    jobs = []
    for number in range(count):
        folder, device = places[number % len(places)]
        jobs.append(
            IoJob(
                folder=folder,
                io_size=args.io_size,
                read=args.read,
                block_size=args.block_size,
                queue_depth=args.queue_depth,
                single_submit=args.single_submit,
                overlap_events=not args.sequential_requests,
                threads=args.io_parallel,
                engine=args.engine,
                loops=args.loops,
                warmup_loops=args.warmup_loops,
                device=device if args.gpu else None,
                pinned=not args.slow_bounce_buffer,
                validate=args.validate,
                new_file_each_time=args.different_file_each_iteration,
                legacy_save=args.torch_legacy_save,
            )
        )
    return jobs


def _part(job: IoJob, number: int, barrier: Any, answers: Any) -> None:
    """A process of its own. Its failure is an answer too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        answers.put((number, run(job, number, barrier.wait)))
    except BaseException as problem:
        barrier.abort()
        answers.put((number, f"{type(problem).__name__}: {problem}"))


def measure(jobs: Sequence[IoJob]) -> list[list[float]]:
    """Seconds of each transfer of each job, all at once. Raises OSError or RuntimeError: what one process met."""
    if len(jobs) == 1:
        return [run(jobs[0])]
    # A fork saves importing torch again; with an accelerator in use it is not allowed.
    forks = "fork" in multiprocessing.get_all_start_methods() and all(job.device is None for job in jobs)
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    barrier, answers = context.Barrier(len(jobs)), context.Queue()
    processes = [
        context.Process(target=_part, args=(job, number, barrier, answers), daemon=True)
        for number, job in enumerate(jobs)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        for _ in processes:
            number, answer = answers.get(timeout=600)
            found[number] = answer
    finally:
        for process in processes:
            process.join(timeout=10)
            process.terminate()
    failed = [answer for answer in found.values() if isinstance(answer, str)]
    if failed:
        # The others only say that the barrier was left.
        raise RuntimeError(next((text for text in failed if "BrokenBarrierError" not in text), failed[0]))
    return [found[number] for number in range(len(jobs))]


def ds_io_main(args: Sequence[str] | None = None) -> None:
    """Entry of ds_io. Ends the process with code 2 for wrong flags, 1 when a file cannot be read or written."""
    try:
        options = get_validated_args(args)
    except ValueError as problem:
        print(f"ds_io: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
    # So that files go when somebody ends it.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        _report(options, measure(_jobs(options)))
    except (OSError, RuntimeError) as problem:
        print(f"ds_io: {problem}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(options: argparse.Namespace, seconds: list[list[float]]) -> None:
    skip = 0 if options.include_warmup_time else options.warmup_loops
    way = "Read" if options.read else "Write"
    together = 0.0
    for number, times in enumerate(seconds):
        counted = times[skip:]
        speed = options.io_size * len(counted) / sum(counted)
        together += speed
        print(
            f"process {number}: {way} Speed = {speed / _GIB:.3f} GB/s ({len(counted)} transfers of {options.io_size})"
        )
    print(f"E2E {way} Speed = {together / _GIB:.3f} GB/s")


if __name__ == "__main__":
    ds_io_main()
