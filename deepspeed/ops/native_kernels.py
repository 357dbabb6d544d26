"""The C++ kernels of `native/csrc/optimizers.cpp` as Python functions over lists of tensors.

Owns: the prototypes, the layout of a row, the dtypes the kernels know, the number of threads. Does not own: compiling
and loading (`native/build.py`), which tensors may be given to a kernel and what to do with the others
(`row_optimizer.py`).
Invariant: a table holds addresses; whoever makes one keeps the tensors alive until the kernel returns.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from deepspeed.native.build import NativeUnavailable, load, switched_off

__all__ = ["KINDS", "LIBRARY", "ROW", "Table", "all_readable", "cast", "is_readable", "kernel", "sumsq"]

LIBRARY = "optimizers"
KINDS: dict[torch.dtype, int] = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""Dtypes of the kernels and their codes; fp64 is left to torch."""
ROW = 10
"""int64 of a row: addresses of parameter, gradient, three states and the copy; numel, kinds, rule, the kernel's own."""

_ENTRY = {"cpu_adam": "ds_adam", "cpu_adagrad": "ds_adagrad", "cpu_lion": "ds_lion", "fused_adam": "ds_adam",
          "fused_lion": "ds_lion"}  # fmt: skip
_Kernel = Any  # a ctypes function
_OUT = 5  # place of the copy in a row
_RULE = 8  # numbers of a rule
_PLAIN = {torch.Tensor, torch.nn.Parameter}
# Methods as functions of a tensor, for map(): faster than a loop.
_data_ptr, _is_contiguous, _numel = torch.Tensor.data_ptr, torch.Tensor.is_contiguous, torch.Tensor.numel


def kernel(op: str) -> _Kernel:
    """The update kernel of the optimizer op `op` ("cpu_adam", ...).

    Raises:
        NativeUnavailable: the op is switched off, or the library cannot be built or loaded.
    """
    reason = switched_off(op)
    if reason:
        raise NativeUnavailable(f"op {op!r}: {reason}")
    return getattr(_library(), _ENTRY[op])


class Table:
    """Rows of tensors for one call of an update kernel.

    Built column by column with as little Python per tensor as possible: this is what a step over many small tensors
    costs. The tensors are those of lists kept here, so they outlive the call.
    """

    def __init__(self) -> None:
        # Lists that were looked at -> their dtypes; the lists are kept, so no other can have the address.
        self._dtypes: dict[int, tuple[Any, list[torch.dtype]]] = {}
        self._rules: list[float] = []
        self._parts: list[array.array[int]] = []
        self._written: list[list[torch.Tensor]] = []
        self._kept: list[Any] = []

    @staticmethod
    def takes(states: int) -> bool:
        """Whether the kernels know a rule with so many states."""
        return states < _OUT - 1

    def readable(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the kernels may walk the memory of all these tensors. Who changes the list afterwards asks again."""
        dtypes = _dtypes_if_readable(tensors)
        if dtypes is not None:
            self._dtypes[id(tensors)] = tensors, dtypes
        return dtypes is not None

    def add_rule(self, numbers: tuple[float, ...]) -> int:
        """Take the eight numbers of a rule (their order: `update_rules.h`); returns the rule's number."""
        self._rules += map(float, numbers)
        return len(self._rules) // _RULE - 1

    def extend(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: list[list[torch.Tensor]],
        outs: list[torch.Tensor | None] | None,
        rules: list[int],
    ) -> None:
        """Add a row per parameter. All tensors are readable (`all_readable`) and have the numel of their parameter.

        states: one list per state. outs: copies of the new values, None where there is none. rules: of each row.
        """
        count = len(params)
        rows = array.array("q", bytes(8 * ROW * count))
        common, kinds = 0, None  # of all rows alike; of each
        for place, column in enumerate((params, grads, *states)):
            rows[place::ROW] = _int64(map(_data_ptr, column))
            dtypes = self._dtypes_of(column)
            if dtypes.count(dtypes[0]) == count:
                common |= KINDS[dtypes[0]] << 4 * place
            else:
                kinds = [k | KINDS[d] << 4 * place for k, d in zip(kinds or [0] * count, dtypes, strict=True)]
        self._written.append(params)
        self._kept.append((grads, states))
        if outs is not None:
            rows[_OUT::ROW] = _int64(0 if out is None else out.data_ptr() for out in outs)
            kinds = [
                k if o is None else k | KINDS[o.dtype] << 4 * _OUT
                for k, o in zip(kinds or [0] * count, outs, strict=True)
            ]
            self._written.append([out for out in outs if out is not None])
        rows[6::ROW] = _int64(map(_numel, params))
        rows[7::ROW] = array.array("q", [common]) * count if kinds is None else _int64(k | common for k in kinds)
        rows[8::ROW] = _int64(rules) if rules.count(rules[0]) < count else array.array("q", rules[:1]) * count
        self._parts.append(rows)

    def _dtypes_of(self, column: list[torch.Tensor]) -> list[torch.dtype]:
        known = self._dtypes.get(id(column))
        return [tensor.dtype for tensor in column] if known is None or known[0] is not column else known[1]

    def run(self, update: _Kernel, scale: float) -> None:
        """Update all rows in one parallel region. scale: factor of the gradients."""
        if not self._parts:
            return
        rows = self._parts[0]
        for part in self._parts[1:]:
            rows += part
        numbers = array.array("d", self._rules)
        update(rows.buffer_info()[0], len(rows) // ROW, numbers.buffer_info()[0], scale, torch.get_num_threads())
        for tensors in self._written:
            torch.autograd.graph.increment_version(tensors)


def all_readable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a kernel may walk the memory of all these tensors; see `is_readable`."""
    return _dtypes_if_readable(tensors) is not None


def _dtypes_if_readable(tensors: Sequence[torch.Tensor]) -> list[torch.dtype] | None:
    try:
        if (
            _PLAIN.issuperset(map(type, tensors))
            and False not in [tensor.is_cpu for tensor in tensors]
            and all(map(_is_contiguous, tensors))
        ):
            dtypes = [tensor.dtype for tensor in tensors]
            return dtypes if KINDS.keys() >= set(dtypes) else None
    except RuntimeError:  # a layout without strides
        pass
    return None


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether a kernel may walk the memory of this tensor: a plain, contiguous one of a known dtype on the CPU."""
    return all_readable([tensor])


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
    if not is_readable(tensor):
        raise ValueError(
            f"native kernel: tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}, {tensor.layout}, "
            "expected a contiguous one of fp32, bf16 or fp16 on the CPU"
        )
    return tensor.data_ptr()


def _int64(values: Iterable[int]) -> array.array[int]:
    """By way of a list: an array that grows element by element takes twice as long."""
    return array.array("q", list(values))


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
