"""Run by `test_blockwise_triton.py` in a process of its own: compares the kernels with plain torch, or compiles them.

    python -m tests.kernels.blockwise_kernels compare    # in triton's interpreter, on the CPU
    python -m tests.kernels.blockwise_kernels compile    # for GPUs that need not be here

Prints one JSON list of what is wrong.
"""

from __future__ import annotations

import json
import math
import os
import sys

import torch

from deepspeed.comm import blockwise_torch
from deepspeed.comm.blockwise import Packing
from tests.kernels.interpreter import prepare_once


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(0.0), right.nan_to_num(0.0))


def compare_quantize(packing: Packing, numel: int, dtype: torch.dtype) -> list[str]:
    from deepspeed.comm import blockwise_triton

    where = f"{packing} {dtype} k={numel}"
    wrong = []
    source = torch.randn(2, 3, numel).to(dtype)[:, 1, :]
    if numel > 256:
        source[0, 5], source[1, numel - 1], source[1, 0] = math.inf, math.nan, 0.0
    kept = torch.randn(2, numel) * 0.1
    for error in (None, kept):
        plain, kernel = (torch.zeros(2, packing.nbytes(numel), dtype=torch.uint8) for _ in range(2))
        errors = [None, None] if error is None else [error.clone(), error.clone()]
        blockwise_torch.quantize(plain, source, packing, errors[0], 0.7)
        blockwise_triton.quantize(kernel, source, packing, errors[1], 0.7)
        (scales, codes), (kernel_scales, kernel_codes) = packing.split(plain, numel), packing.split(kernel, numel)
        if not same(scales, kernel_scales):
            wrong.append(f"scales {where}")
        per_block = packing.code_nbytes(packing.block)
        spoiled = scales.isnan().repeat_interleave(per_block, 1)[:, : codes.shape[1]]
        if not torch.equal(codes.masked_fill(spoiled, 0), kernel_codes.masked_fill(spoiled, 0)):
            wrong.append(f"codes {where} error={error is not None}")
        if errors[0] is not None and not same(errors[0], errors[1]):
            wrong.append(f"kept error {where}")
    return wrong


def compare_sum(packing: Packing, numel: int, dtype: torch.dtype) -> list[str]:
    from deepspeed.comm import blockwise_triton

    parts = torch.zeros(2, 2, packing.nbytes(numel), dtype=torch.uint8)
    for part in parts:
        blockwise_torch.quantize(part, torch.randn(2, numel), packing, None, 0.0)
    packing.split(parts[1], numel)[0][1, 0] = math.nan
    wrong = []
    for own_place in (-1, 0, 1, 2):
        accumulate = (own_place + numel) % 2 == 0
        own = torch.randn(2, numel).to(dtype) if own_place >= 0 else None
        plain = torch.randn(2, numel).to(dtype)
        kernel = plain.clone()
        blockwise_torch.sum_packed(plain, parts, packing, own, own_place, 0.3, accumulate)
        blockwise_triton.sum_packed(kernel, parts, packing, own, own_place, 0.3, accumulate)
        # The interpreter cuts fp32 to bf16 where devices round: up to one unit in the last place of bf16.
        if dtype is torch.bfloat16:
            equal = torch.allclose(plain.float(), kernel.float(), rtol=2**-7, atol=0, equal_nan=True)
        else:
            equal = same(plain, kernel)
        if not equal:
            wrong.append(f"sum {packing} {dtype} k={numel} own at {own_place} accumulate={accumulate}")
    return wrong


def compare() -> list[str]:
    from deepspeed.comm import blockwise_triton

    prepare_once(blockwise_triton)
    wrong = []
    for packing in (Packing(8), Packing(4), Packing(4, 64)):
        for numel in (1, 300, 5003):
            for dtype in (torch.float32, torch.bfloat16):
                wrong += compare_quantize(packing, numel, dtype)
                wrong += compare_sum(packing, numel, dtype)
    return wrong


QUANTIZE = {"source_stride": "i32", "scales": "*fp32", "codes": "*i8", "packed_nbytes": "i32", "error": "*bf16"}
QUANTIZE |= {"old_share": "fp32", "new_share": "fp32", "numel": "i32"}
SUM = {"output_stride": "i32", "scales": "*fp32", "codes": "*i8", "part_nbytes": "i32", "packed_nbytes": "i32"}
SUM |= {"own_stride": "i32", "own_place": "i32", "count": "i32", "factor": "fp32", "numel": "i32"}


def compile_ahead() -> list[str]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from deepspeed.comm import blockwise_triton

    wrong = []
    for arch in (80, 90):
        for bits in (4, 8):
            for dtype in ("*fp32", "*bf16") if arch == 90 else ("*bf16",):
                shared = {"BITS": bits, "BLOCK": 256, "ROWS": 16}
                pack = {"FEEDBACK": True, "INVERSE_LARGEST": 1.0 / 127.0, **shared}
                total = {"OWN": True, "ACCUMULATE": True, **shared}
                both = (
                    (blockwise_triton.quantize_kernel, {"source": dtype, **QUANTIZE}, pack),
                    (blockwise_triton.sum_kernel, {"output": dtype, "own": dtype, **SUM}, total),
                )
                for kernel, types, constants in both:
                    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
                    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
                    options = {"num_warps": 4, "enable_fp_fusion": False}
                    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
                    text = built.asm["ptx"]
                    if f".target sm_{arch}" not in text or "fma.rn.f32" in text or not built.asm["cubin"]:
                        wrong.append(f"{kernel.__name__} sm_{arch} {bits} bits {dtype}")
    return wrong


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1] == "compare":
        assert os.environ.get("TRITON_INTERPRET") == "1", "the interpreter is chosen before triton is imported"
        print(json.dumps(compare()))
    else:
        print(json.dumps(compile_ahead()))
