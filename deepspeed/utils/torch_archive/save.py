"""An object's torch file, its tensors plain: what ``utils/torch_file.py`` writes of torch's, without torch.

Names of torch are written as names; nothing is looked up. In Python, not in C: these pickles are small.

Owns: pickling. Does not own: the archive and the order of records (``packs.py``).
Invariant: ``torch.load(weights_only=True)`` reads what it reads of torch's own.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any

from deepspeed.utils.torch_archive import symbols
from deepspeed.utils.torch_archive.packs import ArchiveFile, Pack, PackNumbers, Slice, StorageReference
from deepspeed.utils.torch_archive.symbols import Call, NeedsTorch, StorageKind, Symbol
from deepspeed.utils.torch_archive.tensors import DType, PlainTensor, Size, Storage, contiguous_strides, dtype_of

__all__ = ["PlainFile"]

_REBUILD_V2 = Symbol("torch._utils._rebuild_tensor_v2")
_REBUILD_V3 = Symbol("torch._utils._rebuild_tensor_v3")
_PARAMETER = Symbol("torch._utils._rebuild_parameter")
_SIZE = Symbol("torch.Size")


class PlainFile(ArchiveFile):
    """``obj`` ready to be written: pickled, with its storages known but not yet read.

    Classes with an attribute ``pickled_as`` are written under that path. Raises NeedsTorch for objects of torch, and
    whatever pickling raises (TypeError, AttributeError, pickle.PicklingError) for others that cannot be.
    """

    def __init__(self, obj: Any) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(obj)
        super().__init__(obj, buffer.getvalue(), pickler.numbers.packs)


_PYTHON: Any = pickle._Pickler  # the one in C finds each name by importing its module


class _Pickler(_PYTHON):
    """See the module docstring."""

    dispatch = _PYTHON.dispatch.copy()

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.numbers = PackNumbers()
        self._shared: dict[Any, Pack] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is StorageReference:
            pack = obj.pack
            dtype = dtype_of(pack.dtype)
            kind = symbols.STORAGES.get(dtype.name, symbols.BYTES)
            numel = pack.nbytes if kind is symbols.BYTES else pack.numel
            return ("storage", kind, self.numbers.key_of(pack), "cpu", numel)
        if type(obj) is Storage or symbols.is_torchs(obj):
            raise NeedsTorch(f"an object of {type(obj).__name__}")
        return None

    # ---- names -----------------------------------------------------------------------------------------------------

    def save_global(self, obj: Any, name: str | None = None) -> None:
        path = getattr(obj, "pickled_as", None)
        if path is None:
            super().save_global(obj, name)
        else:
            self._save_name(path, obj)

    def _save_name(self, path: str, obj: Any) -> None:
        module, _, name = path.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        self.memoize(obj)

    def _save_symbol(self, obj: Any) -> None:
        self._save_name(obj.pickled_as, obj)

    def _save_dtype(self, obj: DType) -> None:
        self._save_name(str(obj), obj)

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def _save_call(self, obj: Call) -> None:
        self.save_reduce(obj.symbol, obj.args, obj=obj)

    def _save_size(self, obj: Size) -> None:
        self.save_reduce(_SIZE, (tuple(obj),), obj=obj)

    def _save_slice(self, obj: Slice) -> None:
        self._save_rebuilt(obj, obj.pack, obj.offset, obj.shape, False)

    def _save_tensor(self, obj: PlainTensor) -> None:
        identity: Any = (obj.data_ptr(), obj.dtype, obj.shape, obj.stride()) if obj.numel() else id(obj)
        pack = self._shared.get(identity)
        if pack is None:
            pack = self._shared[identity] = Pack(obj.dtype)
            pack.add(obj)
        self._save_rebuilt(obj, pack, 0, tuple(obj.shape), obj.requires_grad)

    def _save_parameter(self, obj: symbols.Parameter) -> None:
        data = PlainTensor(obj._data, obj.dtype, obj.shape, obj._strides, obj._offset, address=obj._address)
        self.save_reduce(_PARAMETER, (data, obj.requires_grad, obj.hooks), obj=obj)

    def _save_rebuilt(self, obj: Any, pack: Pack, offset: int, shape: tuple[int, ...], grad: bool) -> None:
        dtype = dtype_of(pack.dtype)
        common: tuple[Any, ...] = (
            StorageReference(pack),
            offset,
            shape,
            contiguous_strides(shape),
            grad,
            OrderedDict(),
        )
        if dtype.storage is not None:
            self.save_reduce(_REBUILD_V2, common, obj=obj)
        else:
            self.save_reduce(_REBUILD_V3, (*common, dtype), obj=obj)

    dispatch[Symbol] = dispatch[StorageKind] = _save_symbol
    dispatch[DType] = _save_dtype
    dispatch[Call] = _save_call
    dispatch[Size] = _save_size
    dispatch[Slice] = _save_slice
    dispatch[PlainTensor] = _save_tensor
    dispatch[symbols.Parameter] = _save_parameter
