"""Bytes on the wire and collectives of one step: stages 0-2, DDP and deepspeed 0.19.8, counted, not timed.

    python benchmarks/wire_bytes.py [--ranks 2 4] [--json FILE]

Model: 16 Linears of width 256 in fp32 (P parameters). Bytes are per rank in units of P(N-1)/N elements; calls stand
beside the most that ceil(2P/bucket) + 2 allows. The one small all-reduce of every step (norm and agreement) is in both.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from peers import reference_python, run_ranks

WORKER = Path(__file__).with_name("wire_worker.py")
BUCKET = 200_000  # elements; about a fifth of the model


def row(label: str, result: dict[str, Any]) -> dict[str, Any]:
    numel, world = result["numel"], result["world"]
    sent = sum(result["sent"].values()) / 4 / (numel * (world - 1) / world)
    calls = sum(result["calls"].values())
    limit = math.ceil(2 * numel / BUCKET) + 2
    print(f"  {label:<26} {sent:6.3f} P   {calls:4d} calls (limit {limit})   {result['calls']}")
    return {"sent": sent, "calls": calls, "limit": limit, "by_kind": result["calls"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    peer = reference_python()
    record: dict[str, Any] = {}
    for ranks in options.ranks:
        print(f"{ranks} ranks")
        for system in ("ddp", "0", "1", "2"):
            label = "DDP" if system == "ddp" else f"stage {system}"
            arguments = ["--system", system, "--bucket", str(BUCKET)]
            record[f"{ranks}/{label}"] = row(label, run_ranks(sys.executable, WORKER, ranks, arguments))
            if peer and system != "ddp":
                other = f"deepspeed 0.19.8 {label}"
                record[f"{ranks}/{other}"] = row(other, run_ranks(peer, WORKER, ranks, arguments))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
