"""Files that ``torch.load`` reads, written tensor by tensor.

``torch.save`` writes the whole storage behind a view, and needs every tensor in one piece and in host memory before
the first byte goes out. Here a file holds exactly the elements asked for, and a tensor may be given as parts
(:class:`Pack`), which are copied out one small piece at a time. So writing a checkpoint needs no second copy of it.

The format is that of ``torch.save`` (``torch_archive/archive.py``). Equal tensors (same memory, shape, strides, dtype)
share one storage, so tied weights stay tied.

Owns: pickling objects with torch's tensors, and moving these aside. Does not own: the archive (``torch_archive/``),
where files go and when they count (``checkpoint/disk/durable.py``).
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Container
from typing import Any, BinaryIO

import torch

from deepspeed.utils.host_buffer import RunCopier, round_up
from deepspeed.utils.torch_archive.archive import ALIGN, Seen, Written
from deepspeed.utils.torch_archive.packs import ArchiveFile, Pack, PackNumbers, Slice, StorageReference
from deepspeed.utils.torch_archive.tensors import contiguous_strides

__all__ = ["Pack", "Slice", "TorchFile", "Written", "save"]

_TYPED_STORAGES: dict[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.qint8: torch.QInt8Storage,
    torch.quint8: torch.QUInt8Storage,
    torch.qint32: torch.QInt32Storage,
    torch.quint4x2: torch.QUInt4x2Storage,
    torch.quint2x4: torch.QUInt2x4Storage,
}


class _Pickler(pickle.Pickler):
    """Pickles an object the way ``torch.save`` does, collecting the storages to write."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.numbers = PackNumbers()
        self._shared: dict[tuple[Any, ...], Pack] = {}
        self._storages: dict[int, Pack] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Slice:
            return _rebuilder(obj.pack, obj.offset, obj.shape)
        if type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized:
            pack = self._pack_of(obj)
            return _rebuilder(pack, 0, tuple(obj.shape), obj.requires_grad)
        return NotImplemented

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is StorageReference:
            pack = obj.pack
            kind = _TYPED_STORAGES.get(pack.dtype, torch.UntypedStorage)
            numel = pack.nbytes if kind is torch.UntypedStorage else pack.numel
            return ("storage", kind, self.numbers.key_of(pack), "cpu", numel)
        if isinstance(obj, (torch.storage.TypedStorage, torch.UntypedStorage)):
            return self._whole_storage(obj)
        return None

    def _whole_storage(self, storage: Any) -> Any:
        """A storage reached through a tensor kind we do not take apart (parameter, sparse, subclass)."""
        untyped = storage.untyped() if isinstance(storage, torch.storage.TypedStorage) else storage
        pack = self._storages.get(untyped._cdata)
        if pack is None:
            pack = self._storages[untyped._cdata] = Pack(torch.uint8)
            pack.add(torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped))
        if isinstance(storage, torch.storage.TypedStorage):
            kind = _TYPED_STORAGES.get(storage.dtype)
            if kind is not None:
                return ("storage", kind, self.numbers.key_of(pack), "cpu", storage._size())
        return ("storage", torch.UntypedStorage, self.numbers.key_of(pack), "cpu", untyped.nbytes())

    def _pack_of(self, tensor: torch.Tensor) -> Pack:
        identity: tuple[Any, ...] = (
            (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if tensor.numel()
            else (id(tensor),)
        )
        pack = self._shared.get(identity)
        if pack is None:
            pack = self._shared[identity] = Pack(tensor.dtype)
            pack.add(tensor)
        return pack


def _rebuilder(pack: Pack, offset: int, shape: tuple[int, ...], requires_grad: bool = False) -> tuple[Any, ...]:
    strides = contiguous_strides(shape)
    common: tuple[Any, ...] = (StorageReference(pack), offset, shape, strides, requires_grad, OrderedDict())
    if pack.dtype in _TYPED_STORAGES:
        return torch._utils._rebuild_tensor_v2, common
    return torch._utils._rebuild_tensor_v3, (*common, pack.dtype)


class TorchFile(ArchiveFile):
    """``obj`` ready to be written: pickled, with its storages known but not yet read.

    Raises whatever pickling raises (TypeError, AttributeError, pickle.PicklingError) for objects that cannot be.
    """

    def __init__(self, obj: Any) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(obj)
        super().__init__(obj, buffer.getvalue(), pickler.numbers.packs)
        self._later: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # (where to, what, its version)
        self._failure: Exception | None = None

    @property
    def room_nbytes(self) -> int:
        """Bytes :meth:`move_to` takes."""
        return sum(_rounded(pack.nbytes) for pack in self.packs)

    def move_to(self, room: torch.Tensor, later: Container[int] = ()) -> None:
        """Copy every storage into ``room`` (1D uint8, host), so that the tensors may change before the file is written.

        Tensors whose storage begins at an address of ``later`` are copied by :meth:`finish_moving`, before which they
        must not change. Packs of several parts become one part; ``room`` must live until the file is written.
        """
        copier, offset = RunCopier(), 0
        for pack in self.packs:
            own = room[offset : offset + pack.nbytes].view(pack.dtype)
            start = 0
            for part in pack.parts:
                target = own[start : start + part.numel()]
                if part.untyped_storage().data_ptr() in later:
                    self._later.append((target, part, part._version))
                else:
                    copier.add(target, part)
                start += part.numel()
            pack.parts = [own]
            offset += _rounded(pack.nbytes)
        copier.finish()
        self._obj = None

    def finish_moving(self) -> None:
        """Copy what :meth:`move_to` left for later. Raises RuntimeError where it was written to in the meantime."""
        copier, moved = RunCopier(), self._later
        self._later = []
        for target, part, _ in moved:
            copier.add(target, part)
        copier.finish()
        if any(part._version != version for _, part, version in moved):
            raise RuntimeError(
                "an optimizer state was written to in place while a copy of it was being taken; change states through "
                "deepspeed.utils.safe_set_full_optimizer_state, which waits, or save with checkpoint.writer.decoupled "
                "set to false"
            )

    def give_up(self, error: Exception) -> None:
        """:meth:`write` raises ``error``: what it would write is not whole."""
        self._failure = error

    def write(self, file: BinaryIO, seen: Seen | None = None) -> Written:
        if self._failure is not None:
            raise self._failure
        return super().write(file, seen)


def _rounded(nbytes: int) -> int:
    return round_up(nbytes, ALIGN)


def save(obj: Any, file: BinaryIO) -> Written:
    """Write ``obj`` to ``file`` so that ``torch.load`` returns its equal."""
    return TorchFile(obj).write(file)
