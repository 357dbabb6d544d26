"""One GPU: a step of the engine against the same step in plain torch, in one process, interleaved.

    python benchmarks/gpu_step.py [--layers 12] [--width 1024]

Prints milliseconds and ratios: stages 0-3 (one rank: nothing to send, so what is left is our own overhead) against a
plain loop with fp32 masters, clipping and fused AdamW. To reach: at most 1.02 of plain on the large model. Then the
optimizers alone, as shares of copy bandwidth and against torch's (`gpu_optimizers.py`). To reach: Adam 90 % of a copy.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
from gpu_optimizers import report
from torch import nn

import deepspeed


def build(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
    ).cuda()


def plain(layers: int, width: int, x: torch.Tensor) -> Callable[[], None]:
    model = build(layers, width).bfloat16()
    masters = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def step() -> None:
        model(x).float().pow(2).mean().backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)

    return step


def engine(stage: int, layers: int, width: int, x: torch.Tensor) -> Callable[[], None]:
    config = {
        "train_micro_batch_size_per_gpu": x.shape[0],
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }
    wrapped, *_ = deepspeed.initialize(model=build(layers, width), config=config)

    def step() -> None:
        wrapped.backward(wrapped(x).float().pow(2).mean())
        wrapped.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_step: no GPU here, nothing measured")
        return
    os.environ.setdefault("LOCAL_RANK", "0")
    for layers, width, rows in ((options.layers, options.width, 4096), (50, 64, 8)):
        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        systems = {"plain": plain(layers, width, x)}
        systems |= {f"stage {stage}": engine(stage, layers, width, x) for stage in (0, 1, 2, 3)}
        for step in systems.values():
            for _ in range(5):
                step()
        times: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(10):
            for name, step in systems.items():
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(5):
                    step()
                torch.cuda.synchronize()
                times[name].append(1e3 * (time.perf_counter() - started) / 5)
        print(f"{layers} blocks of width {width}, {rows} rows")
        for name, values in times.items():
            print(f"  {name:<8} best {min(values):8.3f} ms   / plain {min(values) / min(times['plain']):.3f}")
    report()


if __name__ == "__main__":
    main()
