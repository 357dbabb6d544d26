"""Blockwise quantization on GPUs: one kernel to pack, one to unpack, sum and scale. Needs triton; import it lazily.

Owns: the kernels and their launches. Does not own: the format, the checks and the choice (`blockwise.py`).
Invariant: the same codes, scales, sums and kept errors as `blockwise_torch.py`. Hence correctly rounded division,
round-half-even by the addition of 1.5 * 2^23, and no contraction of a product and a sum into one rounding
(`enable_fp_fusion=False`).
"""

# The bodies of kernels are triton's language, in which an int has methods and arguments have no types.
# mypy: disable-error-code="no-untyped-def, attr-defined"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from deepspeed.comm.blockwise import Packing

# Elements per program: enough for wide loads by 4 warps, few enough to fill a GPU with a bucket of a few MiB.
_PROGRAM_NUMEL = 4096

_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_LARGEST_FP32 = tl.constexpr(3.4028234663852886e38)
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def _value(pointer, error, offsets, mask, FEEDBACK: tl.constexpr):
    value = tl.load(pointer + offsets[0], mask=mask, other=0.0).to(tl.float32)
    if FEEDBACK:
        value += tl.load(error + offsets[1], mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _largest(value):
    """(largest absolute value, number of values that are not finite) of each row."""
    size = tl.abs(value)
    finite = size <= _LARGEST_FP32  # false for nan too
    return tl.max(tl.where(finite, size, 0.0), axis=1), tl.sum(tl.where(finite, 0, 1), axis=1)


@triton.jit
def _multiple(value, inverse, bad):
    rounded = (value * inverse[:, None] + _ROUND) - _ROUND
    return tl.where(bad[:, None], 0.0, rounded)


@triton.jit
def _keep_error(error, offsets, mask, value, multiple, scale, bad, shares):
    old = tl.load(error + offsets, mask=mask, other=0.0).to(tl.float32)
    lost = value - multiple * scale[:, None]
    kept = old * shares[0] + lost * shares[1]
    finite = (tl.abs(kept) <= _LARGEST_FP32) & (bad[:, None] == 0)
    tl.store(error + offsets, tl.where(finite, kept, 0.0), mask=mask)


@triton.jit
def quantize_kernel(
    source,
    source_stride,
    scales,
    codes,
    packed_nbytes,
    error,
    old_share,
    new_share,
    numel,
    INVERSE_LARGEST: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FEEDBACK: tl.constexpr,
):
    """Pack ROWS blocks of one piece; grid (programs per piece, pieces)."""
    piece = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = rows[:, None] * BLOCK
    width = tl.minimum(numel - rows * BLOCK, BLOCK)[:, None]
    source += piece * source_stride
    error += piece * numel
    scales += piece * (packed_nbytes // 4)
    codes += piece * packed_nbytes
    if BITS == 8:
        columns = tl.arange(0, BLOCK)[None, :]
        mask = columns < width
        offsets = start + columns
        value = _value(source, error, (offsets, offsets), mask, FEEDBACK)
        largest, strange = _largest(value)
    else:
        half = (width + 1) // 2
        columns = tl.arange(0, BLOCK // 2)[None, :]
        mask = columns < half
        high_mask = columns < width - half
        offsets = start + columns
        high_offsets = offsets + half
        value = _value(source, error, (offsets, offsets), mask, FEEDBACK)
        high_value = _value(source, error, (high_offsets, high_offsets), high_mask, FEEDBACK)
        largest, strange = _largest(value)
        high_largest, high_strange = _largest(high_value)
        largest = tl.maximum(largest, high_largest)
        strange += high_strange
    bad = strange > 0
    scale = tl.maximum(largest * INVERSE_LARGEST, _SMALLEST_SCALE)
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), scale)
    tl.store(scales + rows, tl.where(bad, float("nan"), scale), mask=rows * BLOCK < numel)
    multiple = _multiple(value, inverse, bad)
    if BITS == 8:
        tl.store(codes + offsets, multiple.to(tl.int8), mask=mask)
    else:
        high_multiple = _multiple(high_value, inverse, bad)
        both = (multiple + 8.0) + high_multiple * 16.0
        tl.store(codes + rows[:, None] * (BLOCK // 2) + columns, both.to(tl.int8), mask=mask)
        if FEEDBACK:
            _keep_error(error, high_offsets, high_mask, high_value, high_multiple, scale, bad, (old_share, new_share))
    if FEEDBACK:
        _keep_error(error, offsets, mask, value, multiple, scale, bad, (old_share, new_share))


@triton.jit
def sum_kernel(
    output,
    output_stride,
    scales,
    codes,
    part_nbytes,
    packed_nbytes,
    own,
    own_stride,
    own_place,
    count,
    factor,
    numel,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OWN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Unpack and sum ROWS blocks of one piece; grid (programs per piece, pieces)."""
    piece = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    width = tl.minimum(numel - rows * BLOCK, BLOCK)[:, None]
    mask = columns < width
    offsets = rows[:, None] * BLOCK + columns
    if BITS == 8:
        code_offsets = offsets
        low = mask
    else:
        half = (width + 1) // 2
        low = columns < half
        code_offsets = rows[:, None] * (BLOCK // 2) + tl.where(low, columns, columns - half)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for place in range(count):
        slot, packed_numel, packed_width = place, numel, width
        if OWN:
            from_wire = own_place != place
            slot = place - (place > own_place).to(tl.int32)
            packed_numel, packed_width = tl.where(from_wire, numel, 0), tl.where(from_wire, width, 0)
        shift = (tl.full((), 0, tl.int64) + slot) * part_nbytes + piece * packed_nbytes
        scale = tl.load(scales + shift // 4 + rows, mask=rows * BLOCK < packed_numel, other=0.0)
        byte = tl.load(codes + shift + code_offsets, mask=columns < packed_width, other=0)
        if BITS == 8:
            code = byte.to(tl.float32)
        else:
            code = tl.where(low, (byte & 15) - 8, byte >> 4).to(tl.float32)
        value = code * scale[:, None]
        if OWN:
            exact_mask = columns < width - packed_width
            exact = tl.load(own + piece * own_stride + offsets, mask=exact_mask, other=0.0)
            value = tl.where(from_wire, value, exact.to(tl.float32))
        total = tl.where(place == 0, value, total + value)
    total *= factor
    target = output + piece * output_stride + offsets
    if ACCUMULATE:
        total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, total.to(output.dtype.element_ty), mask=mask)


def quantize(
    packed: torch.Tensor, source: torch.Tensor, packing: Packing, error: torch.Tensor | None, err_beta: float
) -> None:
    """`blockwise.quantize` of checked arguments."""
    pieces, numel = source.shape
    scales, codes = packing.split(packed, numel)
    rows = max(_PROGRAM_NUMEL // packing.block, 1)
    grid = (triton.cdiv(packing.blocks(numel), rows), pieces)
    quantize_kernel[grid](
        source,
        source.stride(0),
        scales,
        codes,
        packed.shape[1],
        source if error is None else error,
        err_beta,
        1.0 - err_beta,
        numel,
        INVERSE_LARGEST=1.0 / packing.largest_code,
        BITS=packing.bits,
        BLOCK=packing.block,
        ROWS=rows,
        FEEDBACK=error is not None,
        num_warps=4,
        enable_fp_fusion=False,
    )


def sum_packed(
    output: torch.Tensor,
    parts: torch.Tensor,
    packing: Packing,
    own: torch.Tensor | None,
    own_place: int,
    factor: float,
    accumulate: bool,
) -> None:
    """`blockwise.sum_packed` of checked arguments."""
    pieces, numel = output.shape
    flat = parts.view(-1, parts.shape[2])
    scales, codes = packing.split(flat, numel)
    rows = max(_PROGRAM_NUMEL // packing.block, 1)
    grid = (triton.cdiv(packing.blocks(numel), rows), pieces)
    sum_kernel[grid](
        output,
        output.stride(0),
        scales,
        codes,
        parts.stride(0),
        parts.shape[2],
        output if own is None else own,
        0 if own is None else own.stride(0),
        own_place,
        parts.shape[0] + (own is not None),
        factor,
        numel,
        BITS=packing.bits,
        BLOCK=packing.block,
        ROWS=rows,
        OWN=own is not None,
        ACCUMULATE=accumulate,
        num_warps=4,
        enable_fp_fusion=False,
    )
