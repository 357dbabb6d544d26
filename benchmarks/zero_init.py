"""Building a model of 100M parameters under `zero.Init` on 2 ranks: memory at its highest, and time.

    python benchmarks/zero_init.py [--ranks 2] [--rounds 5] [--json FILE]

Owns: the model's shape and the verdict; `zero_init_worker.py` measures. Where deepspeed 0.19.8 has an environment (see
`peers.py`), both run the same file in turns. Time goes from the first constructor to the last rank's end of the
context; building the same model whole, without communication, is beside it. Memory is the process's resident set above
what it was before, of the rank that needs most, in one further run each in which the C library gives freed blocks back
at once (else what it keeps for later would be counted as held). The time of that run is shown, and not judged: there
every page of every tensor is a new one, for both sides.

Verdict: peak at most this rank's shards + the largest parameter + 50 MB, in at most half of the peer's time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from peers import alternate

SHAPE = (16_384, 1_024, 80)  # vocabulary, width, layers: 16.8M + 80 x 1.05M parameters, fp32
HEADROOM_NBYTES = 50_000_000
ITEM = 4


def summarize(runs: list[dict[str, Any]], memory: list[dict[str, Any]]) -> dict[str, Any]:
    first = runs[0]
    shards = first["numel"] * ITEM // first["world"]
    return {
        "numel": first["numel"],
        "best_s": min(run["init_s"] for run in runs),
        "init_s": statistics.median(run["init_s"] for run in runs),
        "new_pages_s": min(run["init_s"] for run in memory),
        "bare_s": statistics.median(run["bare_s"] for run in runs),
        "peak_mb": max(run["peak"] for run in memory) / 1e6,
        "after_mb": max(run["after"] for run in memory) / 1e6,
        "allowed_mb": (shards + first["largest"] * ITEM + HEADROOM_NBYTES) / 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    worker, arguments = Path(__file__).with_name("zero_init_worker.py"), [str(part) for part in SHAPE]
    results = alternate(worker, options.ranks, arguments, options.rounds)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    memory = alternate(worker, options.ranks, arguments, 1)
    rows = {name: summarize(runs, memory[name]) for name, runs in results.items()}
    times = f"{'best s':>8} {'median s':>8} {'new pages s':>11} {'whole s':>8}"
    print(f"{'':10} {times} {'peak MB':>9} {'held MB':>9} {'allowed MB':>11}")
    for name, row in rows.items():
        times = f"{row['best_s']:8.2f} {row['init_s']:8.2f} {row['new_pages_s']:11.2f} {row['bare_s']:8.2f}"
        print(f"{name:10} {times} {row['peak_mb']:9.1f} {row['after_mb']:9.1f} {row['allowed_mb']:11.1f}")
    reached = rows["ours"]["peak_mb"] <= rows["ours"]["allowed_mb"]
    if "reference" in rows:
        ratio = rows["reference"]["init_s"] / rows["ours"]["init_s"]
        best = rows["reference"]["best_s"] / rows["ours"]["best_s"]
        print(f"{ratio:.2f} times as fast as the reference (best rounds: {best:.2f})")
        reached = reached and ratio >= 2.0
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    print("reached" if reached else "not reached")
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
