"""Collectives between the ranks of one host: shared memory against gloo, interleaved in the same processes.

    python benchmarks/transport.py [--ranks 2] [--rounds 5] [--json FILE]
    python benchmarks/transport.py --hosts [--ranks 4] [--mbit 1000]   (0: a cable as fast as the kernel)

Microseconds of a call as a program makes it, `deepspeed.comm` against `torch.distributed`, best and median of the calls
of rank 0. The second table has one busy process more per core (`--busy` of them), so that ranks are taken off their
cores in the middle of calls: there the aim is never to be slower than gloo.

``--hosts``: the ranks on two hosts, half on each, instead: first with nothing slow between them (gloo's best case: its
calls inside a host cost what those between hosts do), then, as root, in two network namespaces joined by a cable of
``--mbit``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers import run_ranks
from two_hosts import TwoHosts

WORKER = Path(__file__).with_name("transport_worker.py")
STEP_WORKER = Path(__file__).with_name("transport_step_worker.py")
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
    parser.add_argument("--ranks", type=int, help="default: 2, with --hosts 4")
    parser.add_argument("--hosts", action="store_true", help="on two hosts")
    parser.add_argument("--mbit", type=float, default=1000, help="speed of the cable between them, each way")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=len(os.sched_getaffinity(0)), help="busy processes of table two")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.ranks = options.ranks or (4 if options.hosts else 2)
    arguments = ["--rounds", str(options.rounds)]
    record = on_two_hosts(options, arguments) if options.hosts else on_one_host(options, arguments)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def on_two_hosts(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    record = {}
    found = run_ranks(sys.executable, WORKER, options.ranks, [*arguments, "--hosts", "2"])
    record["fast"] = table(f"{options.ranks} ranks on two hosts, nothing slow between them, us", found, True)
    if os.geteuid() != 0 or shutil.which("tc") is None:
        print("a slow cable needs root, ip and tc: left out")
        return record
    with TwoHosts(options.ranks, options.mbit) as hosts:
        found = run_ranks(sys.executable, WORKER, options.ranks, arguments, hosts.place)
        record["steps"] = step_table(options, hosts)
    record["slow"] = table(f"{options.ranks} ranks on two hosts, {options.mbit:g} Mbit/s between them, us", found, True)
    return record


def step_table(options: argparse.Namespace, hosts: TwoHosts) -> dict[str, Any]:
    """Whole steps by both ways, in alternating runs: milliseconds, best and median of all runs' steps."""
    runs: dict[str, list[dict[str, Any]]] = {"0": [], "1": []}
    for _ in range(options.rounds):
        for switch, found in runs.items():

            def place(rank: int, switch: str = switch) -> tuple[list[str], dict[str, str]]:
                words, further = hosts.place(rank)
                return words, {**further, "DS_SHM": switch}

            found.append(run_ranks(sys.executable, STEP_WORKER, options.ranks, [], place))
    print(f"\na training step, {options.mbit:g} Mbit/s between the hosts, ms, best and median by gloo and by both ways")
    rows = {}
    for name in (key for key in runs["0"][0] if key.startswith("stage")):
        plain, both = (
            [1e3 * f([run[name][i] for run in runs[s]]) for i, f in ((0, min), (1, statistics.median))] for s in "01"
        )
        ratios = [one / other for one, other in zip(plain, both, strict=True)]
        numbers = "".join(f"{value:10.1f}" for value in (*plain, *both))
        print(f"  {name:<12}{numbers}   {ratios[0]:.2f}, {ratios[1]:.2f}")
        rows[name] = {"gloo": plain, "both": both, "ratios": ratios}
    return rows


def on_one_host(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
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
    return record


if __name__ == "__main__":
    main()
