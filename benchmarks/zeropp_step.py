"""A whole training step at stage 3 over a slow link between nodes: plain, ZeRO++, MiCS; bytes counted and time ratios.

    python benchmarks/zeropp_step.py [--rate 1e6] [--layers 8] [--width 384] [--json FILE]

Four ranks as 2 nodes x 2, bf16 weights, every block released as soon as it may be, so that forward and backward both
gather. Bytes are those that leave one node in a step, in units of M(O-1)/O elements of 2 bytes (one plain crossing).
The link is emulated (``slow_link.py``): a transfer that computation covers costs nothing. Modes take
turns; each is compared with plain stage 3 of the same run, best with best and median with median. The ratios mean
something, not the seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from peers import run_ranks

WORKER = Path(__file__).with_name("zeropp_step_worker.py")
NODES, PER_NODE = 2, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1e6, help="bytes a second of a node's emulated link")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each mode")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    arguments = [f"--{key}={getattr(options, key)}" for key in ("rate", "layers", "width", "steps")]
    found = run_ranks(sys.executable, WORKER, NODES * PER_NODE, arguments)
    unit = options.layers * options.width**2 * 2 * (NODES - 1) / NODES
    plain = found["plain"]["seconds"]
    for name, result in found.items():
        best, median = (of(plain) / of(result["seconds"]) for of in (min, statistics.median))
        print(
            f"  {name:<28} {result['bytes'] / unit:7.4f} M between nodes   {min(result['seconds']):6.3f} s   "
            f"{best:5.2f} times plain (median {median:5.2f})   without the link {min(result['free_seconds']):6.3f} s"
        )
    if options.json:
        options.json.write_text(json.dumps({"unit": unit, "modes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
