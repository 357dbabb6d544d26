"""Blockwise quantization: what travels in the place of a float tensor when the wire is slow (int8, packed int4).

Owns: the format, and the arithmetic in plain torch, which runs on any device and defines the numbers. On GPUs the same
functions run as one kernel each (`blockwise_triton.py`). Does not own: what is sent when (`quantized.py`).
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
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

__all__ = ["INT4", "INT8", "Packing", "dequantize", "quantize", "sum_packed"]

# Elements that the plain torch path works on at a time. Packing 4M fp32 elements to int8 took 7.3, 4.4, 2.1, 2.0 and
# 1.5 ns each with 2^14, 2^15, ... 2^18 (and 10.8 in whole-tensor torch): the calls cost more than the cache gives.
CHUNK_NUMEL = 1 << 18
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
        if error.shape != source.shape or not error.is_contiguous():
            raise ValueError(f"quantize: the error has shape {tuple(error.shape)}, the source {tuple(source.shape)}")
    if source.numel() == 0:
        return
    kernels = _kernels(source)
    if kernels is not None:
        kernels.quantize(packed, source, packing, error, err_beta)
        return
    scales, codes = packing.split(packed, source.shape[1])
    encoder = _Encoder(packing, min(source.shape[1], CHUNK_NUMEL), source.device, err_beta)
    for piece in range(source.shape[0]):
        for run in _runs(source.shape[1], packing):
            lost = None if error is None else error[piece, run.elements]
            encoder.run(source[piece, run.elements], scales[piece, run.blocks], codes[piece, run.codes], run, lost)


@torch.no_grad()
def dequantize(output: torch.Tensor, packed: torch.Tensor, packing: Packing = INT8) -> None:
    """Unpack pieces into `output` (pieces, k) of fp32, bf16 or fp16; `packed` as in `quantize`."""
    sum_packed(output, _rows(packed).unsqueeze(0), packing)


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
    if output.numel() == 0:
        return
    kernels = _kernels(output)
    if kernels is not None:
        kernels.sum_packed(output, parts, packing, own, own_place, 1.0 if scale is None else scale, accumulate)
        return
    split = [packing.split(part, output.shape[1]) for part in parts]
    decoder = _Decoder(packing, min(output.shape[1], CHUNK_NUMEL), output.device)
    for piece in range(output.shape[0]):
        for run in _runs(output.shape[1], packing):
            target = output[piece, run.elements]
            contributions = [(s[piece, run.blocks], c[piece, run.codes]) for s, c in split]
            exact = None if own is None else own[piece, run.elements]
            total = decoder.total(contributions, exact, own_place, run)
            if scale is not None and scale != 1.0:
                total.mul_(scale)
            if accumulate:
                total.add_(decoder.as_fp32(target))
            target.copy_(total)


class _Run:
    """Whole blocks of equal width that are worked on at once, as slices of a piece."""

    __slots__ = ("blocks", "codes", "elements", "numel", "width")

    def __init__(self, start: int, stop: int, width: int, packing: Packing) -> None:
        self.elements = slice(start, stop)
        self.numel = stop - start
        self.width = width
        self.blocks = slice(start // packing.block, packing.blocks(stop))
        self.codes = slice(packing.code_nbytes(start), packing.code_nbytes(stop))


def _runs(numel: int, packing: Packing) -> Iterator[_Run]:
    """Runs that cover a piece of `numel` elements; a shorter last block is one of its own."""
    whole = numel // packing.block * packing.block
    step = max(CHUNK_NUMEL // packing.block, 1) * packing.block
    for start in range(0, whole, step):
        yield _Run(start, min(start + step, whole), packing.block, packing)
    if whole < numel:
        yield _Run(whole, numel, numel - whole, packing)


class _Encoder:
    """Scratch and arithmetic of quantization in plain torch."""

    def __init__(self, packing: Packing, numel: int, device: torch.device, err_beta: float) -> None:
        self._packing = packing
        numel = max(numel, packing.block)
        self._value, self._work, self._bytes = (
            torch.empty(numel, dtype=torch.float32, device=device) for _ in range(3)
        )
        self._err_beta = err_beta

    def run(
        self,
        source: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        run: _Run,
        error: torch.Tensor | None,
    ) -> None:
        """Pack one run."""
        value, work = source, self._work[: run.numel]
        if source.dtype is not torch.float32 or error is not None:
            value = self._value[: run.numel].copy_(source)
        if error is not None:
            value.add_(work.copy_(error))
        blocks, multiples = value.view(-1, run.width), work.view(-1, run.width)
        torch.abs(blocks, out=multiples)
        largest = torch.amax(multiples, 1)
        # inf - inf and nan - nan are nan, everything else is 0.
        torch.mul(largest, 1.0 / self._packing.largest_code, out=scales)
        scales.clamp_(min=SMALLEST_SCALE).add_(largest.sub_(largest.clone()))
        torch.mul(blocks, scales.reciprocal().unsqueeze(1), out=multiples)
        multiples.round_()
        if self._packing.bits == 8:
            codes.copy_(work)
        else:
            self._pack_halves(codes, multiples)
        if error is not None:
            torch.sub(blocks, multiples.mul_(scales.unsqueeze(1)), out=multiples)
            self._keep_error(error, work)

    def _pack_halves(self, codes: torch.Tensor, multiples: torch.Tensor) -> None:
        rows, width = multiples.shape
        half = (width + 1) // 2
        packed = self._bytes[: rows * half]
        low = packed.view(rows, half)
        torch.add(multiples[:, :half], 8.0, out=low)
        # -7*16+1 = -111 to 7*16+15 = 127: a signed byte.
        low[:, : width - half].add_(multiples[:, half:], alpha=16.0)
        codes.copy_(packed)

    def _keep_error(self, error: torch.Tensor, lost: torch.Tensor) -> None:
        beta = self._err_beta
        kept = self._bytes[: lost.numel()].copy_(error).mul_(beta).add_(lost, alpha=1.0 - beta)
        error.copy_(kept.nan_to_num_(0.0, 0.0, 0.0))


class _Decoder:
    """Scratch and arithmetic of unpacking and summing in plain torch."""

    def __init__(self, packing: Packing, numel: int, device: torch.device) -> None:
        self._packing = packing
        numel = max(numel, packing.block)
        self._total, self._part = (torch.empty(numel, dtype=torch.float32, device=device) for _ in range(2))
        self._nibbles = torch.empty(numel // 2 + 1 if packing.bits == 4 else 0, dtype=torch.int8, device=device)

    def total(
        self,
        contributions: list[tuple[torch.Tensor, torch.Tensor]],
        own: torch.Tensor | None,
        own_place: int,
        run: _Run,
    ) -> torch.Tensor:
        """Sum of (scales, codes) and the unpacked contribution, in order; fp32, valid until the next call."""
        total = self._total[: run.numel]
        count = len(contributions) + (own is not None)
        source = iter(contributions)
        for place in range(count):
            target = total if place == 0 else self._part[: run.numel]
            if own is not None and place == own_place:
                target.copy_(own)
            else:
                self._decode(target, *next(source), run)
            if place:
                total.add_(target)
        return total

    def as_fp32(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values as fp32; valid until the next call."""
        return tensor if tensor.dtype is torch.float32 else self._part[: tensor.numel()].copy_(tensor)

    def _decode(self, target: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, run: _Run) -> None:
        blocks = target.view(-1, run.width)
        if self._packing.bits == 8:
            target.copy_(codes)
        else:
            half = (run.width + 1) // 2
            nibbles = self._nibbles[: codes.numel()]
            torch.bitwise_and(codes, 15, out=nibbles)
            blocks[:, :half].copy_(nibbles.view(-1, half)).sub_(8.0)
            torch.bitwise_right_shift(codes, 4, out=nibbles)
            blocks[:, half:].copy_(nibbles.view(-1, half)[:, : run.width - half])
        blocks.mul_(scales.unsqueeze(1))


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


def _kernels(floats: torch.Tensor) -> ModuleType | None:
    """The kernels for these pieces; None: plain torch. Kernels count the elements of a piece in 32 bits."""
    return _triton_kernels() if floats.device.type == "cuda" and floats.shape[1] < 1 << 31 else None


@functools.cache
def _triton_kernels() -> ModuleType | None:
    try:
        import triton  # noqa: F401  # a part of torch's GPU wheels; without it plain torch serves
    except ImportError:
        return None
    from deepspeed.comm import blockwise_triton

    return blockwise_triton
