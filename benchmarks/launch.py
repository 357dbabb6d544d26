"""What it costs to start: `deepspeed` against torchrun, a script that does nothing on 2 ranks.

    python benchmarks/launch.py [--pairs 5] [--ranks 2] [--reference PATH_TO_ANOTHER_deepspeed]

Owns: the two commands, run alternately so that other load of the machine hits both, and the ratio of their medians.
Wall time is what a user waits; processor time of all processes is shown beside it, because it does not move when the
machine is busy. Also measured: the time from the death of one rank to the end of the whole run.

Goals: at most 0.6 s, at least 2.5 times faster than torchrun; all ended within a second of a death.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GOAL_RATIO, GOAL_SECONDS, GOAL_DEATH_SECONDS = 2.5, 0.6, 1.0
TIMEOUT_S = 120
# Writes when it dies, on the clock that all processes of the machine share.
DYING = """
import os, signal, time
if os.environ["RANK"] == "1":
    time.sleep(0.3)
    with open("died", "w") as out:
        out.write(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@dataclass(frozen=True)
class Sample:
    """One run, in seconds."""

    wall: float
    processor: float


def run_once(command: Sequence[str], folder: str) -> Sample:
    """Run a command that must succeed."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(wall, processor)


def seconds_from_death_to_end(launcher: str, folder: str) -> float:
    """One rank of two kills itself; how long until the launcher has ended everything and itself."""
    subprocess.run(
        [launcher, "--num_gpus", "2", "dying.py"], cwd=folder, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    return time.monotonic() - float((Path(folder) / "died").read_text())


def measure(commands: dict[str, list[str]], pairs: int, folder: str) -> dict[str, list[Sample]]:
    """Samples of every command, taken in turns after one run of each that is not counted."""
    for command in commands.values():
        run_once(command, folder)
    samples: dict[str, list[Sample]] = {name: [] for name in commands}
    for _ in range(pairs):
        for name, command in commands.items():
            samples[name].append(run_once(command, folder))
    return samples


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--reference", metavar="PATH", help="another deepspeed command to compare with")
    options = parser.parse_args(arguments)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    bin_folder = Path(sys.executable).parent
    ours = str(bin_folder / "deepspeed")
    commands = {
        "torchrun": [str(bin_folder / "torchrun"), f"--nproc-per-node={options.ranks}", "--master-port=0", "noop.py"],
        "ours": [ours, "--num_gpus", str(options.ranks), "noop.py"],
    }
    if options.reference:
        commands["reference"] = [options.reference, "--num_gpus", str(options.ranks), "noop.py"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "noop.py").write_text("")
        (Path(folder) / "dying.py").write_text(DYING)
        samples = measure(commands, options.pairs, folder)
        deaths = [seconds_from_death_to_end(ours, folder) for _ in range(options.pairs)]
    print(f"{'command':12} {'wall best':>10} {'median':>8} {'processor median':>18}   (seconds, {options.pairs} runs)")
    for name, runs in samples.items():
        walls = [run.wall for run in runs]
        processor = statistics.median(run.processor for run in runs)
        print(f"{name:12} {min(walls):10.3f} {statistics.median(walls):8.3f} {processor:18.3f}")
    medians = {name: statistics.median(run.wall for run in runs) for name, runs in samples.items()}
    death = statistics.median(deaths)
    print(f"death of one rank to the end of all: median {death:.3f} s (goal <= {GOAL_DEATH_SECONDS} s)")
    if "reference" in medians:
        print(f"reference / ours = {medians['reference'] / medians['ours']:.1f}")
    ratio = medians["torchrun"] / medians["ours"]
    reached = ratio >= GOAL_RATIO and medians["ours"] <= GOAL_SECONDS and death <= GOAL_DEATH_SECONDS
    print(
        f"launch: torchrun / ours = {ratio:.2f} (goal >= {GOAL_RATIO}), ours {medians['ours']:.3f} s "
        f"(goal <= {GOAL_SECONDS}): {'reached' if reached else 'not reached'}"
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
