"""One GPU: our multi-tensor optimizers against torch's, as shares of the bandwidth of a device copy in the same run.

    python benchmarks/gpu_optimizers.py [--numel 28] [--tune]

Prints, per case, milliseconds (best and median of interleaved rounds), the share of copy bandwidth (bytes an update has
to move / time / bytes a copy moves per second) and the ratio to torch. To reach: Adam at least 90 % of the copy and at
least 1.0x of torch's fused one. `--numel`: log2 of the elements in all. `--tune` also tries other sizes of a program.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from deepspeed.ops import multi_tensor
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion

Works = dict[str, tuple[Callable[[], Any], float]]
"""Name -> (work, bytes it moves)."""


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved(works: Works, device: str, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of one call, per round; each round calls `repeats` times without waiting in between."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for work, _ in works.values():
        work()
        work()
    for _ in range(rounds):
        for name, (work, _) in works.items():
            synchronize(device)
            began = time.perf_counter()
            for _ in range(repeats):
                work()
            synchronize(device)
            found[name].append((time.perf_counter() - began) / repeats)
    return found


def parameters(count: int, numel: int, dtype: torch.dtype, device: str) -> list[Any]:
    made = [torch.nn.Parameter(torch.randn(numel, device=device, dtype=dtype)) for _ in range(count)]
    for param in made:
        param.grad = torch.randn_like(param)
    return made


def copy_of(nbytes: int, device: str) -> tuple[Callable[[], Any], float]:
    source = torch.empty(nbytes // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2.0 * source.numel() * 4


def fp32_case(count: int, numel: int, device: str) -> Works:
    """Adam, Lion and LAMB of fp32 parameters: 28, 20 and 44 bytes an element."""
    params, total = parameters(count, numel, torch.float32, device), count * numel
    works: Works = {
        "adam": (FusedAdam(params, lr=1e-5).step, 28.0 * total),
        "torch fused adam": (torch.optim.AdamW(params, lr=1e-5, fused=True).step, 28.0 * total),
        "lion": (FusedLion(params, lr=1e-5).step, 20.0 * total),
        "lamb": (FusedLamb(params, lr=1e-5).step, 44.0 * total),
    }
    return works


def boundary_case(count: int, numel: int, device: str) -> Works:
    """ZeRO's boundary: bf16 gradients, unscaled, into fp32 masters and bf16 weights; torch in four passes."""
    masters = parameters(count, numel, torch.float32, device)
    grads = [torch.randn(numel, device=device, dtype=torch.bfloat16) for _ in masters]
    weights = [torch.empty(numel, device=device, dtype=torch.bfloat16) for _ in masters]
    ours, theirs = FusedAdam(masters, lr=1e-5), torch.optim.AdamW(masters, lr=1e-5, fused=True)
    rows = list(zip(masters, grads, weights, strict=True))

    def in_passes() -> None:
        scaled = [master.grad for master in masters]
        torch._foreach_copy_(scaled, grads)
        torch._foreach_mul_(scaled, 0.5)
        theirs.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)

    nbytes = 28.0 * count * numel
    return {
        "update_from": (lambda: ours.update_from(rows, 0.5), nbytes),
        "torch, in passes": (in_passes, nbytes),
    }


def show(label: str, works: Works, device: str, rounds: int, repeats: int) -> None:
    works = {"copy": copy_of(max(1 << 12, int(next(iter(works.values()))[1]) // 4), device), **works}
    times = interleaved(works, device, rounds, repeats)
    rates = {name: works[name][1] / min(values) for name, values in times.items()}
    peer = next((min(values) for name, values in times.items() if name.startswith("torch")), None)
    print(label)
    for name, values in times.items():
        against = "" if peer is None or name == "copy" else f"   torch / this {peer / min(values):.2f}"
        print(
            f"  {name:<18} best {1e3 * min(values):9.3f} ms, median {1e3 * statistics.median(values):9.3f}   "
            f"{rates[name] / 1e12:6.3f} TB/s, {rates[name] / rates['copy']:.2f} of copy{against}",
            flush=True,
        )


def report(numel_log2: int = 28, device: str = "cuda", rounds: int = 7, repeats: int = 5) -> None:
    """All cases; says first whether our kernels or torch's are behind the names."""
    for op in ("fused_adam", "fused_lion", "fused_lamb"):
        print(f"{op}: {multi_tensor.problem(op, device) or 'Triton multi-tensor kernels'}")
    total = 1 << numel_log2
    show(f"32 tensors, {total / 1e6:.0f} M fp32 elements", fp32_case(32, total // 32, device), device, rounds, repeats)
    small = min(2000, total // 64)
    show(f"{small} tensors of 8192 elements", fp32_case(small, 8192, device), device, rounds, repeats)
    show(f"boundary, 32 tensors, {total / 1e6:.0f} M elements", boundary_case(32, total // 32, device), device, rounds,
         repeats)  # fmt: skip


def tune(numel_log2: int, device: str) -> None:
    from deepspeed.ops import multi_tensor_triton

    params = parameters(32, (1 << numel_log2) // 32, torch.float32, device)
    for block, chunk, warps in ((1024, 8192, 4), (2048, 8192, 8), (2048, 16384, 8), (2048, 2048, 8), (4096, 16384, 8)):
        multi_tensor_triton.BLOCK, multi_tensor_triton.CHUNK, multi_tensor_triton.WARPS = block, chunk, warps
        works: Works = {"adam": (FusedAdam(params, lr=1e-5).step, 28.0 * (1 << numel_log2))}
        show(f"programs of {chunk} elements, {block} at a time, {warps} warps", works, device, 5, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=28)
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_optimizers: no GPU here, nothing measured")
        return
    report(options.numel)
    if options.tune:
        tune(options.numel, "cuda")


if __name__ == "__main__":
    main()
