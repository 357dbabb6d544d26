"""What a stage-3 step costs beyond the model itself: ours, torch's FSDP2 and deepspeed 0.19.8, in one run.

    python benchmarks/zero3_step.py [--rounds 2] [--json FILE]

*tiny*: 50 Linears of width 25 on 1 and on 2 ranks, CPU milliseconds of a step beyond the plain loop: hooks and
bookkeeping. *llama*: the 10M-parameter quickstart model in bf16 on 2 ranks, wall and CPU milliseconds beyond a bare
forward and backward. ``stage3`` is the default configuration, ``stage3_released`` lets go of every block as soon as
another one is used (reuse and persistence off). Interpreters alternate; best and median ratios are printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from peers import alternate, best_and_median
from step_time import beyond, merged, ratio, show

WORKER = Path(__file__).with_name("step_worker.py")
LINEARS = 50


def beyond_plain(times: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    """(best, median) milliseconds beyond the plain training loop."""
    best, median = best_and_median(times["plain"])
    found = {name: best_and_median(values) for name, values in times.items()}
    return {name: (low - best, middle - median) for name, (low, middle) in found.items()}


def tiny(ranks: int, rounds: int, aim: float) -> dict[str, Any]:
    args = ["--task", "tiny", "--stage-3", "--rounds", "6", "--steps", "5"]
    runs = alternate(WORKER, ranks, args, rounds)
    ours = beyond_plain(merged(runs["ours"], "cpu"))
    show(f"tiny, {ranks} rank(s), ours: CPU time of a step beyond the plain loop", ours, "ms")
    print(f"  stage 3, hooks per Linear: {ours['stage3'][0] / LINEARS:.4f} ms  (to reach <= 0.08)")
    print(f"  FSDP2 / stage 3: {ratio(ours['fsdp2'], ours['stage3'])}  (to reach >= {aim:g})")
    print(f"  FSDP2 / stage 3, released: {ratio(ours['fsdp2'], ours['stage3_released'])}")
    record = {"ours": ours}
    if "reference" in runs:
        peer = beyond_plain(merged(runs["reference"], "cpu"))
        show(f"tiny, {ranks} rank(s), deepspeed 0.19.8", peer, "ms")
        for name in ("stage3", "stage3_released"):
            print(f"  deepspeed / ours, {name}: {ratio(peer[name], ours[name])}  (to reach >= {aim:g})")
        record["reference"] = peer
    return record


def llama(rounds: int) -> dict[str, Any]:
    runs = alternate(WORKER, 2, ["--task", "llama", "--stage-3", "--rounds", "5", "--steps", "2"], rounds)
    record: dict[str, Any] = {}
    for clock in ("wall", "cpu"):
        ours = beyond(merged(runs["ours"], clock))
        show(f"llama, 2 ranks, ours: {clock} time beyond a bare forward and backward", ours, "ms")
        print(f"  stage 3 / FSDP2: {ratio(ours['stage3'], ours['fsdp2'])}  (to reach <= 0.25)")
        record[clock] = {"ours": ours}
        if "reference" in runs:
            peer = beyond(merged(runs["reference"], clock))
            show(f"llama, 2 ranks, deepspeed 0.19.8, {clock}", peer, "ms")
            for name in ("stage3", "stage3_released"):
                print(f"  ours / deepspeed, {name}: {ratio(ours[name], peer[name])}  (to reach <= 0.4)")
            record[clock]["reference"] = peer
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="processes per interpreter and table")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record = {
        "tiny_1": tiny(1, options.rounds, 5),
        "tiny_2": tiny(2, options.rounds, 4),
        "llama": llama(options.rounds),
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
