"""Blockwise quantization in plain torch, on any device: the code that says what the numbers are.

Owns: the arithmetic in a few passes over scratch buffers. Does not own: the format, the checks and the choice
(`blockwise.py`); kernels with the same two functions are `blockwise_native.py` and `blockwise_triton.py`.
Invariant: an element's bits depend on its block and on nothing else, neither on the chunk nor on the number of threads.
Hence no operation that may fuse a product and a sum into one rounding (`add` with an alpha, but of small integers).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepspeed.comm.blockwise import Packing

__all__ = ["quantize", "sum_packed"]

# Elements that are worked on at a time. Packing 4M fp32 elements to int8 took 7.3, 4.4, 2.1, 2.0 and 1.5 ns each with
# 2^14, 2^15, ... 2^18 (and 10.8 in whole-tensor torch): the calls cost more than the cache gives.
CHUNK_NUMEL = 1 << 18
# As in `blockwise.py`.
_SMALLEST_SCALE = 2.0**-126


def quantize(
    packed: torch.Tensor, source: torch.Tensor, packing: Packing, error: torch.Tensor | None, err_beta: float
) -> None:
    """`blockwise.quantize` of checked arguments."""
    scales, codes = packing.split(packed, source.shape[1])
    encoder = _Encoder(packing, min(source.shape[1], CHUNK_NUMEL), source.device, err_beta)
    for piece in range(source.shape[0]):
        for run in _runs(source.shape[1], packing):
            lost = None if error is None else error[piece, run.elements]
            encoder.run(source[piece, run.elements], scales[piece, run.blocks], codes[piece, run.codes], run, lost)


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
    split = [packing.split(part, output.shape[1]) for part in parts]
    decoder = _Decoder(packing, min(output.shape[1], CHUNK_NUMEL), output.device)
    for piece in range(output.shape[0]):
        for run in _runs(output.shape[1], packing):
            target = output[piece, run.elements]
            contributions = [(s[piece, run.blocks], c[piece, run.codes]) for s, c in split]
            exact = None if own is None else own[piece, run.elements]
            total = decoder.total(contributions, exact, own_place, run)
            if factor != 1.0:
                total.mul_(factor)
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
        scales.clamp_(min=_SMALLEST_SCALE).add_(largest.sub_(largest.clone()))
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
        kept = self._bytes[: lost.numel()].copy_(error).mul_(beta).add_(lost.mul_(1.0 - beta))
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
