"""Tensors as places in bytes: dtype, shape and strides over a mapped storage. No arithmetic.

They answer the questions readers ask of torch's tensors, under the same names, so that code that only looks up and
copies elements takes either kind. Whoever calculates asks ``bridge.py`` for torch's.

Owns: dtypes, shapes, views. Does not own: where the bytes come from (``load.py``).
Invariant: a tensor lies inside its storage, else making it is a ValueError.
"""

from __future__ import annotations

import itertools
import math
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "DTYPES",
    "DType",
    "PlainTensor",
    "Size",
    "Storage",
    "contiguous_strides",
    "dtype_of",
    "is_tensor",
    "scalar",
    "zeros",
]


@dataclass(frozen=True, eq=False)
class DType:
    """A dtype of torch. ``storage``: torch's class for storages of it, None where it has none. ``code``: of struct."""

    name: str
    itemsize: int
    storage: str | None = None
    code: str | None = None

    @property
    def is_floating_point(self) -> bool:
        return "float" in self.name

    @property
    def is_complex(self) -> bool:
        return self.name.startswith("complex")

    def __str__(self) -> str:
        return f"torch.{self.name}"

    __repr__ = __str__

    def __deepcopy__(self, memo: Any) -> DType:
        return self


DTYPES: Final = {
    dtype.name: dtype
    for dtype in (
        DType("float64", 8, "DoubleStorage", "d"), DType("float32", 4, "FloatStorage", "f"),
        DType("float16", 2, "HalfStorage", "e"), DType("bfloat16", 2, "BFloat16Storage"),
        DType("int64", 8, "LongStorage", "q"), DType("int32", 4, "IntStorage", "i"),
        DType("int16", 2, "ShortStorage", "h"), DType("int8", 1, "CharStorage", "b"),
        DType("uint8", 1, "ByteStorage", "B"), DType("bool", 1, "BoolStorage", "?"),
        DType("complex64", 8, "ComplexFloatStorage"), DType("complex128", 16, "ComplexDoubleStorage"),
        DType("complex32", 4),
        DType("uint16", 2, None, "H"), DType("uint32", 4, None, "I"), DType("uint64", 8, None, "Q"),
        DType("float8_e4m3fn", 1), DType("float8_e5m2", 1), DType("float8_e4m3fnuz", 1), DType("float8_e5m2fnuz", 1),
        DType("float8_e8m0fnu", 1),
    )
}  # fmt: skip


def dtype_of(dtype: Any) -> DType:
    """The dtype of that name, or with the name of torch's ``dtype``. Raises KeyError for one that is not known."""
    return dtype if isinstance(dtype, DType) else DTYPES[str(dtype).removeprefix("torch.")]


class Size(tuple[int, ...]):
    """A shape, as ``torch.Size`` has it."""

    def numel(self) -> int:
        return math.prod(self)

    def __repr__(self) -> str:
        return f"torch.Size({list(self)})"


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor of ``shape`` without gaps, in elements, as torch gives them."""
    strides, run = [], 1
    for size in reversed(shape):
        strides.append(run)
        run *= max(size, 1)
    return tuple(reversed(strides))


class Storage:
    """A storage of a file. ``dtype`` None: bytes."""

    __slots__ = ("address", "data", "dtype")

    def __init__(self, data: memoryview, dtype: DType | None, address: int) -> None:
        self.data, self.dtype, self.address = data, dtype, address


_addresses = itertools.count(1)


class PlainTensor:
    """Elements of ``dtype`` in the bytes ``data``: see the module docstring.

    ``offset`` and ``strides`` count elements. ``address``: a number of the storage's first byte, its own for every byte
    that is loaded; tensors over the same bytes are found by it.
    """

    __slots__ = ("_address", "_data", "_offset", "_strides", "dtype", "requires_grad", "shape")

    def __init__(
        self,
        data: memoryview,
        dtype: DType,
        shape: Iterable[int],
        strides: Sequence[int] | None = None,
        offset: int = 0,
        *,
        requires_grad: bool = False,
        address: int | None = None,
    ) -> None:
        self._data, self.dtype, self.shape, self._offset = data, dtype, Size(shape), offset
        self._strides = contiguous_strides(self.shape) if strides is None else tuple(strides)
        self.requires_grad = requires_grad
        self._address = next_address() if address is None else address
        last = offset + sum((size - 1) * stride for size, stride in zip(self.shape, self._strides, strict=True))
        if min((*self.shape, *self._strides, offset), default=offset) < 0:
            raise ValueError(f"a tensor of shape {tuple(self.shape)}, strides {self._strides} at {offset} is none")
        if self.numel() and (last + 1) * dtype.itemsize > len(data):
            raise ValueError(
                f"a tensor of shape {tuple(self.shape)}, strides {self._strides} at {offset} does not lie in a storage "
                f"of {len(data)} bytes"
            )

    # ---- what it is ------------------------------------------------------------------------------------------------

    def numel(self) -> int:
        return math.prod(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return self._address + self._offset * self.dtype.itemsize

    def is_contiguous(self) -> bool:
        wanted = contiguous_strides(self.shape)
        pairs = zip(self.shape, self._strides, wanted, strict=True)
        return not self.numel() or all(size == 1 or stride == right for size, stride, right in pairs)

    def __len__(self) -> int:
        return self.shape[0]

    def __deepcopy__(self, memo: Any) -> PlainTensor:
        return self

    # ---- parts of it -----------------------------------------------------------------------------------------------

    def _view(self, shape: Iterable[int], strides: Sequence[int] | None, offset: int) -> PlainTensor:
        return PlainTensor(self._data, self.dtype, shape, strides, offset, address=self._address)

    def detach(self) -> PlainTensor:
        return self._view(self.shape, self._strides, self._offset) if self.requires_grad else self

    def narrow(self, dim: int, start: int, length: int) -> PlainTensor:
        """``length`` elements from ``start`` along ``dim``, over the same bytes. Raises ValueError beyond its end."""
        if start < 0 or length < 0 or start + length > self.shape[dim]:
            raise ValueError(f"elements {start} to {start + length} of dim {dim} of a tensor of {tuple(self.shape)}")
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return self._view(shape, self._strides, self._offset + (start * self._strides[dim] if length else 0))

    def __getitem__(self, where: int | slice) -> PlainTensor:
        """One element along the first dim, or a run of them."""
        if isinstance(where, slice):
            start, stop, step = where.indices(self.shape[0])
            if step != 1:
                raise ValueError(f"a step of {step}: only runs of elements can be taken")
            return self.narrow(0, start, max(0, stop - start))
        start = where + self.shape[0] if where < 0 else where
        return self.narrow(0, start, 1)._view(
            self.shape[1:], self._strides[1:], self._offset + start * self._strides[0]
        )

    def reshape(self, *shape: Any) -> PlainTensor:
        """The same elements in another shape (one size may be -1); a copy where they do not lie end to end."""
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if -1 in sizes:
            known = math.prod(size for size in sizes if size != -1)
            sizes[sizes.index(-1)] = self.numel() // known if known else 0
        if math.prod(sizes) != self.numel():
            raise ValueError(f"{self.numel()} elements of shape {tuple(self.shape)} cannot take the shape {sizes}")
        if self.is_contiguous():
            return self._view(sizes, None, self._offset if self.numel() else 0)
        return PlainTensor(self.bytes(), self.dtype, sizes)

    def bytes(self) -> memoryview:
        """The elements end to end, in order; copied only where they do not lie so."""
        if self.is_contiguous():
            start = self._offset * self.dtype.itemsize
            return self._data[start : start + self.nbytes]
        import numpy

        size = self.dtype.itemsize
        kind = numpy.dtype((numpy.void, size))
        flat = numpy.frombuffer(self._data, dtype=numpy.uint8)[self._offset * size :]
        seen = numpy.ndarray(self.shape, kind, flat.data, strides=[stride * size for stride in self._strides])
        return memoryview(numpy.ascontiguousarray(seen).view(numpy.uint8).reshape(-1).data)

    # ---- single numbers --------------------------------------------------------------------------------------------

    def item(self) -> Any:
        """The only element, as a number. Raises ValueError where there are several."""
        if self.numel() != 1:
            raise ValueError(f"a tensor of shape {tuple(self.shape)} is not one number")
        data = self.bytes()
        if self.dtype.name == "bfloat16":
            return struct.unpack("<f", bytes(2) + bytes(data))[0]
        if self.dtype.code is None:
            raise ValueError(f"an element of {self.dtype} is no number that can be told without torch")
        return struct.unpack("=" + self.dtype.code, data)[0]

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __repr__(self) -> str:
        """Its shape and its bytes, so that equal texts are equal tensors."""
        if self.numel() == 1 and (self.dtype.code or self.dtype.name == "bfloat16"):
            return f"tensor({self.reshape(-1)[0].item()}, shape={tuple(self.shape)}, dtype={self.dtype})"
        import hashlib

        digest = hashlib.sha256(self.bytes()).hexdigest()[:16]
        return f"tensor(<{digest}>, shape={tuple(self.shape)}, dtype={self.dtype})"


def next_address() -> int:
    """The address of a storage that has none yet."""
    return next(_addresses) << 52


def scalar(value: float) -> PlainTensor:
    """What ``torch.tensor(value)`` is for a number with a fraction.  # 0-dim, float32"""
    return PlainTensor(memoryview(struct.pack("=f", value)), DTYPES["float32"], ())


def zeros(shape: Iterable[int], dtype: DType = DTYPES["float32"]) -> PlainTensor:
    """A tensor of zeros."""
    shape = tuple(shape)
    return PlainTensor(memoryview(bytes(math.prod(shape) * dtype.itemsize)), dtype, shape)


def is_tensor(value: Any) -> bool:
    """True for one of these and for one of torch's."""
    torch = sys.modules.get("torch")
    return isinstance(value, PlainTensor) or (torch is not None and isinstance(value, torch.Tensor))
