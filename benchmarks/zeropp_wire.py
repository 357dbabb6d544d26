"""Bytes between nodes of one stage 3 step on 2 x 2 ranks, plain and ZeRO++, counted beside the formulas, and timed.

    python benchmarks/zeropp_wire.py [--numel 4194304] [--rate 10e6] [--json FILE]

A step moves M 16-bit elements three times: weights gathered for the forward and for the backward, gradients reduced.
ZeRO++: int8 gather over two levels (qwZ), a gather inside the node (hpZ), int4 reduction in two hops (qgZ). Bytes are
those that leave one node, in units of one plain crossing, M(O-1)/O elements of 2 bytes. The time is that of the same
collectives over an emulated link of ``--rate`` bytes a second per node; the ratio means something, not the seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from peers import run_ranks

from deepspeed.comm.blockwise import INT4, INT8

WORKER = Path(__file__).with_name("zeropp_worker.py")
NODES, PER_NODE = 2, 2
RANKS = NODES * PER_NODE


def expected(numel: int) -> dict[str, int]:
    """Bytes that leave one node, by the formulas."""
    piece = numel // RANKS
    others = PER_NODE * (NODES - 1)
    plain = numel * 2 * (NODES - 1) // NODES
    return {
        "plain gather": plain,
        "plain reduce": plain,
        "qwZ": others * INT8.nbytes(piece),
        "hpZ": 0,
        "qgZ": others * INT4.nbytes(piece),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 22, help="elements of the model, a multiple of 4")
    parser.add_argument("--rate", type=float, default=10e6, help="bytes a second of a node's emulated link")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.numel % RANKS:
        parser.error(f"--numel {options.numel} is no multiple of {RANKS} ranks")
    arguments = ["--numel", str(options.numel), "--rate", str(options.rate)]
    measured = run_ranks(sys.executable, WORKER, RANKS, arguments)
    formula = expected(options.numel)
    unit = options.numel * 2 * (NODES - 1) / NODES
    wrong = []
    for name, right in formula.items():
        counted = measured["crossed"][name]
        print(f"  {name:<14} {counted:12,.0f} bytes  formula {right:12,}   {counted / unit:6.4f} M")
        # What the collectives themselves say they sent on the group between nodes, where they use one.
        own_count = measured["sent"].get(name, right)
        if counted != right or own_count != right:
            wrong.append(name)
    plain = 2 * measured["crossed"]["plain gather"] + measured["crossed"]["plain reduce"]
    packed = sum(measured["crossed"][name] for name in ("qwZ", "hpZ", "qgZ"))
    ratio = measured["seconds"]["plain"] / measured["seconds"]["packed"]
    print(f"  step: plain {plain / unit:.4f} M, ZeRO++ {packed / unit:.4f} M, {plain / packed:.2f} times less")
    print(f"  emulated link, {options.rate:.3g} bytes/s a node: {ratio:.2f} times faster  {measured['seconds']}")
    if options.json:
        record = {"numel": options.numel, "formula": formula, "time_ratio": ratio, **measured}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if wrong:
        raise SystemExit(f"counted bytes differ from the formula: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
