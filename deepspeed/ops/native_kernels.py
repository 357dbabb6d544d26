"""The C++ kernels of `native/csrc/optimizers.cpp` as Python functions over lists of tensors.

Owns: the prototypes, the layout of a row, the number of threads. Does not own: compiling and loading
(`native/build.py`), which tensors a kernel can walk (`columns.py`) and what to do with the others (`row_optimizer.py`).
Invariant: a table holds addresses; whoever makes one keeps the tensors alive until the kernel returns.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.native.build import NativeUnavailable, load, switched_off
from deepspeed.ops import columns
from deepspeed.ops.columns import KINDS, LIBRARY, Column

__all__ = ["KINDS", "LIBRARY", "ROW", "Table", "all_readable", "cast", "is_readable", "kernel", "sumsq"]

ROW = 10
"""int64 of a row: addresses of parameter, gradient, three states and the copy; numel, kinds, rule, the kernel's own."""

_ENTRY = {"cpu_adam": "ds_adam", "cpu_adagrad": "ds_adagrad", "cpu_lion": "ds_lion", "fused_adam": "ds_adam",
          "fused_lion": "ds_lion"}  # fmt: skip
_Kernel = Any  # a ctypes function
_OUT = 5  # place of the copy in a row
_RULE = 8  # numbers of a rule


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
        # Lists that were looked at, by address; they are kept, so no other can have it.
        self._columns: dict[int, tuple[Any, Column]] = {}
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
        column = columns.read(tensors)
        if column is not None:
            self._columns[id(tensors)] = tensors, column
        return column is not None

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
        """Add a row per parameter. All tensors are readable.

        states: one list per state. outs: copies of the new values, None where there is none. rules: of each row.

        Raises:
            ValueError: a tensor of a row has another number of elements than its parameter; nothing was added.
        """
        count = len(params)
        rows = array.array("q", bytes(8 * ROW * count))
        common, kinds = 0, None  # of all rows alike; of each
        numels = self._column(params).numels
        for place, tensors in enumerate((params, grads, *states)):
            column = self._column(tensors)
            if column.numels != numels:
                raise ValueError(_unlike(params, tensors, place))
            rows[place::ROW] = column.addresses
            if column.kind:
                common |= column.kind << 4 * place
            else:
                kinds = [k | kind << 4 * place for k, kind in zip(kinds or [0] * count, column.kinds, strict=True)]
        written = [params]
        if outs is not None:
            given = [out for out in outs if out is not None]
            column = self._column(given)
            if column.numels.tolist() != [n for n, out in zip(numels, outs, strict=True) if out is not None]:
                pairs = [(p, out) for p, out in zip(params, outs, strict=True) if out is not None]
                raise ValueError(_unlike([p for p, _ in pairs], [out for _, out in pairs], _OUT))
            copies = iter(zip(column.addresses, column.kinds, strict=True))
            pairs_of = [(0, 0) if out is None else next(copies) for out in outs]
            rows[_OUT::ROW] = array.array("q", [address for address, _ in pairs_of])
            kinds = [k | kind << 4 * _OUT for k, (_, kind) in zip(kinds or [0] * count, pairs_of, strict=True)]
            written.append(given)
        rows[6::ROW] = numels
        rows[7::ROW] = array.array("q", [common] * count if kinds is None else [k | common for k in kinds])
        rows[8::ROW] = array.array("q", rules)
        self._written += written
        self._kept.append((grads, states))
        self._parts.append(rows)

    def _column(self, tensors: list[torch.Tensor]) -> Column:
        known = self._columns.get(id(tensors))
        if known is not None and known[0] is tensors:
            return known[1]
        if not self.readable(tensors):
            raise ValueError(_unreadable(tensors))
        return self._columns[id(tensors)][1]

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
    return columns.read(tensors) is not None


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
    column = _column_of(tensors)
    rows = array.array("q", bytes(8 * ROW * len(tensors)))
    rows[1::ROW], rows[6::ROW] = column.addresses, column.numels
    rows[7::ROW] = array.array("q", [kind << 4 for kind in column.kinds])
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
    given, wanted = _column_of(sources), _column_of(targets)
    for source, target in zip(sources, targets, strict=True):
        if source.numel() != target.numel():
            raise ValueError(f"cast: source of shape {tuple(source.shape)} for a target of {tuple(target.shape)}")
    rows = array.array("q", bytes(8 * ROW * len(sources)))
    rows[1::ROW], rows[_OUT::ROW], rows[6::ROW] = given.addresses, wanted.addresses, given.numels
    rows[7::ROW] = array.array("q", [a << 4 | b << 4 * _OUT for a, b in zip(given.kinds, wanted.kinds, strict=True)])
    library.ds_cast(rows.buffer_info()[0], len(sources), scale, torch.get_num_threads())
    torch.autograd.graph.increment_version(targets)


def _column_of(tensors: Sequence[torch.Tensor]) -> Column:
    column = columns.read(tensors)
    if column is None:
        raise ValueError(_unreadable(tensors))
    return column


def _unreadable(tensors: Sequence[torch.Tensor]) -> str:
    tensor = next(tensor for tensor in tensors if not is_readable(tensor))
    return (
        f"native kernel: tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}, {tensor.layout}, "
        "expected a contiguous one of fp32, bf16 or fp16 on the CPU"
    )


def _unlike(params: Sequence[torch.Tensor], others: Sequence[torch.Tensor], place: int) -> str:
    what = {0: "parameter", 1: "gradient", _OUT: "copy of the new values"}.get(place, f"optimizer state {place - 1}")
    param, other = next((p, o) for p, o in zip(params, others, strict=True) if p.numel() != o.numel())
    return (
        f"native kernel: {what} of shape {tuple(other.shape)}, {other.numel()} elements, for a parameter of shape "
        f"{tuple(param.shape)}; expected {param.numel()} elements (a state that was put there by hand or loaded from "
        "another model has to be of the parameter's size)"
    )


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
