"""What `import deepspeed` adds to a program that has imported torch: seconds and modules.

    python benchmarks/import_cost.py [--rounds 7] [--reference PYTHON]

Owns: fresh interpreters that import torch, then the package, and tell the difference. The clock is the processor time
of that process, so other load of the machine does not enter; the count of modules is exact.

Goals: at most 0.04 s and 60 modules.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

GOAL_SECONDS, GOAL_MODULES = 0.04, 60
TIMEOUT_S = 120
PROBE = """
import json, sys, time
import torch
before, began = set(sys.modules), time.process_time()
import deepspeed
seconds = time.process_time() - began
new = sorted(set(sys.modules) - before)
print(json.dumps({"seconds": seconds, "modules": new, "version": deepspeed.__version__}))
"""


def import_once(python: str) -> dict[str, Any]:
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{python} cannot import deepspeed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--reference", metavar="PYTHON", help="interpreter of another installation to compare with")
    options = parser.parse_args(arguments)
    pythons = {"ours": sys.executable}
    if options.reference:
        pythons["reference"] = options.reference
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    for python in pythons.values():
        import_once(python)  # compiles what is not compiled yet
    for _ in range(options.rounds):
        for name, python in pythons.items():
            runs[name].append(import_once(python))
    seconds = {name: statistics.median(run["seconds"] for run in found) for name, found in runs.items()}
    for name, found in runs.items():
        best = min(run["seconds"] for run in found)
        print(
            f"{name:10} deepspeed {found[0]['version']}: processor time best {best:.4f} s, "
            f"median {seconds[name]:.4f} s, {len(found[0]['modules'])} modules"
        )
    modules = runs["ours"][0]["modules"]
    print("modules:", " ".join(modules))
    if "reference" in runs:
        print(f"reference / ours: {seconds['reference'] / seconds['ours']:.1f} times the seconds")
    reached = seconds["ours"] <= GOAL_SECONDS and len(modules) <= GOAL_MODULES
    print(
        f"import_cost: {seconds['ours']:.4f} s (goal <= {GOAL_SECONDS}), {len(modules)} modules "
        f"(goal <= {GOAL_MODULES}): {'reached' if reached else 'not reached'}"
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
