"""A torch file's object, its tensors mapped.

Tensors become :class:`PlainTensor` objects; other names are looked up by the caller's rule, which decides what a file
may make. Nothing named in a file is called but what that rule returned.

Owns: opening, unpickling, the check that records are whole. Does not own: which names are allowed.
Invariant: what the file says of a tensor is checked against the storage it names.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.utils.torch_archive import symbols
from deepspeed.utils.torch_archive.archive import Record, records
from deepspeed.utils.torch_archive.symbols import NeedsTorch
from deepspeed.utils.torch_archive.tensors import DTYPES, DType, PlainTensor, Size, Storage, next_address

__all__ = ["MappedFile", "NeedsTorch", "load", "mapped"]

_PICKLE = b"\x80"  # how files begin that older releases of torch wrote

# ``(module, name) -> object``, for names that are not torch's. Names of torch come here first: None leaves them to us.
FindClass = Callable[[str, str], Any]


def load(path: str | os.PathLike[str], find_class: FindClass) -> Any:
    """The object in ``path``, its tensors mapped.

    Raises FileNotFoundError; ValueError for a file that is torn or not one of torch; NeedsTorch for one of an old
    format, of another byte order, or with something of torch inside that is no plain tensor; and whatever a damaged
    pickle makes of the classes ``find_class`` returns.
    """
    file = mapped(Path(path))
    data = memoryview(file)
    if data[:1] == _PICKLE:
        raise NeedsTorch("the file has the format of older releases of torch")
    found = records(data)
    if "data.pkl" not in found:
        raise ValueError("it has no record data.pkl")
    order = found.get("byteorder")
    if order is not None and _content(data, order).decode() != sys.byteorder:
        raise NeedsTorch("the file has another byte order")
    return _Unpickler(file, found, find_class).load()


class MappedFile(mmap.mmap):
    """The bytes of a file; writing to them would change memory alone.

    ``address``: the number of its first byte (:meth:`PlainTensor.data_ptr` counts from it).
    """

    path: Path
    address: int


def mapped(path: Path) -> MappedFile:
    """Map ``path``. Raises FileNotFoundError, and ValueError for an empty file."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ValueError("it is empty")
        made = MappedFile(file.fileno(), 0, access=mmap.ACCESS_COPY)
    made.path, made.address = path, next_address()
    return made


def _content(data: memoryview, record: Record) -> bytes:
    content = bytes(data[record.start : record.start + record.nbytes])
    if zlib.crc32(content) != record.crc32:
        raise ValueError(f"its record {record.name} has another checksum than was saved")
    return content


class _Unpickler(pickle.Unpickler):
    """See the module docstring."""

    def __init__(self, file: MappedFile, found: dict[str, Record], find_class: FindClass) -> None:
        self._data, self._address = memoryview(file), file.address
        super().__init__(io.BytesIO(_content(self._data, found["data.pkl"])))
        self._records, self._find = found, find_class
        self._storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path in _REBUILDERS:
            return _REBUILDERS[path]
        if module.partition(".")[0] == "torch":
            return self._find(module, name) or symbols.find(path)
        return self._find(module, name)

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage, key, _, numel = pid
        if kind != "storage" or not isinstance(storage, symbols.StorageKind):
            raise NeedsTorch(f"a reference to {pid}")
        if key not in self._storages:
            record = self._records.get(f"data/{key}")
            nbytes = int(numel) * (1 if storage.dtype is None else storage.dtype.itemsize)
            if record is None or record.nbytes < nbytes:
                raise ValueError(f"storage {key} of {nbytes} bytes is not in the file")
            part = self._data[record.start : record.start + record.nbytes]
            self._storages[key] = Storage(part, storage.dtype, self._address + record.start)
        return self._storages[key]


# ---- what torch's functions make of a storage ----------------------------------------------------------------------


def _tensor(storage: Storage, offset: int, shape: Any, strides: Any, dtype: DType | None, grad: bool) -> PlainTensor:
    if type(storage) is not Storage or not isinstance(dtype, DType):
        raise ValueError("a tensor over something that is no storage")
    return PlainTensor(storage.data, dtype, shape, strides, offset, requires_grad=bool(grad), address=storage.address)


def _rebuild(storage: Any, offset: int, shape: Any, strides: Any) -> PlainTensor:
    return _tensor(storage, offset, shape, strides, storage.dtype, False)


def _rebuild_v2(
    storage: Any, offset: int, shape: Any, strides: Any, grad: bool, hooks: Any, metadata: Any = None
) -> PlainTensor:
    if metadata:
        raise NeedsTorch("a tensor that is conjugated or negated when it is read")
    return _tensor(storage, offset, shape, strides, storage.dtype, grad)


def _rebuild_v3(
    storage: Any, offset: int, shape: Any, strides: Any, grad: bool, hooks: Any, dtype: Any, metadata: Any = None
) -> PlainTensor:
    if metadata:
        raise NeedsTorch("a tensor that is conjugated or negated when it is read")
    return _tensor(storage, offset, shape, strides, dtype, grad)


def _rebuild_from_type(rebuild: Any, kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    """A tensor with attributes or a class of its own, without them."""
    return rebuild(*args)


_REBUILDERS: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _rebuild,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.Size": Size,
    **{str(dtype): dtype for dtype in DTYPES.values()},
}
