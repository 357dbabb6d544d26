"""``ds_to_universal`` and ``zero_to_fp32.py`` beside the peer's: time of the whole command, bytes written, memory.

Each release converts a tag that it saved itself (the same model, stage 3, 2 ranks, bf16 with AdamW), alternating. The
time of ``import torch`` at that moment stands beside each: the peer pays it, our tools do not. Then ``inspect`` and
``verify`` of our tag. ``TMPDIR=/dev/shm`` measures the work, a folder on a disk the disk: ours waits until its files
are on it, the peer does not.
Memory is what the process and its children allocate beyond a bare interpreter (anonymous pages, their sum, sampled):
mapped files are not counted, on either side. A table on the screen; ``--write`` keeps it in
``benchmarks/results/universal.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.peers import TIMEOUT_S, best_and_median, reference_python, run_ranks  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", "3"))
WORKER = Path(__file__).with_name("universal_worker.py")
RESULT = Path(__file__).with_name("results") / "universal.json"


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def anonymous_nbytes(pid: int) -> int:
    total = 0
    for one in family(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024
    return total


def watched(command: list[str], cwd: Path) -> tuple[float, int]:
    """Seconds of a command, and the most it held at once."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": ""}
    start, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        while process.poll() is None:
            peak = max(peak, anonymous_nbytes(process.pid))
            if time.perf_counter() - start > TIMEOUT_S:
                process.kill()
                raise RuntimeError(f"{command} took more than {TIMEOUT_S} s")
            time.sleep(0.005)
        seconds = time.perf_counter() - start
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{command} ended with {process.returncode}: {errors.read().decode()[-2000:]}")
    return seconds, peak


Runs = dict[str, list[dict[str, float]]]  # by side


def command_of(kind: str, python: str, folder: Path, output: Path) -> list[str]:
    if kind == "fp32":
        return [python, str(folder / "zero_to_fp32.py"), str(folder), str(output), "--tag", "tag"]
    flags = ["--input_folder", str(folder / "tag"), "--output_folder", str(output), "--inject_missing_state"]
    return [python, "-m", "deepspeed.checkpoint.ds_to_universal", *flags]


def convert(kind: str, python: str, folder: Path) -> dict[str, float]:
    output = folder / kind
    shutil.rmtree(output, ignore_errors=True)
    import_seconds, _ = watched([python, "-c", "import torch"], folder)
    _, idle = watched([python, "-c", "import time; time.sleep(0.1)"], folder)
    seconds, peak = watched(command_of(kind, python, folder, output), folder)
    nbytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return {"seconds": seconds, "import_torch": import_seconds, "nbytes": nbytes, "peak_nbytes": peak - idle}


def questions(folder: Path) -> None:
    """Prints the time of ``inspect`` and ``verify``, best and median, and of ``import torch`` among them."""
    ask = [sys.executable, "-m", "deepspeed.checkpoint"]
    commands = {word: [*ask, word, str(folder / "tag")] for word in ("inspect", "verify")}
    commands["import torch"] = [sys.executable, "-c", "import torch"]
    seconds: dict[str, list[float]] = {word: [] for word in commands}
    for _ in range(ROUNDS):
        for word, command in commands.items():
            seconds[word].append(watched(command, folder)[0])
    for word, found in seconds.items():
        low, mid = best_and_median(found)
        print(f"{word}: {low:.2f} ({mid:.2f}) s")


def table(kind: str, model: dict[str, Any], results: Runs) -> None:
    """Prints one command's comparison. ``fp32`` writes 4 bytes a parameter, the universal folder 12."""
    state = (4 if kind == "fp32" else 12) * model["parameters"]
    ours = results["ours"]
    peak = max(run["peak_nbytes"] for run in ours)
    print(f"--- {kind}")
    for key in ("seconds", "import_torch"):
        best = {side: best_and_median([run[key] for run in runs]) for side, runs in results.items()}
        print(f"{key} (median): {', '.join(f'{side} {low:.2f} ({mid:.2f})' for side, (low, mid) in best.items())}")
        if "reference" in best and key == "seconds":
            ratios = [theirs / mine for theirs, mine in zip(best["reference"], best["ours"], strict=True)]
            print(f"reference / ours: {ratios[0]:.1f} best, {ratios[1]:.1f} median")
    print(f"output beyond the state: {(ours[-1]['nbytes'] - state) / 1e6:.2f} MB")
    print(f"memory: {peak / 1e6:.1f} MB, 2 largest tensors are {8 * model['largest'] / 1e6:.1f} MB")
    if "reference" in results:
        theirs = results["reference"][-1]
        print(f"reference: output {theirs['nbytes'] / state:.2f} x, memory {theirs['peak_nbytes'] / 1e6:.0f} MB")


def main() -> None:
    interpreters = {"ours": sys.executable}
    if peer := reference_python():
        interpreters["reference"] = peer
    kinds = ("universal", "fp32")
    results: dict[str, Runs] = {kind: {side: [] for side in interpreters} for kind in kinds}
    with tempfile.TemporaryDirectory() as name:
        model: dict[str, Any] = {}
        for side, python in interpreters.items():
            (Path(name) / side).mkdir()
            model = run_ranks(python, WORKER, 2, [str(Path(name) / side)])
        questions(Path(name) / "ours")
        for kind in kinds:
            for _ in range(ROUNDS):
                for side, python in interpreters.items():
                    results[kind][side].append(convert(kind, python, Path(name) / side))
                    shown = {key: round(value, 2) for key, value in results[kind][side][-1].items()}
                    print(kind, side, shown, flush=True)
    print(f"{model['parameters']:,} parameters in {model['tensors']} tensors")
    for kind in kinds:
        table(kind, model, results[kind])
    if "--write" in sys.argv:
        RESULT.write_text(json.dumps({"model": model, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
