"""Loss of a small language model after some steps: plain stage 3, ZeRO++ with and without error feedback, MiCS.

    python benchmarks/zeropp_convergence.py [--steps 200] [--json FILE]

Four ranks as 2 nodes x 2, bf16, a two-layer transformer of 109,000 parameters on sentences of one rule that holds two
times of three; no sentence comes twice. The figure is the mean loss of all ranks over the last fifth of the steps, in
per cent above plain stage 3.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from peers import run_ranks

WORKER = Path(__file__).with_name("zeropp_convergence_worker.py")
AIM_PERCENT = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run_ranks(sys.executable, WORKER, 4, [f"--steps={options.steps}"])
    above = {name: 100 * (loss / found["plain"] - 1) for name, loss in found.items()}
    for name, loss in found.items():
        print(f"  {name:<28} loss {loss:.4f}   {above[name]:+.2f} %  (aim: within {AIM_PERCENT:g} %)")
    if options.json:
        options.json.write_text(json.dumps({"loss": found, "percent_above": above}, indent=1) + "\n")
    if any(value > AIM_PERCENT for value in above.values()):
        raise SystemExit("a mode is further from plain stage 3 than the aim")


if __name__ == "__main__":
    main()
