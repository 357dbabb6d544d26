"""Lists of tensors as what a native kernel needs of them: addresses, numbers of elements, dtypes.

Owns: which tensors the kernels can walk (plain, contiguous, on the CPU, of a known dtype), and reading that off a list
in one call (`native/csrc/optimizers_columns.cpp`) where torch has DLPack's exchange interface. Does not own: rows and
kernels (`native_kernels.py`).
Invariant: both ways of reading give the same answer; nothing about a tensor is remembered from call to call.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from deepspeed.native.build import NativeUnavailable, load

__all__ = ["KINDS", "LIBRARY", "Column", "read"]

LIBRARY = "optimizers"
KINDS: dict[torch.dtype, int] = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""Dtypes of the kernels and their codes; fp64 is left to torch."""

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_MIXED = 15
_DLPACK = 1  # the major version of the interface
_VIEW = 5  # place of `dltensor_from_py_object_no_sync` among the pointers of the interface
# Methods as functions of a tensor, for map(): faster than a loop.
_data_ptr, _is_contiguous, _numel = torch.Tensor.data_ptr, torch.Tensor.is_contiguous, torch.Tensor.numel


class Column(NamedTuple):
    """Of a list of tensors, in its order. `kind` is the code of all their dtypes, 0 where they differ."""

    addresses: array.array[int]
    numels: array.array[int]
    kinds: array.array[int]
    kind: int


def read(tensors: Sequence[torch.Tensor]) -> Column | None:
    """The column of these tensors; None where a kernel may not walk the memory of one of them.

    Addresses hold as long as the tensors are alive and nobody changes their storage.
    """
    if not _PLAIN.issuperset(map(type, tensors)):
        return None
    listed = tensors if type(tensors) is list else list(tensors)
    reader = _Reader.made() if listed else None
    return _read_each(listed) if reader is None else reader.read(listed)


class _Reader:
    """`ds_column` with the two functions it is to call."""

    _made: _Reader | None = None

    def __init__(self, view: int) -> None:
        library = load(LIBRARY)
        # The same library once more, with calls that keep the interpreter's lock and hand on Python's errors.
        self._column = ctypes.PyDLL(library._name, handle=library._handle).ds_column
        self._column.restype = ctypes.c_int64
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._column.argtypes = (pointer, pointer, ctypes.py_object, count, pointer)
        self._view = view
        self._item = ctypes.cast(ctypes.pythonapi.PyList_GetItem, pointer).value

    @classmethod
    def made(cls) -> _Reader | None:
        """The one reader; None where torch has no such interface (before 2.10) or there is no library."""
        if cls._made is None:
            view = _view_function()
            try:
                cls._made = cls(view) if view else None
            except NativeUnavailable:
                return None
        return cls._made

    def read(self, tensors: list[torch.Tensor]) -> Column | None:
        count = len(tensors)
        values = array.array("q", bytes(24 * count))
        try:
            kind = self._column(self._view, self._item, tensors, count, values.buffer_info()[0])
        except (RuntimeError, BufferError):  # a tensor without memory or strides
            return None
        if kind == 0:
            return None
        return Column(values[:count], values[count : 2 * count], values[2 * count :], 0 if kind == _MIXED else kind)


def _view_function() -> int:
    """The address of torch's function that describes a tensor as a DLTensor; 0 where there is none."""
    interface: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if interface is None:
        return 0
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    at = pointer_of(interface, b"dlpack_exchange_api")
    if ctypes.c_uint32.from_address(at).value != _DLPACK:
        return 0
    return (ctypes.c_void_p * (_VIEW + 1)).from_address(at)[_VIEW] or 0


def _read_each(tensors: list[torch.Tensor]) -> Column | None:
    """`read` tensor by tensor."""
    try:
        if False in [tensor.is_cpu for tensor in tensors] or not all(map(_is_contiguous, tensors)):
            return None
    except RuntimeError:  # a layout without strides
        return None
    kinds = [KINDS.get(tensor.dtype, 0) for tensor in tensors]
    if 0 in kinds:
        return None
    same = kinds[0] if kinds and kinds.count(kinds[0]) == len(kinds) else 0
    # By way of lists: an array that grows element by element takes twice as long.
    addresses, numels = (array.array("q", list(map(of, tensors))) for of in (_data_ptr, _numel))
    return Column(addresses, numels, array.array("q", kinds), same)
