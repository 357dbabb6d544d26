"""Times of CPU optimizers in one process, on the same buffers, in turn. Runs under this project or deepspeed 0.19.8.

    python benchmarks/cpu_optimizers_worker.py --case large|small|boundary|construct --threads N [--spin]

Prints one JSON object: what -> seconds of each round. `roof` is a loop that reads and writes the same memory as Adam
(p += g, m += g, v += g); what other processes do moves it as much as the rest, so divide by it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOF = """
void roof(long count, float **p, float **g, float **m, float **v, long n) {
  for (long k = 0; k < count; ++k)
    for (long i = 0; i < n; ++i) { p[k][i] += g[k][i]; m[k][i] += g[k][i]; v[k][i] += g[k][i]; }
}
"""
LR = 1e-5


class Roof:
    """The memory traffic of fp32 Adam on given tensors, by as many threads as torch has."""

    def __init__(self, columns: list[list[torch.Tensor]]) -> None:
        folder = Path(tempfile.mkdtemp())
        source, library = folder / "roof.c", folder / "roof.so"
        source.write_text(ROOF)
        subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
        self.call = ctypes.CDLL(str(library)).roof
        threads, count, numel = torch.get_num_threads(), len(columns[0]), columns[0][0].numel()
        self.pool = ThreadPoolExecutor(threads)
        self.jobs = []
        for t in range(threads):
            if count >= threads:
                rows, start, size = range(count * t // threads, count * (t + 1) // threads), 0, numel
            else:
                start = numel * t // threads
                rows, size = range(count), numel * (t + 1) // threads - start
            arrays = [
                (ctypes.c_void_p * len(rows))(*(column[r].data_ptr() + 4 * start for r in rows)) for column in columns
            ]
            self.jobs.append((ctypes.c_long(len(rows)), *arrays, ctypes.c_long(size)))

    def __call__(self) -> None:
        others = [self.pool.submit(self.call, *job) for job in self.jobs[1:]]
        self.call(*self.jobs[0])
        for other in others:
            other.result()


def interleaved(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - began)
    return found


def parameters(count: int, numel: int, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.randn(numel).to(dtype)) for _ in range(count)]
    for param in made:
        param.grad = torch.randn(numel).to(dtype)
    return made


def updates(count: int, numel: int, rounds: int, ours: bool) -> dict[str, list[float]]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    params = parameters(count, numel)
    adam = DeepSpeedCPUAdam(params, lr=LR)
    adam.step()
    states = [adam.state[param] for param in params]
    grads: list[torch.Tensor] = [param.grad for param in params]  # type: ignore[misc]
    columns: list[list[torch.Tensor]] = [
        list(params), grads, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    ]  # fmt: skip
    fused = torch.optim.AdamW(params, lr=LR, fused=True)
    works: dict[str, Callable[[], Any]] = {"adam": adam.step, "roof": Roof(columns), "torch fused": fused.step}
    if ours:
        from deepspeed.ops.lion import DeepSpeedCPULion

        works["lion"] = DeepSpeedCPULion(params, lr=LR).step
        low = parameters(count, numel, torch.bfloat16)
        works["adam, all bf16"] = DeepSpeedCPUAdam(low, lr=LR, fp32_optimizer_states=False).step
    return interleaved(works, rounds)


def boundary(numel: int, rounds: int, ours: bool) -> dict[str, list[float]]:
    """bf16 gradients to bf16 weights over fp32 masters: cast, norm, clip, Adam, cast."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    (master,) = parameters(1, numel)
    grad, weight = torch.randn(numel).bfloat16(), torch.empty(numel, dtype=torch.bfloat16)
    adam = DeepSpeedCPUAdam([master], lr=LR)
    adam.step()
    scratch = master.grad
    assert scratch is not None

    def in_passes() -> None:
        scratch.copy_(grad)
        norm = scratch.norm(2)
        scratch.mul_(1.0 / max(1.0, float(norm)))
        adam.step()
        weight.copy_(master.detach())

    state = adam.state[master]
    works: dict[str, Callable[[], Any]] = {
        "boundary": in_passes,
        "roof": Roof([[master], [scratch], [state["exp_avg"]], [state["exp_avg_sq"]]]),
    }
    if ours:
        from deepspeed.ops.native_kernels import sumsq

        def in_one() -> None:
            total, _ = sumsq([grad])
            adam.update_from([(master, grad, weight)], 1.0 / max(1.0, total**0.5))

        works = {"boundary": in_one, "roof": works["roof"], "passes": in_passes}
    return interleaved(works, rounds)


def construct() -> dict[str, list[float]]:
    """Seconds to load the op where it is built, and of the first and the second constructor."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    params = parameters(1, 8)
    began = time.perf_counter()
    CPUAdamBuilder().load()
    loaded = time.perf_counter()
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.optim.SGD(params, lr=LR)  # the first optimizer of a process makes torch import a lot
    imported = time.perf_counter()
    adam = DeepSpeedCPUAdam(params, lr=LR)
    made = time.perf_counter()
    DeepSpeedCPUAdam(params, lr=LR)
    again = time.perf_counter()
    adam.step()
    return {"load": [loaded - began], "constructor": [made - imported], "second constructor": [again - made]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=("large", "small", "boundary", "construct"), required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--spin", action="store_true", help="with a second process that keeps one core busy")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ours = importlib.metadata.version("deepspeed") != "0.19.8"
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if options.spin else None
    try:
        if options.case == "construct":
            result = construct()
        elif options.case == "boundary":
            result = boundary(1 << 25, options.rounds, ours)
        else:
            count, numel = (1, 1 << 25) if options.case == "large" else (1000, 8192)
            result = updates(count, numel, options.rounds, ours)
    finally:
        if spinner is not None:
            spinner.kill()
            spinner.wait()
    print()
    print(json.dumps(result), flush=True)
    os._exit(0)  # pools of either side are of no further use


if __name__ == "__main__":
    main()
