"""Collectives between the ranks of one host: shared memory against gloo, interleaved in the same processes.

    python benchmarks/transport.py [--ranks 2] [--rounds 5] [--json FILE]

Microseconds of a call as a program makes it, `deepspeed.comm` against `torch.distributed`, best and median of the calls
of rank 0. The second table has one busy process more per core (`--busy` of them), so that ranks are taken off their
cores in the middle of calls: there the aim is never to be slower than gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers import run_ranks

WORKER = Path(__file__).with_name("transport_worker.py")
SPIN = "while True: pass"
# The most that is aimed at, by kind and size of the full tensor: gloo's time / ours.
AIMS = {("all_reduce", 4 << 10): 15.0}


def aim(kind: str, nbytes: int) -> float:
    if kind in ("reduce_scatter", "all_gather") and nbytes >= 1 << 20:
        return 5.0
    return AIMS.get((kind, nbytes), 1.0)


def table(title: str, found: dict[str, Any], contended: bool) -> dict[str, Any]:
    print(f"\n{title}\n  {'':<24}{'ours best':>11}{'median':>11}{'gloo best':>11}{'median':>11}   ratios  (to reach)")
    rows = {}
    for name, times in found.items():
        kind, size = name.split("/")
        ours, gloo = times["ours"], times["gloo"]
        ratios = [peer / mine for mine, peer in zip(ours, gloo, strict=True)]
        wanted = 1.0 if contended else aim(kind, int(size))
        numbers = "".join(f"{value:11.1f}" for value in (*ours, *gloo))
        label = f"{kind}, {int(size) >> 10} KiB"
        print(f"  {label:<24}{numbers}   {ratios[0]:.1f}, {ratios[1]:.1f}  ({wanted:g})")
        rows[name] = {"ours": ours, "gloo": gloo, "ratios": ratios}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=len(os.sched_getaffinity(0)), help="busy processes of table two")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    arguments = ["--rounds", str(options.rounds)]
    record = {}
    found = run_ranks(sys.executable, WORKER, options.ranks, arguments)
    record["alone"] = table(f"{options.ranks} ranks, us", found, False)
    busy = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(options.busy)]
    try:
        found = run_ranks(sys.executable, WORKER, options.ranks, arguments)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    record["contended"] = table(f"{options.ranks} ranks beside {options.busy} busy processes, us", found, True)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
