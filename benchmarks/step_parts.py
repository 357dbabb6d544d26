"""What the arithmetic of one bf16 step costs in CPU time, by operation: ours at stages 1 and 2 beside DDP.

    python benchmarks/step_parts.py [--params 9899520] [--ranks 2]

One process, one thread; every operation runs on tensors of the size one rank has, and the best of many is printed.
This is the profile of a step with torch's AdamW (``torch_adam``); the engine's own does the last five operations in one
pass, which is what ``step_time`` times. DDP updates all P bf16 weights and keeps no fp32
masters, and gloo's threads do its sums; ours updates P / N fp32 masters and sums on the calling thread, in fp32 and in
rank order.
Moving the bytes is the same 2 P (N - 1) / N for both and is left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

ROUNDS = 15


def milliseconds(work: Callable[[], object]) -> float:
    """Least CPU time of this thread for one call."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.thread_time()
        work()
        best = min(best, time.thread_time() - started)
    return 1e3 * best


def adamw(numel: int, dtype: torch.dtype) -> Callable[[], object]:
    param = torch.nn.Parameter(torch.randn(numel).to(dtype))
    param.grad = torch.randn(numel).to(dtype)
    return torch.optim.AdamW([param], fused=True).step


def ours(params: int, ranks: int) -> dict[str, Callable[[], object]]:
    shard = params // ranks
    bucket, grads = (torch.zeros(params, dtype=torch.bfloat16) for _ in range(2))
    pieces = [torch.randn(shard).bfloat16() for _ in range(ranks)]
    total, master_grad = torch.zeros(shard), torch.randn(shard)

    def add_up() -> None:
        torch.add(pieces[0], pieces[1 % ranks], out=total)
        for piece in pieces[2:]:
            total.add_(piece)

    return {
        "gradients into the bucket": lambda: bucket.copy_(grads),
        "sum of the ranks' pieces in fp32": add_up,
        "the sum back to bf16": lambda: pieces[0].copy_(total),
        "norm of the bf16 shard in fp32": lambda: torch.linalg.vector_norm(pieces[0], dtype=torch.float32),
        "shard's gradients to fp32": lambda: master_grad.copy_(pieces[0]),
        "clipping": lambda: master_grad.mul_(1.0),
        "AdamW on fp32 masters": adamw(shard, torch.float32),
        "masters to bf16 weights": lambda: pieces[0].copy_(master_grad),
    }


def ddp(params: int) -> dict[str, Callable[[], object]]:
    bucket, grads = (torch.randn(params).bfloat16() for _ in range(2))
    return {
        "gradients into the bucket": lambda: bucket.copy_(grads),
        "gradients out of the bucket": lambda: grads.copy_(bucket),
        "norm of bf16 gradients": lambda: torch.linalg.vector_norm(grads),
        "clipping": lambda: grads.mul_(1.0),
        "AdamW on bf16 weights": adamw(params, torch.bfloat16),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=9_899_520, help="parameters of the model")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for title, parts in (
        (f"ours, stages 1 and 2, {options.ranks} ranks", ours(options.params, options.ranks)),
        ("DDP, fused AdamW, clipping", ddp(options.params)),
    ):
        print(f"\n{title}")
        times = {name: milliseconds(work) for name, work in parts.items()}
        for name, value in times.items():
            print(f"  {name:<36}{value:7.2f} ms")
        print(f"  {'together':<36}{sum(times.values()):7.2f} ms")


if __name__ == "__main__":
    main()
