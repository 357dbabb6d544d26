"""Reading and writing a disk, and an optimizer step whose state lies on it, against fio and deepspeed 0.19.8.

    python benchmarks/nvme_io.py [--mib 256] [--rounds 6] [--folder DIR] [--json FILE]

Owns: the comparison and the verdict. fio (``apt-get install fio``) runs with ``--direct=1``; the peer with its own
``aio_handle`` (needs libaio's headers; see ``peers.py``); ours with the same sizes. All use one file, in turns drawn
anew each round, so that a disk whose speed wanders favours nobody. Medians decide.

The step reads, updates and writes 12 bytes per parameter (value and two moments of Adam) through three buffers. Its
bound is what fio needs for these bytes in the same round, reads and writes at once or one after the other, whichever is
faster, or the update alone if that is longer.

Verdict: reads and writes at least as fast as fio and the peer; the step at 0.9 of its bound; memory of three buffers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers import reference_python

from deepspeed.ops.aio.handle import aio_handle
from deepspeed.runtime.swap_tensor.aio_config import AioConfig
from deepspeed.runtime.swap_tensor.nvme_store import NvmeStore

BLOCK, DEPTH = 1 << 20, 32
KEYS = 16
BUFFERS = 3


def fio(path: Path, kind: str, nbytes: int) -> float:
    """Seconds of fio for ``kind`` (read, write, rw) of the whole file; ``rw`` moves half as many bytes each way."""
    command = [
        "fio", "--name=x", f"--filename={path}", f"--rw={kind}", f"--bs={BLOCK}", f"--iodepth={DEPTH}", "--direct=1",
        "--ioengine=libaio", f"--size={nbytes}", "--overwrite=1", "--output-format=json", "--rwmixread=50",
    ]  # fmt: skip
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    job = json.loads(said[said.index("{") :])["jobs"][0]
    return max(job[way]["runtime"] for way in ("read", "write")) / 1e3


class Peer:
    """The peer's handle in a process of its own, asked over a pipe."""

    def __init__(self, python: str, path: Path, nbytes: int) -> None:
        worker = Path(__file__).with_name("nvme_io_worker.py")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "MAX_JOBS": "2"}
        self._process = subprocess.Popen(
            [python, str(worker), str(path), str(nbytes), str(BLOCK), str(DEPTH)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
            cwd=path.parent,
        )  # fmt: skip
        assert self._process.stdout is not None
        while "ready" not in (line := self._process.stdout.readline()):
            if not line:
                raise RuntimeError(f"the peer ended with {self._process.wait()}: are libaio's headers installed?")

    def time(self, kind: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{kind}\n")
        self._process.stdin.flush()
        while True:  # it also prints advice
            line = self._process.stdout.readline()
            if line.startswith("seconds ") or not line:
                return float(line.split()[1])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def resident() -> int:
    with open("/proc/self/statm") as facts:
        return int(facts.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Step:
    """Adam over a store: ``KEYS`` tensors of value and two moments each."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.numel = nbytes // KEYS // 12 // 1024 * 1024
        aio = AioConfig(block_size=BLOCK, queue_depth=DEPTH)
        before = resident()
        self.store = NvmeStore(folder, rank=0, aio=aio, pin=False, buffer_count=BUFFERS, buffer_nbytes=self.numel * 12)
        self.keys = [f"part{index}" for index in range(KEYS)]
        for key in self.keys:
            self.store.create(key, 3 * self.numel, torch.float32)
        self.gradient = torch.randn(self.numel)
        self.count = torch.ones(())
        self.nbytes = KEYS * self.numel * 12
        self.run()  # the file has its blocks, the buffers their pages
        self.store.flush()
        self.grown = resident() - before - self.gradient.nbytes

    def update(self, flat: torch.Tensor) -> None:
        value, first, second = flat.split(self.numel)
        torch._fused_adamw_(
            [value], [self.gradient], [first], [second], [], [self.count],
            lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def run(self) -> None:
        store = self.store
        store.prefetch(self.keys[0])
        for key, following in zip(self.keys, [*self.keys[1:], None], strict=True):
            flat = store.fetch(key)
            if following is not None:
                store.prefetch(following)
            self.update(flat)
            store.commit(key)
        store.flush()

    def compute(self) -> None:
        flat = torch.zeros(3 * self.numel)
        for _ in self.keys:
            self.update(flat)


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, list[float]], int, int]:
    """Seconds by name, bytes the step's memory grew by, and bytes of its buffers."""
    path, nbytes = folder / "file", options.mib << 20
    fio(path, "write", nbytes)
    handle = aio_handle(BLOCK, DEPTH, False, True, 1)
    data = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8)).random_(0, 256)  # as the peer's
    python = reference_python()
    peer = Peer(python, path, nbytes) if python else None
    step = Step(folder, nbytes // 2)
    actions: dict[str, Callable[[], float]] = {
        "fio write": lambda: fio(path, "write", nbytes),
        "ours write": lambda: seconds(lambda: handle.sync_pwrite(data, str(path))),
        "fio read": lambda: fio(path, "read", nbytes),
        "ours read": lambda: seconds(lambda: handle.sync_pread(data, str(path))),
        "fio mixed": lambda: fio(path, "rw", nbytes),
        "step": lambda: seconds(step.run) * nbytes / 2 / step.nbytes,
        "update": lambda: seconds(step.compute) * nbytes / 2 / step.nbytes,
    }
    if peer:
        actions["peer write"] = lambda: peer.time("write")
        actions["peer read"] = lambda: peer.time("read")
    times: dict[str, list[float]] = {name: [] for name in actions}
    order = list(actions)
    try:
        draw = random.Random(0)
        for _ in range(options.rounds):
            for name in draw.sample(order, len(order)):
                times[name].append(actions[name]())
    finally:
        if peer:
            peer.close()
    buffers = BUFFERS * step.store.buffer_nbytes
    step.store.close()
    return times, step.grown, buffers


def verdicts(times: dict[str, list[float]], grown: int, buffers: int) -> list[tuple[str, str, bool]]:
    """``(figure, what was reached, whether it is enough)``."""
    median = {name: statistics.median(values) for name, values in times.items()}
    best = {name: min(values) for name, values in times.items()}
    rows = []
    for way in ("write", "read"):
        for other in ("fio", "peer"):
            if f"{other} {way}" in times:
                ratio = median[f"{other} {way}"] / median[f"ours {way}"]
                shown = f"{ratio:.2f} (best {best[f'{other} {way}'] / best[f'ours {way}']:.2f})"
                rows.append((f"{way}: {other}'s time / ours", shown, ratio >= 1.0))
    # Half of the file each way in the step, half each way in the mixed run.
    disk = min(median["fio mixed"], (median["fio read"] + median["fio write"]) / 2)
    bound = max(disk, median["update"])
    rows.append(("bound / step", f"{bound / median['step']:.2f} (update alone {median['update'] / bound:.2f})",
                 bound / median["step"] >= 0.9))  # fmt: skip
    own = (median["ours read"] + median["ours write"]) / 2
    rows.append(("our reads and writes alone / step", f"{own / median['step']:.2f}", True))
    rows.append(("memory of the step / its buffers", f"{grown / buffers:.3f}", grown <= buffers * 1.02 + (4 << 20)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the file")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: that of temporary files)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if shutil.which("fio") is None:
        print("fio is not installed (apt-get install fio)")
        return 2
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        times, grown, buffers = measure(options, Path(folder))
    rows = verdicts(times, grown, buffers)
    for figure, reached, enough in rows:
        print(f"{figure:34} {reached:40} {'' if enough else 'missed'}")
    if options.json:
        options.json.write_text(json.dumps({"mib": options.mib, "seconds": times, "grown": grown}, indent=1) + "\n")
    return 0 if all(enough for *_, enough in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
