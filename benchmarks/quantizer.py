"""Blockwise quantization on the CPU: nanoseconds per element of the native library and of plain torch, in one process.

    python benchmarks/quantizer.py [--numel 1048576] [--rounds 30] [--threads 1] [--json FILE]

pack: floats to int8 or int4 codes and scales. feedback: the same with LoCo's error (fp32 beside fp32, else bf16). sum:
one packed part and one of floats, added, halved and rounded, as a rank of two does in a reduction. The two ways take
turns on the same tensors; ratios are plain torch's time over the library's, the best of each and the median of rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from deepspeed.comm import blockwise_native, blockwise_torch
from deepspeed.comm.blockwise import INT4, INT8, Packing

Work = Callable[[ModuleType], None]


def works(packing: Packing, dtype: torch.dtype, numel: int) -> dict[str, Work]:
    """What is timed, by name."""
    source = torch.randn(1, numel).to(dtype)
    error = torch.zeros(1, numel, dtype=dtype if dtype is torch.float32 else torch.bfloat16)
    parts = torch.zeros(1, 1, packing.nbytes(numel), dtype=torch.uint8)
    packed, output = parts[0].clone(), torch.empty_like(source)
    blockwise_torch.quantize(parts[0], source, packing, None, 0.0)
    return {
        "pack": lambda way: way.quantize(packed, source, packing, None, 0.0),
        "feedback": lambda way: way.quantize(packed, source, packing, error, 0.8),
        "sum": lambda way: way.sum_packed(output, parts, packing, source, 0, 0.5, False),
    }


def seconds(work: Work, way: ModuleType) -> float:
    began = time.perf_counter()
    work(way)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    reason = blockwise_native.problem()
    if reason:
        raise SystemExit(f"the library cannot be used here: {reason}")
    rows = []
    for packing in (INT8, INT4):
        for dtype in (torch.float32, torch.bfloat16):
            for name, work in works(packing, dtype, options.numel).items():
                pairs = []
                for _ in range(options.rounds + 1):
                    pairs.append((seconds(work, blockwise_native), seconds(work, blockwise_torch)))
                ours, plain = zip(*pairs[1:], strict=True)  # the first touches the memory
                row = {
                    "what": f"{name} int{packing.bits} {str(dtype).removeprefix('torch.')}",
                    "native_ns": min(ours) / options.numel * 1e9,
                    "torch_ns": min(plain) / options.numel * 1e9,
                    "ratio": min(plain) / min(ours),
                    "median_ratio": statistics.median(b / a for a, b in pairs[1:]),
                }
                rows.append(row)
                print(
                    "  {what:<24} native {native_ns:6.3f} ns   torch {torch_ns:6.3f} ns   "
                    "{ratio:5.1f} times, median {median_ratio:5.1f}".format(**row)
                )
    if options.json:
        options.json.write_text(json.dumps({"numel": options.numel, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
