"""CPU optimizers against deepspeed 0.19.8's and torch's fused ones: large tensors, many small ones, the ZeRO boundary.

    python benchmarks/cpu_optimizers.py [--rounds 3] [--cases large small ...] [--json FILE]

Each interpreter runs the same worker in turn. A worker measures the bare memory traffic of Adam on the same buffers
(`roof`) between the others, and its times are divided by that before they are compared, since two processes on a shared
machine never see the same memory. "small" is 1000 tensors of 8192 elements; "spin" has a second process that keeps one
core busy. Ratios say how many times faster ours is; `best` from the fastest round of each, `median` from the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers import ROOT, reference_python

WORKER = Path(__file__).with_name("cpu_optimizers_worker.py")
CASES = {
    "large, 1 thread": ("--case", "large", "--threads", "1"),
    "large, 2 threads": ("--case", "large", "--threads", "2"),
    "small, 1 thread": ("--case", "small", "--threads", "1", "--rounds", "25"),
    "small, 2 threads": ("--case", "small", "--threads", "2", "--rounds", "25"),
    "small, 2 threads, spin": ("--case", "small", "--threads", "2", "--rounds", "25", "--spin"),
    "boundary, 1 thread": ("--case", "boundary", "--threads", "1"),
    "boundary, 2 threads": ("--case", "boundary", "--threads", "2"),
}
Times = dict[str, list[float]]


def run(python: str, arguments: tuple[str, ...], **extra: str) -> Times:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": "", **extra}
    command = [python, str(WORKER), *arguments]
    # Not in the repository: the peer would import our package instead of its own.
    cwd = ROOT if python == sys.executable else tempfile.gettempdir()
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def merged(runs: list[Times]) -> dict[str, list[float]]:
    """What -> (its time divided by the roof of its own run, smallest and median) as [best, median]."""
    shares: dict[str, list[list[float]]] = {}
    for times in runs:
        for name, values in times.items():
            best = min(values) / min(times["roof"])
            middle = statistics.median(values) / statistics.median(times["roof"])
            shares.setdefault(name, []).append([best, middle])
    return {name: [min(s[0] for s in all_), statistics.median(s[1] for s in all_)] for name, all_ in shares.items()}


def compare(label: str, arguments: tuple[str, ...], rounds: int, peer: str | None) -> dict[str, Any]:
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(run(sys.executable, arguments))
        if peer:
            theirs.append(run(peer, arguments))
    mine, other = merged(ours), merged(theirs) if peer else {}
    main = "boundary" if "boundary" in mine else "adam"
    record: dict[str, Any] = {"share of roof": [1 / v for v in mine[main]]}
    if peer:
        record["over deepspeed 0.19.8"] = [a / b for a, b in zip(other[main], mine[main], strict=True)]
    for name, key in (("torch fused", "over torch fused"), ("passes", "over the same in passes")):
        if name in mine:
            record[key] = [a / b for a, b in zip(mine[name], mine[main], strict=True)]
    if "lion" in mine:
        record["Lion's time / Adam's"] = [a / b for a, b in zip(mine["lion"], mine["adam"], strict=True)]
        record["all bf16 over fp32"] = [a / b for a, b in zip(mine["adam"], mine["adam, all bf16"], strict=True)]
    print(label)
    for name, (best, middle) in record.items():
        print(f"    {name:<28} best {best:6.2f}   median {middle:6.2f}", flush=True)
    return record


def building() -> dict[str, float]:
    """Cold build of everything, cached load, constructor: seconds, best of three.

    "compilers' processor time" depends less on what else the machine does. Python's own compiling is no part of a load:
    bytecode is kept for these runs, whatever PYTHONDONTWRITEBYTECODE says.
    """
    code = (
        "import resource, time; from deepspeed.native import build; began = time.monotonic(); "
        "build.build_all(); print(time.monotonic() - began); used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(used.ru_utime + used.ru_stime)"
    )
    record = {}
    with tempfile.TemporaryDirectory() as empty:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"DS_NATIVE_CACHE": empty}, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        wall, used = map(float, done.stdout.split())
        record["cold build of all libraries"] = wall
        record["the same with starting Python"] = time.monotonic() - began
        record["compilers' processor time"] = used
    with tempfile.TemporaryDirectory() as bytecode:
        kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": bytecode}
        timings = [run(sys.executable, ("--case", "construct"), **kept) for _ in range(4)]
    for name in timings[0]:
        record[name] = min(times[name][0] for times in timings)
    print("building and loading")
    for name, seconds in record.items():
        print(f"    {name:<32} {1e3 * seconds:8.1f} ms", flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=["building", "large", "small", "boundary"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    peer = reference_python()
    if peer is None:
        print("no reference environment (scripts/reference_env.sh makes one): its columns are left out", flush=True)
    record: dict[str, Any] = {}
    if "building" in options.cases:
        record["building"] = building()
    for label, arguments in CASES.items():
        if any(label.startswith(case) for case in options.cases):
            record[label] = compare(label, arguments, options.rounds, peer)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
