"""The largest model one rank trains under a cap on its memory: stage 2, and with states and weights in files.

    python benchmarks/offload_capacity.py [--cap 1024] [--width 1024] [--json FILE]

A stack of Linear layers with AdamW, two steps each; the process is put into a memory control group of `--cap` MiB and
counts as failed when the system ends it. Needs the right to make such a group (root, or a delegated group); without it
the benchmark says so and measures nothing. The file cache counts, too: the system drops it before it ends a process.

Owns: the settings, the search for the largest number of layers, the group. `offload_capacity_worker.py` is one try.
Verdict: each kind of offload trains a larger model than the one before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("offload_capacity_worker.py")
ROOTS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)


def rows(swap: str) -> dict[str, dict[str, Any]]:
    disk = {"device": "nvme", "nvme_path": swap}
    lean = {"stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    return {
        "stage 2": {"stage": 2},
        "stage 3, states in files": {"stage": 3, "sub_group_size": 4e6, "offload_optimizer": disk},
        "stage 3, states and weights in files": {
            "stage": 3, "sub_group_size": 4e6, "offload_optimizer": disk, "offload_param": disk, **lean,
        },
    }  # fmt: skip


@contextlib.contextmanager
def memory_group(nbytes: int) -> Iterator[Path | None]:
    """A control group with that limit; None where this user may make none."""
    for root, limit in ROOTS:
        folder = root / f"deepspeed-capacity-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / limit).write_text(str(nbytes))
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()
            continue
        with contextlib.suppress(OSError):  # else a group may go on in swap space
            (folder / "memory.swappiness").write_text("0")
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()
        return
    yield None


def trains(zero: dict[str, Any], layers: int, width: int, group: Path) -> float | None:
    """Seconds of the second step; None where the system ended the process. Raises RuntimeError for another failure."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    environment = {
        **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29631", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "DS_START_TABLE": "0",
    }  # fmt: skip
    command = [sys.executable, str(WORKER), json.dumps(config), str(layers), str(width), str(group)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return float(json.loads(line.removeprefix("RESULT "))["step_s"])
    if done.returncode == -signal.SIGKILL or "can't allocate memory" in done.stderr or "MemoryError" in done.stderr:
        return None
    raise RuntimeError(f"{layers} layers: the worker ended with {done.returncode}:\n{done.stderr[-3000:]}")


def largest(zero: dict[str, Any], width: int, group: Path, step: int) -> dict[str, Any]:
    """The largest multiple of ``step`` layers that trains, found by doubling and halving."""
    layers, seconds, jump = 0, 0.0, step
    while (found := trains(zero, layers + jump, width, group)) is not None:
        layers, seconds, jump = layers + jump, found, jump * 2
    while jump > step:
        jump //= 2
        found = trains(zero, layers + jump, width, group)
        if found is not None:
            layers, seconds = layers + jump, found
    return {"parameters": layers * width * width, "step_s": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=int, default=1024, help="MiB")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--step", type=int, default=16, help="layers between two tries")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    Path("bench_out").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="bench_out") as swap, memory_group(options.cap << 20) as group:
        if group is None:
            print("no memory control group can be made here (needs root, or a delegated group): nothing measured")
            return 0
        print(f"one rank, bf16, AdamW, {options.cap} MiB of memory")
        for name, zero in rows(str(Path(swap).resolve())).items():
            results[name] = row = largest(zero, options.width, group, options.step)
            print(f"  {name:38} {row['parameters'] / 1e6:8.1f}M parameters, step {row['step_s']:6.2f} s", flush=True)
    sizes = [row["parameters"] for row in results.values()]
    reached = sizes == sorted(set(sizes))
    print(f"each kind of offload trains a larger model: {'yes' if reached else 'NO'}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
