"""Saving and loading on 2 ranks: how long training stands still, how fast the disk is used, how many bytes are read.

    python benchmarks/checkpoint_save.py [--mib 512] [--rounds 3] [--compute 0] [--folder DIR] [--json FILE]

Owns: the comparison and the verdict; ``checkpoint_save_worker.py`` measures. Background saves are compared with
``torch.distributed.checkpoint.async_save`` of the same tensors, durable saves with ``torch.save`` + fsync of the same
bytes, loads with deepspeed 0.19.8 where it has an environment (see ``peers.py``). All in one run, in turns.

Verdict: a background save stops training for at most 50 ms, and a sixth of torch's; the step after it is at most 5 %
slower; a durable save takes half of torch's time; a rank reads its own files once; a load takes half of the peer's
time; files are the state + 64 KB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from peers import alternate, best_and_median

STALL_S = 0.05


def times(runs: list[dict[str, Any]], key: str) -> list[float]:
    return [value for run in runs for value in run.get(key, ())]


def shown(values: list[float]) -> str:
    best, median = best_and_median(values)
    return f"{best:.3f} s ({median:.3f})"


def verdicts(results: dict[str, list[dict[str, Any]]]) -> list[tuple[str, str, bool]]:
    """``(figure, what was reached, whether it is enough)``; medians decide."""
    ours = results["ours"]
    median = {key: statistics.median(times(ours, key)) for key in ours[0]["median"]}
    last = ours[-1]
    slower = median["next"] / median["step"]
    torch_stall, torch_save = median["torch_stall"] / median["stall"], median["torch_save"] / median["save"]
    read, beyond = last["read_nbytes"] / last["own_nbytes"], last["disk_nbytes"] - last["state_nbytes"]
    loads = f"{shown(times(ours, 'load'))}; {shown(times(ours, 'load_warm'))}"
    torch_next = median["torch_next"] / median["step"]
    rows = [
        ("stall of a background save", shown(times(ours, "stall")), median["stall"] <= STALL_S),
        ("torch's / ours", f"{torch_stall:.1f}", torch_stall >= 6),
        ("step after it / other steps", f"{slower:.2f} (torch {torch_next:.2f})", slower <= 1.05),
        ("durable save", shown(times(ours, "save")), True),
        ("torch.save + fsync / ours", f"{torch_save:.2f}", torch_save >= 2),
        ("load, files not cached; cached", loads, True),
        ("bytes read / own files", f"{read:.4f}", read <= 1.01),
        ("bytes on disk beyond the state", f"{beyond:,}", beyond <= 64 << 10),
    ]
    if "reference" in results:
        theirs = {key: statistics.median(times(results["reference"], key)) for key in ("save", "load", "load_warm")}
        ratios = {key: theirs[key] / median[key] for key in theirs}
        rows.append(("deepspeed 0.19.8 / ours: save", f"{ratios['save']:.2f} (theirs is not synced)", True))
        rows.append(("the same: load; cached", f"{ratios['load']:.2f}; {ratios['load_warm']:.2f}", ratios["load"] >= 2))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="optimizer state per rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compute", type=float, default=0.0, help="seconds of a step that a device would compute")
    parser.add_argument("--folder", type=Path, help="where to save (default: the system's folder for temporary files)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    worker = Path(__file__).with_name("checkpoint_save_worker.py")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = alternate(worker, 2, [folder, str(options.mib), str(options.rounds), str(options.compute)], 1)
    rows = verdicts(results)
    for figure, reached, enough in rows:
        print(f"{figure:34} {reached:40} {'' if enough else 'missed'}")
    if options.json:
        options.json.write_text(json.dumps({"mib": options.mib, "results": results}, indent=1) + "\n")
    return 0 if all(enough for *_, enough in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
