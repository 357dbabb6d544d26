"""Bytes on the wire and collectives of one step: stages 0-3, DDP and deepspeed 0.19.8, counted, not timed.

    python benchmarks/wire_bytes.py [--ranks 2 4] [--json FILE]

Model: 16 Linears of width 256 in fp32 (P parameters), or what the row says. Bytes are per rank in units of P(N-1)/N
elements; calls stand beside the most that is aimed at. The one small all-reduce of every step (norm and agreement) is
in both. Stage 3 in two settings: `released` lets go of every block as soon as it may, so that forward and backward
gather it; `kept` is the default, where gathered weights stay while they fit and are gathered once, after the step.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import reference_python, run_ranks

WORKER = Path(__file__).with_name("wire_worker.py")
BUCKET = 200_000  # elements; about a fifth of the model


RELEASED = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}


@dataclass(frozen=True)
class Case:
    """One row of the table. ``sent``: the most to be sent, in P(N-1)/N; ``calls``: the most collectives."""

    label: str
    system: str
    sent: float
    calls: int
    bucket: int = 0
    model: str = "flat"
    zero: dict[str, int] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        given = ["--system", self.system, "--bucket", str(self.bucket), "--model", self.model]
        return [*given, "--zero", json.dumps(self.zero)]


def calls(times: int, numel: int = 16 * (256 * 256 + 256)) -> int:
    """Collectives of sending the model `times` times in buckets, and two small ones."""
    return math.ceil(times * numel / BUCKET) + 2


CASES = (
    Case("DDP", "ddp", 2, calls(2), BUCKET),
    *(Case(f"stage {stage}", stage, 2, calls(2), BUCKET) for stage in "012"),
    Case("stage 3, released", "3", 3, calls(3), BUCKET, zero=RELEASED),
    Case("stage 3, kept", "3", 2, calls(2), BUCKET, zero={"stage3_param_persistence_threshold": 0}),
    Case("stage 3, 8 blocks, default", "3", 2, 12, model="blocks"),
    Case("stage 3, 16 large Linears, default", "3", 2, 12, model="large"),
    Case("stage 3, 100 small tensors", "3", 2, 3, model="small"),  # one gather, one reduction, the agreement
)


def row(case: Case, label: str, result: dict[str, Any]) -> dict[str, Any]:
    numel, world = result["numel"], result["world"]
    sent = sum(result["sent"].values()) / 4 / (numel * (world - 1) / world)
    made = sum(result["calls"].values())
    print(f"  {label:<44} {sent:6.3f} P (aim {case.sent:g})   {made:4d} calls (aim {case.calls})   {result['calls']}")
    return {"sent": sent, "calls": made, "limit": case.calls, "by_kind": result["calls"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--systems", nargs="+", choices=("ddp", "0", "1", "2", "3"), default=["ddp", *"0123"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    peer = reference_python()
    record: dict[str, Any] = {}
    for ranks in options.ranks:
        print(f"{ranks} ranks", flush=True)
        for case in (case for case in CASES if case.system in options.systems):
            result = run_ranks(sys.executable, WORKER, ranks, case.arguments)
            record[f"{ranks}/{case.label}"] = row(case, case.label, result)
            if peer and case.system != "ddp":
                other = f"deepspeed 0.19.8 {case.label}"
                record[f"{ranks}/{other}"] = row(case, other, run_ranks(peer, WORKER, ranks, case.arguments))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
