"""Building a model of 100M parameters under `zero.Init` on 2 ranks: memory at its highest, and time.

    python benchmarks/zero_init.py [--ranks 2] [--rounds 3] [--json FILE]

Owns: the model's shape and the verdict; `zero_init_worker.py` measures. Where deepspeed 0.19.8 has an environment (see
`peers.py`), both run the same file in turns. Memory is the process's resident set above what it was before, of the rank
that needs most. Time goes from the first constructor to the last rank's end of the context; building the same model
whole, without communication, is beside it.

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


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    first = runs[0]
    shards = first["numel"] * ITEM // first["world"]
    return {
        "numel": first["numel"],
        "init_s": statistics.median(run["init_s"] for run in runs),
        "bare_s": statistics.median(run["bare_s"] for run in runs),
        "peak_mb": max(run["peak"] for run in runs) / 1e6,
        "after_mb": max(run["after"] for run in runs) / 1e6,
        "allowed_mb": (shards + first["largest"] * ITEM + HEADROOM_NBYTES) / 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # Freed blocks go back to the system at once; else what the allocator keeps for later would be counted as held.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    worker = Path(__file__).with_name("zero_init_worker.py")
    results = alternate(worker, options.ranks, [str(part) for part in SHAPE], options.rounds)
    rows = {name: summarize(runs) for name, runs in results.items()}
    print(f"{'':10} {'time s':>8} {'whole s':>8} {'peak MB':>9} {'held MB':>9} {'allowed MB':>11}")
    for name, row in rows.items():
        print(
            f"{name:10} {row['init_s']:8.2f} {row['bare_s']:8.2f} {row['peak_mb']:9.1f} {row['after_mb']:9.1f} "
            f"{row['allowed_mb']:11.1f}"
        )
    reached = rows["ours"]["peak_mb"] <= rows["ours"]["allowed_mb"]
    if "reference" in rows:
        ratio = rows["reference"]["init_s"] / rows["ours"]["init_s"]
        print(f"{ratio:.2f} times as fast as the reference")
        reached = reached and ratio >= 2.0
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    print("reached" if reached else "not reached")
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
