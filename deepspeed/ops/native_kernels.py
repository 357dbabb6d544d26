"""The C++ kernels of `native/csrc/optimizers.cpp` as Python functions over lists of tensors.

Owns: the prototypes, the layout of a row, the dtypes the kernels know, the number of threads. Does not own: compiling
and loading (`native/build.py`), which tensors may be given to a kernel and what to do with the others
(`row_optimizer.py`).
Invariant: a table holds addresses; whoever makes one keeps the tensors alive until the kernel returns.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.native.build import NativeUnavailable, load, switched_off

__all__ = ["KINDS", "LIBRARY", "ROW", "cast", "kernel", "run", "sumsq"]

LIBRARY = "optimizers"
KINDS: dict[torch.dtype, int] = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""Dtypes of the kernels and their codes; fp64 is left to torch."""
ROW = 10
"""int64 of a row: addresses of parameter, gradient, three states and the copy; numel, kinds, rule, the kernel's own."""

_ENTRY = {"cpu_adam": "ds_adam", "cpu_adagrad": "ds_adagrad", "cpu_lion": "ds_lion", "fused_adam": "ds_adam",
          "fused_lion": "ds_lion"}  # fmt: skip
_Kernel = Any  # a ctypes function


def kernel(op: str) -> _Kernel:
    """The update kernel of the optimizer op `op` ("cpu_adam", ...).

    Raises:
        NativeUnavailable: the op is switched off, or the library cannot be built or loaded.
    """
    reason = switched_off(op)
    if reason:
        raise NativeUnavailable(f"op {op!r}: {reason}")
    return getattr(_library(), _ENTRY[op])


def run(update: _Kernel, table: Sequence[int], rules: Sequence[float], scale: float) -> None:
    """Update all rows of `table` (`ROW` integers each) in one parallel region.

    rules: eight doubles per rule, in the order of `update_rules.h`. scale: factor of the gradients.
    """
    rows = array.array("q", table)
    numbers = array.array("d", rules)
    update(rows.buffer_info()[0], len(rows) // ROW, numbers.buffer_info()[0], scale, torch.get_num_threads())


def sumsq(tensors: Sequence[torch.Tensor]) -> tuple[float, bool]:
    """(sum of the squares of all elements in float64, whether any element is inf or nan); one pass over the tensors.

    tensors: fp32, bf16 or fp16, contiguous, on the CPU. The sum does not depend on the number of threads.

    Raises:
        NativeUnavailable: there is no native library.
        ValueError: a tensor the kernel cannot read.
    """
    library = _library()
    table: list[int] = []
    for tensor in tensors:
        table += (0, _address(tensor), 0, 0, 0, 0, tensor.numel(), KINDS[tensor.dtype] << 4, 0, 0)
    rows = array.array("q", table)
    at, count = rows.buffer_info()[0], len(tensors)
    sums = array.array("d", bytes(8 * max(1, library.ds_units(at, count))))
    total = library.ds_sumsq(at, count, sums.buffer_info()[0], torch.get_num_threads())
    return total, not total < float("inf")


def cast(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """targets[i] = scale * sources[i], computed in fp32 and rounded to the dtype of the target.

    All fp32, bf16 or fp16, contiguous, on the CPU; pairs have the same numel.

    Raises:
        NativeUnavailable: there is no native library.
        ValueError: a tensor the kernel cannot read, or a pair of different sizes.
    """
    library = _library()
    table: list[int] = []
    for source, target in zip(sources, targets, strict=True):
        if source.numel() != target.numel():
            raise ValueError(f"cast: source of shape {tuple(source.shape)} for a target of {tuple(target.shape)}")
        kinds = KINDS[source.dtype] << 4 | KINDS[target.dtype] << 20
        table += (0, _address(source), 0, 0, 0, _address(target), source.numel(), kinds, 0, 0)
    rows = array.array("q", table)
    library.ds_cast(rows.buffer_info()[0], len(sources), scale, torch.get_num_threads())
    torch.autograd.graph.increment_version(targets)


def _address(tensor: torch.Tensor) -> int:
    if tensor.dtype not in KINDS or not tensor.is_cpu or tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(
            f"native kernel: tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}, {tensor.layout}, "
            "expected a contiguous one of fp32, bf16 or fp16 on the CPU"
        )
    return tensor.data_ptr()


def _library() -> ctypes.CDLL:
    library = load(LIBRARY)
    if library.ds_sumsq.restype is not ctypes.c_double:
        pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        for name in set(_ENTRY.values()):
            function = getattr(library, name)
            function.argtypes, function.restype = (pointer, count, pointer, number, count), None
        library.ds_cast.argtypes, library.ds_cast.restype = (pointer, count, number, count), None
        library.ds_units.argtypes, library.ds_units.restype = (pointer, count), count
        library.ds_sumsq.argtypes, library.ds_sumsq.restype = (pointer, count, pointer, count), number
    return library
