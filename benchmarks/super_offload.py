"""How much of an offloaded optimizer step is exposed, with compute that is only waited for: plain and `super_offload`.

    python benchmarks/super_offload.py [--layers 32] [--width 1024] [--layer-ms 30] [--rounds 5] [--json FILE]

One rank, host memory taken to be apart from the device's (DS_OFFLOAD_APART=1), bf16, AdamW. Each layer's backward
sleeps, as if a device computed it; the CPU is free meanwhile, as it is beside a GPU. Both engines take steps in turns.
Exposed is what a step takes beyond the same passes without an optimizer step, as a part of the whole step.

Verdict: exposed at most 5 % with `super_offload`, weights and masters equal to the last bit, also where every step is
clipped and all guesses are undone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ["DS_OFFLOAD_APART"] = "1"
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_START_TABLE", "0")

import torch
from torch import nn

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param


class Wait(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


class Layers(nn.Module):
    def __init__(self, layers: int, width: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Wait.apply(layer(x), self.seconds)
        return x


def engine_of(options: argparse.Namespace, clip: float, **offload: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 2, "sub_group_size": options.width**2, "offload_optimizer": {"device": "cpu", **offload},
        },
    }  # fmt: skip
    model = Layers(options.layers, options.width, options.layer_ms / 1e3)
    return deepspeed.initialize(model=model, config=config)[0]


def timed_step(engine: Any, width: int, *, update: bool) -> float:
    began = time.monotonic()
    loss = engine(torch.ones(1, width, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    if update:
        engine.step()
    else:
        engine.zero_grad()
    return time.monotonic() - began


def same(one: Any, two: Any) -> bool:
    pairs = zip(one.module.parameters(), two.module.parameters(), strict=True)
    return all(
        torch.equal(left, right) and torch.equal(safe_get_full_fp32_param(left), safe_get_full_fp32_param(right))
        for left, right in pairs
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layer-ms", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    engines = {"offload": engine_of(options, 0.0), "super_offload": engine_of(options, 0.0, super_offload=True)}
    for engine in engines.values():
        for _ in range(2):  # states and buffers exist
            timed_step(engine, options.width, update=True)
    times: dict[str, list[float]] = {name: [] for name in (*engines, "no step")}
    for _ in range(options.rounds):
        for name, engine in engines.items():
            times[name].append(timed_step(engine, options.width, update=True))
        times["no step"].append(timed_step(engines["offload"], options.width, update=False))
    bare = statistics.median(times["no step"])
    record: dict[str, Any] = {"no step": bare}
    print(f"{options.layers * options.width**2 / 1e6:.0f}M parameters, {options.layer_ms:g} ms a layer, one thread")
    for name in engines:
        step = statistics.median(times[name])
        record[name] = {"step_s": step, "exposed": (step - bare) / step}
        part = 100 * (step - bare) / step
        print(f"  {name:14} step {step:6.3f} s, without a step {bare:6.3f} s, exposed {part:5.1f} %")
    equal = same(*engines.values())
    clipped = [engine_of(options, 1e-6), engine_of(options, 1e-6, super_offload=True)]
    for engine in clipped:
        for _ in range(2):
            timed_step(engine, options.width, update=True)
    undone = clipped[1].optimizer.executors.speculation.undone
    equal_undone = same(*clipped)
    print(f"  equal bits: {equal}; with {undone} updates undone: {equal_undone}")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))
    return 0 if equal and equal_undone and record["super_offload"]["exposed"] <= 0.05 else 1


if __name__ == "__main__":
    raise SystemExit(main())
