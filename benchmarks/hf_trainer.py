"""What a step of transformers' Trainer costs beyond the model itself: ours over deepspeed 0.19.8, stages 2 and 3.

    make clients                                              # once: .venv-clients
    scripts/reference_env.sh .venv-reference-clients clients  # once: the peer and the same clients
    python benchmarks/hf_trainer.py [--rounds 5] [--json FILE]

A small Llama in fp32 on 2 ranks, with the config file users of the Trainer start from. Every process measures its own
bare forward and backward; interpreters alternate. Milliseconds per step beyond the bare ones are printed as wall time
and as CPU time of one rank, best and median of all steps; they include the Trainer's own work, the same on both sides.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from peers import ROOT, alternate, best_and_median

CLIENTS = ROOT / ".venv-clients" / "bin" / "python"
WORKER = Path(__file__).with_name("hf_trainer_worker.py")
PEER = ROOT / ".venv-reference-clients" / "bin" / "python"


def beyond(runs: list[dict[str, Any]], clock: str) -> tuple[float, float]:
    """(best, median) milliseconds per step beyond the bare model; each run against its own baseline."""
    found = []
    for run in runs:
        bare, trained = (best_and_median(run[name][clock]) for name in ("bare", "trainer"))
        found.append((trained[0] - bare[0], trained[1] - bare[1]))
    return min(best for best, _ in found), best_and_median([median for _, median in found])[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="processes per interpreter and stage")
    parser.add_argument("--steps", type=int, default=40, help="steps of a process")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        if not CLIENTS.exists():
            print("transformers is not installed here: `make clients` makes an environment that has it")
            return
        os.execv(CLIENTS, [str(CLIENTS), *sys.argv])
    if PEER.exists():
        os.environ.setdefault("DS_REFERENCE_PYTHON", str(PEER))
    # Two environments of the peer that share compiled ops compile them anew whenever the other one has run.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(PEER.parents[1] / "extensions"))
    record: dict[str, Any] = {}
    for stage in options.stages:
        runs = alternate(WORKER, 2, ["--stage", str(stage), "--steps", str(options.steps)], options.rounds)
        print(f"\nstage {stage}, {runs['ours'][0]['parameters'] / 1e6:.1f}M parameters, 2 ranks: ms beyond the model")
        for clock in ("wall", "cpu"):
            found = {name: beyond(results, clock) for name, results in runs.items()}
            for name, (best, median) in found.items():
                print(f"  {clock:<5} {name:<10} best {best:8.2f}   median {median:8.2f}")
            row: dict[str, Any] = dict(found)
            if "reference" in found:
                row["ratio"] = [a / b for a, b in zip(found["ours"], found["reference"], strict=True)]
                print(f"  {clock:<5} ratio      best {row['ratio'][0]:8.2f}   median {row['ratio'][1]:8.2f}")
            record[f"stage {stage} {clock}"] = row
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
