"""Blockwise quantization of tensors in host memory by the native library: one call to pack, one to unpack and sum.

Owns: the calls into `native/csrc/blockwise.cpp`, and which tensors it can take. Does not own: the format, the checks
and the choice (`blockwise.py`).
Invariant: the same codes, scales, sums and kept errors as `blockwise_torch.py`, bit by bit, whatever the number of
threads and the instruction set. (A NaN is a NaN: which one is not promised, neither here nor by torch.)
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.native.build import NativeUnavailable, load, switched_off

if TYPE_CHECKING:
    from deepspeed.comm.blockwise import Packing

__all__ = ["LIBRARY", "OP", "is_switched_off", "problem", "quantize", "sum_packed", "takes"]

LIBRARY = "blockwise"
OP = "blockwise_quantizer"
"""Name in the op registry; `DS_SKIP_BLOCKWISE_QUANTIZER` switches off what `DS_SKIP_BLOCKWISE` does."""

# The numbers of numbers.h; 0: no tensor.
_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
# Others may hide their memory (subclasses that wrap tensors, tensors that are only traced).
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# `LARGEST_BLOCK` of blockwise.cpp.
_LARGEST_BLOCK = 4096


@functools.cache
def library() -> Any:
    """The native library with its prototypes. Raises `NativeUnavailable`."""
    reason = switched_off(OP)
    if reason:
        raise NativeUnavailable(f"op {OP!r}: {reason}")
    found = load(LIBRARY)
    address, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    found.ds_blockwise_pack.restype = found.ds_blockwise_sum.restype = None
    found.ds_blockwise_pack.argtypes = (
        *(address, count),  # packed: address, bytes from a piece to the next
        *(address, count, count),  # source: address, elements from a piece to the next, kind
        *(address, count, number),  # error: address, kind, share that is kept
        *(count, count, count, count),  # pieces, elements of one, block, bits
        count,  # threads
    )
    found.ds_blockwise_sum.argtypes = (
        *(address, count, count),  # output, as the source above
        *(address, count, count, count),  # parts: address, how many, bytes from a part and from a piece to the next
        *(address, count, count, count),  # own: as the source above, and its place in the order
        *(number, count),  # factor, whether to add
        *(count, count, count, count),
        count,
    )
    return found


@functools.cache
def problem() -> str:
    """Why the library cannot be used in this process; empty when it can. The first call builds it if need be."""
    try:
        library()
    except NativeUnavailable as reason:
        return str(reason)
    return ""


def is_switched_off() -> bool:
    """Whether the environment forbids the library, as the op or as the library."""
    return bool(switched_off(OP) or switched_off(LIBRARY))


def takes(packing: Packing, *tensors: torch.Tensor | None) -> bool:
    """Whether the library can walk these tensors: plain ones of a known dtype on the CPU, blocks that fit its rooms."""
    return packing.block <= _LARGEST_BLOCK and all(
        tensor is None or (type(tensor) in _PLAIN and tensor.device.type == "cpu" and tensor.dtype in _KINDS)
        for tensor in tensors
    )


def quantize(
    packed: torch.Tensor, source: torch.Tensor, packing: Packing, error: torch.Tensor | None, err_beta: float
) -> None:
    """`blockwise.quantize` of checked arguments that it `takes`."""
    library().ds_blockwise_pack(
        *(packed.data_ptr(), packed.stride(0)),
        *(source.data_ptr(), source.stride(0), _KINDS[source.dtype]),
        *((None, 0) if error is None else (error.data_ptr(), _KINDS[error.dtype])),
        err_beta,
        *(*source.shape, packing.block, packing.bits),
        torch.get_num_threads(),
    )
    _changed(packed, error)


def sum_packed(
    output: torch.Tensor,
    parts: torch.Tensor,
    packing: Packing,
    own: torch.Tensor | None,
    own_place: int,
    factor: float,
    accumulate: bool,
) -> None:
    """`blockwise.sum_packed` of checked arguments that it `takes`."""
    library().ds_blockwise_sum(
        *(output.data_ptr(), output.stride(0), _KINDS[output.dtype]),
        *(parts.data_ptr(), *(parts.shape[0], parts.stride(0), parts.stride(1))),
        *((None, 0, 0) if own is None else (own.data_ptr(), own.stride(0), _KINDS[own.dtype])),
        *(own_place, factor, accumulate),
        *(*output.shape, packing.block, packing.bits),
        torch.get_num_threads(),
    )
    _changed(output)


def _changed(*tensors: torch.Tensor | None) -> None:
    """Tell autograd, as torch's own operations do."""
    torch.autograd.graph.increment_version([t for t in tensors if t is not None and not t.is_inference()])
