"""Blockwise quantization: what travels in the place of a float tensor when the wire is slow (int8, packed int4).

Owns: the format, the checks, and the choice of who does it: on CPUs the native library (`blockwise_native.py`), on GPUs
Triton's kernels (`blockwise_triton.py`), where those cannot be used plain torch (`blockwise_torch.py`, which defines
the numbers). `ds_report` says which and why. Does not own: the arithmetic, and what is sent when (`quantized.py`).
It stands in the comm layer because collectives are built from it and they may not look up to `ops`.

Format. A piece of k elements is cut into blocks of `block` elements (the last one may be shorter); each has one scale,
`largest absolute value / 127` (int4: `/ 7`), and an element is the nearest whole multiple of it. Packed, a piece is

    [scales: fp32, one per block] [codes: int8, or two int4 in a byte] [0 to 3 bytes up to a multiple of 4]

so 16-bit floats shrink to 1/2 (int8) or 1/4 (int4) and 4 bytes per block. A byte of int4 codes holds element j of its
block in the low half (plus 8) and element j + half in the high half (signed): both halves unpack without a shuffle.

Invariants: |x - decoded x| <= scale/2 (beside the one rounding to the output's dtype). A block with inf or nan gets the
scale nan and comes out as nan everywhere: an overflow stays visible. A block of zeros comes out as zeros. Scales are at
least 2^-126, so subnormal numbers neither overflow the inverse nor break the bound.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import torch

from deepspeed.comm import blockwise_native, blockwise_torch
from deepspeed.utils.logging import warning_once

__all__ = ["INT4", "INT8", "Packing", "dequantize", "quantize", "sum_packed", "triton_problem"]

# The smallest scale: the smallest fp32 whose inverse and whose products keep full precision.
SMALLEST_SCALE = 2.0**-126

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Packing:
    """How a piece is packed.

    Args:
        bits: 8 or 4 per element.
        block: elements that share a scale; a power of two, at least 16.
    """

    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"Packing: bits={self.bits}; elements can be packed into 4 or 8 bits")
        if self.block < 16 or self.block & (self.block - 1):
            raise ValueError(f"Packing: block={self.block}; a block has 16, 32, 64, ... elements (a power of two)")

    @property
    def largest_code(self) -> int:
        """The code of a block's largest absolute value."""
        return 127 if self.bits == 8 else 7

    def blocks(self, numel: int) -> int:
        """Number of blocks of a piece of `numel` elements."""
        return -(-numel // self.block)

    def code_nbytes(self, numel: int) -> int:
        """Bytes of the codes of a piece."""
        return numel if self.bits == 8 else (numel + 1) // 2

    def nbytes(self, numel: int) -> int:
        """Bytes of a packed piece of `numel` elements: scales, codes, and up to 3 bytes of padding."""
        return -(-(4 * self.blocks(numel) + self.code_nbytes(numel)) // 4) * 4

    def split(self, packed: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of packed pieces of `numel` elements: (scales fp32 (pieces, blocks), codes int8 (pieces, bytes))."""
        scales_nbytes = 4 * self.blocks(numel)
        codes = packed[:, scales_nbytes : scales_nbytes + self.code_nbytes(numel)].view(torch.int8)
        return packed[:, :scales_nbytes].view(torch.float32), codes


INT8 = Packing(8)
INT4 = Packing(4)


@torch.no_grad()
def quantize(
    packed: torch.Tensor,
    source: torch.Tensor,
    packing: Packing = INT8,
    *,
    error: torch.Tensor | None = None,
    err_beta: float = 0.0,
) -> None:
    """Pack pieces of floats.

    Args:
        packed: uint8, (pieces, packing.nbytes(k)), written; 1D for one piece. Starts at a multiple of 4 bytes.
        source: fp32, bf16 or fp16, (pieces, k), elements of a piece next to each other, pieces anywhere; or 1D.
        error: what earlier calls have lost, (pieces, k) contiguous, any float dtype: `source + error` is packed, and
            `error = err_beta * error + (1 - err_beta) * (what this call loses)`. Blocks that are not finite leave 0.
        err_beta: share of the old error that is kept.
    """
    packed, source = _rows(packed), _rows(source)
    _check("quantize", packed, source, packing)
    if error is not None:
        error = _rows(error)
        _check_beside("quantize", "error", error, source)
        if not error.is_contiguous():
            raise ValueError(f"quantize: the error must be contiguous; found strides {error.stride()}")
    if source.numel() == 0:
        return
    _kernels(packing, source, error).quantize(packed, source, packing, error, err_beta)


@torch.no_grad()
def dequantize(output: torch.Tensor, packed: torch.Tensor, packing: Packing = INT8) -> None:
    """Unpack pieces into `output` (pieces, k) of fp32, bf16 or fp16; `packed` as in `quantize`."""
    output, packed = _rows(output), _rows(packed)
    _check("dequantize", packed, output, packing)
    _sum_checked(output, packed.unsqueeze(0), packing)


@torch.no_grad()
def sum_packed(
    output: torch.Tensor,
    parts: torch.Tensor,
    packing: Packing = INT8,
    *,
    own: torch.Tensor | None = None,
    own_place: int = -1,
    scale: float | None = None,
    accumulate: bool = False,
) -> None:
    """Sum packed contributions in rank order, in fp32: `output (+)= scale * (part 0 + part 1 + ...)`.

    Args:
        output: (pieces, k) or 1D, fp32, bf16 or fp16. May be the memory of `own` (not with `accumulate`).
        parts: uint8, contiguous, (contributions, pieces, packing.nbytes(k)).
        own: one more contribution that was never packed, (pieces, k), any float dtype, at place `own_place` of the
            order.
        scale: factor on the sum, applied before the one rounding to the dtype of `output`.
    """
    output = _rows(output)
    own = None if own is None else _rows(own)
    for part in parts:
        _check("sum_packed", part, output, packing)
    if own is not None:
        _check_beside("sum_packed", "own", own, output)
    _sum_checked(output, parts, packing, own, own_place, 1.0 if scale is None else scale, accumulate)


def _sum_checked(
    output: torch.Tensor,
    parts: torch.Tensor,
    packing: Packing,
    own: torch.Tensor | None = None,
    own_place: int = -1,
    factor: float = 1.0,
    accumulate: bool = False,
) -> None:
    if output.numel() == 0:
        return
    _kernels(packing, output, own).sum_packed(output, parts, packing, own, own_place, factor, accumulate)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor


def _check(name: str, packed: torch.Tensor, floats: torch.Tensor, packing: Packing) -> None:
    if floats.dtype not in _FLOATS:
        raise ValueError(f"{name}: found {floats.dtype}; float32, bfloat16 and float16 can be packed")
    if floats.dim() != 2 or (floats.shape[1] > 1 and floats.stride(1) != 1):
        raise ValueError(
            f"{name}: the floats must be (pieces, elements) with the elements of a piece next to each other; found "
            f"shape {tuple(floats.shape)} with strides {floats.stride()}"
        )
    wanted = (floats.shape[0], packing.nbytes(floats.shape[1]))
    if packed.dtype is not torch.uint8 or packed.shape != wanted or not packed.is_contiguous():
        raise ValueError(
            f"{name}: {floats.shape[0]} pieces of {floats.shape[1]} elements, packed with {packing}, are a contiguous "
            f"uint8 tensor of shape {wanted}; found {packed.dtype} of shape {tuple(packed.shape)}"
        )
    if packed.device != floats.device:
        raise ValueError(f"{name}: the packed tensor is on {packed.device}, the floats on {floats.device}")


def _check_beside(name: str, what: str, beside: torch.Tensor, floats: torch.Tensor) -> None:
    if beside.shape != floats.shape or beside.device != floats.device or not beside.is_floating_point():
        raise ValueError(
            f"{name}: {what} must be floats of shape {tuple(floats.shape)} on {floats.device}, as what it stands "
            f"beside; found {beside.dtype} of shape {tuple(beside.shape)} on {beside.device}"
        )
    if beside.shape[1] > 1 and beside.stride(1) != 1:
        raise ValueError(
            f"{name}: {what} must have the elements of a piece next to each other; found strides {beside.stride()}"
        )


def _kernels(packing: Packing, floats: torch.Tensor, others: torch.Tensor | None) -> ModuleType:
    """The module that does it for these pieces. Kernels on GPUs count the elements of a piece in 32 bits."""
    found = None
    if floats.device.type == "cuda":
        found = _triton_kernels() if floats.shape[1] < 1 << 31 else None
    elif blockwise_native.takes(packing, floats, others):
        problem = blockwise_native.problem()
        if problem and not blockwise_native.is_switched_off():  # who has done so knows
            warning_once(f"packing for the wire (ZeRO++) uses torch's operations, which take longer: {problem}")
        if not problem:
            found = blockwise_native
    return found or blockwise_torch


def triton_problem(device: str) -> str:
    """Why Triton's kernels are not used for tensors on that type of device; empty when they are."""
    if device != "cuda":
        return f"for tensors on cuda, not on {device}"
    return "" if _triton_kernels() else "triton cannot be imported; it comes with torch's GPU wheels"


@functools.cache
def _triton_kernels() -> ModuleType | None:
    try:
        import triton  # noqa: F401  # a part of torch's GPU wheels; without it plain torch serves
    except ImportError:
        return None
    from deepspeed.comm import blockwise_triton

    return blockwise_triton
