"""Files that ``torch.load`` reads, written tensor by tensor.

``torch.save`` writes the whole storage behind a view, and needs every tensor in one piece and in host memory before
the first byte goes out. Here a file holds exactly the elements asked for, and a tensor may be given as parts
(:class:`Pack`), which are copied out one small piece at a time. So writing a checkpoint needs no second copy of it.

The format is that of ``torch.save``: a stored (uncompressed) zip archive with ``data.pkl``, ``byteorder``, ``version``
and one ``data/<key>`` record per storage, aligned for memory mapping. Equal tensors (same memory, shape, strides,
dtype) share one storage, so tied weights stay tied. Source: PyTorch documentation, "Serialization semantics".

Owns: pickling and the archive. Does not own: where files go and when they count (``checkpoint/disk/durable.py``).
Invariant: the CRC-32 and size returned are those of the whole file, from one pass over the data.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from deepspeed.utils.crc32 import crc32
from deepspeed.utils.host_buffer import RunCopier, round_up

_PIECE_NBYTES = 8 << 20  # bytes handled at a time: checksum and write share the cache, device copies stay small
_ALIGN = 64
_ROOT = "archive"
_ZIP64_LIMIT = 0xFFFFFFFF  # sizes and offsets from here on take the 64-bit fields
_ZIP64_COUNT = 0xFFFF

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
}


class Pack:
    """A storage made of parts: tensors of one dtype laid end to end. Parts are read when the file is written.

    ``cast`` writes every part in another dtype, piece by piece.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.parts: list[torch.Tensor] = []
        self.numel = 0

    def add(self, tensor: torch.Tensor, shape: Iterable[int] | None = None) -> Slice:
        """Append the elements of ``tensor``; the result stands for them, in ``shape`` (default: the tensor's)."""
        shape = tuple(tensor.shape if shape is None else shape)
        made = Slice(self, self.numel, shape)
        self.parts.append(tensor.detach())
        self.numel += tensor.numel()
        return made

    def whole(self) -> Slice:
        """Everything added so far as one tensor.  # 1D"""
        return Slice(self, 0, (self.numel,))

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Slice:
    """Stands for a tensor inside a :class:`Pack`; ``torch.load`` gives a contiguous tensor of ``shape``."""

    pack: Pack
    offset: int
    shape: tuple[int, ...]


class _StorageReference:
    """What a pickled tensor refers to: a pack of one or more parts."""

    __slots__ = ("pack",)

    def __init__(self, pack: Pack) -> None:
        self.pack = pack


class _Pickler(pickle.Pickler):
    """Pickles an object the way ``torch.save`` does, collecting the storages to write."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.packs: list[Pack] = []
        self._keys: dict[int, str] = {}  # id(pack) -> record key
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
        if type(obj) is _StorageReference:
            pack = obj.pack
            kind = _TYPED_STORAGES.get(pack.dtype, torch.UntypedStorage)
            numel = pack.nbytes if kind is torch.UntypedStorage else pack.numel
            return ("storage", kind, self._key_of(pack), "cpu", numel)
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
                return ("storage", kind, self._key_of(pack), "cpu", storage._size())
        return ("storage", torch.UntypedStorage, self._key_of(pack), "cpu", untyped.nbytes())

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

    def _key_of(self, pack: Pack) -> str:
        key = self._keys.get(id(pack))
        if key is None:
            key = self._keys[id(pack)] = str(len(self.packs))
            self.packs.append(pack)
        return key


def _rebuilder(pack: Pack, offset: int, shape: tuple[int, ...], requires_grad: bool = False) -> tuple[Any, ...]:
    strides = torch.empty(shape, device="meta").stride() if shape else ()
    common: tuple[Any, ...] = (_StorageReference(pack), offset, shape, strides, requires_grad, OrderedDict())
    if pack.dtype in _TYPED_STORAGES:
        return torch._utils._rebuild_tensor_v2, common
    return torch._utils._rebuild_tensor_v3, (*common, pack.dtype)


@dataclass(frozen=True)
class Written:
    """A finished file: its size and the CRC-32 of all its bytes."""

    nbytes: int
    crc32: int


class TorchFile:
    """``obj`` ready to be written: pickled, with its storages known but not yet read.

    Raises whatever pickling raises (TypeError, AttributeError, pickle.PicklingError) for objects that cannot be.
    """

    def __init__(self, obj: Any) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(obj)
        self._obj = obj  # keeps every tensor alive until the file is written
        self.pickled = buffer.getvalue()
        self.packs = pickler.packs
        self._later: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # (where to, what, its version)
        self._failure: Exception | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors and the pickle; the archive adds a few hundred bytes per storage."""
        return len(self.pickled) + sum(pack.nbytes for pack in self.packs)

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

    def write(self, file: BinaryIO) -> Written:
        """Write the archive to ``file`` (seekable, at its start)."""
        if self._failure is not None:
            raise self._failure
        archive = _Archive(file)
        archive.add("data.pkl", len(self.pickled), [self.pickled])
        archive.add("byteorder", len(sys.byteorder), [sys.byteorder.encode()])
        for key, pack in enumerate(self.packs):
            archive.add(f"data/{key}", pack.nbytes, _pieces(pack), aligned=True)
        archive.add("version", 2, [b"3\n"])
        return archive.finish()


def _rounded(nbytes: int) -> int:
    return round_up(nbytes, _ALIGN)


def save(obj: Any, file: BinaryIO) -> Written:
    """Write ``obj`` to ``file`` so that ``torch.load`` returns its equal."""
    return TorchFile(obj).write(file)


def _pieces(pack: Pack) -> Iterator[memoryview]:
    """The bytes of ``pack``, a few MiB at a time, without a copy where a part lies in host memory in one piece."""
    step = max(1, _PIECE_NBYTES // pack.dtype.itemsize)
    for part in pack.parts:
        flat = part.resolve_conj().resolve_neg().reshape(-1)  # 1D, elements; copies only what is not contiguous
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step].to(device="cpu", dtype=pack.dtype)
            yield memoryview(piece.contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Entry:
    name: bytes
    nbytes: int
    crc32: int
    offset: int


class _Archive:
    """A zip archive of stored records, written in order. Source: PKWARE APPNOTE 6.3, sections 4.3-4.5."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._offset = 0
        self._crc = 0  # of all bytes so far
        self._entries: list[_Entry] = []

    def add(self, name: str, nbytes: int, pieces: Iterable[bytes | memoryview], *, aligned: bool = False) -> None:
        path = f"{_ROOT}/{name}".encode()
        offset = self._offset
        blank = self._local_header(path, nbytes, 0, offset, aligned)
        self._file.write(blank)
        crc = found = 0
        for piece in pieces:
            crc = crc32(piece, crc)
            self._file.write(piece)
            found += len(piece)
        assert found == nbytes, f"record {name}: {found} bytes came, {nbytes} were announced"
        # The checksum stands before the data but is known only after it: go back and fill it in.
        header = self._local_header(path, nbytes, crc, offset, aligned)
        self._file.seek(offset)
        self._file.write(header)
        self._file.seek(offset + len(header) + nbytes)
        self._offset = offset + len(header) + nbytes
        self._crc = join_crc32(zlib.crc32(header, self._crc), crc, nbytes)
        self._entries.append(_Entry(path, nbytes, crc, offset))

    @staticmethod
    def _local_header(path: bytes, nbytes: int, crc: int, offset: int, aligned: bool) -> bytes:
        big = nbytes >= _ZIP64_LIMIT
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if big else b""
        if aligned:
            used = offset + 30 + len(path) + len(extra) + 4
            padding = -used % _ALIGN
            extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
        size = 0xFFFFFFFF if big else nbytes
        return (
            struct.pack(
                "<IHHHHHIIIHH",
                0x04034B50,
                45 if big else 20,
                0x0800,
                0,
                0,
                0x21,
                crc,
                size,
                size,
                len(path),
                len(extra),
            )
            + path
            + extra
        )

    def finish(self) -> Written:
        """Write the central directory."""
        start = self._offset
        directory = b"".join(map(_central_header, self._entries))
        count = len(self._entries)
        tail = b""
        if start >= _ZIP64_LIMIT or len(directory) >= _ZIP64_LIMIT or count >= _ZIP64_COUNT:
            where = start + len(directory)
            tail += struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(directory), start)
            tail += struct.pack("<IIQI", 0x07064B50, 0, where, 1)
        short = min(count, _ZIP64_COUNT)
        tail += struct.pack(
            "<IHHHHIIH", 0x06054B50, 0, 0, short, short, min(len(directory), 0xFFFFFFFF),
            0xFFFFFFFF if start >= _ZIP64_LIMIT else start, 0,
        )  # fmt: skip
        self._file.write(directory)
        self._file.write(tail)
        crc = zlib.crc32(tail, zlib.crc32(directory, self._crc))
        return Written(start + len(directory) + len(tail), crc)


def _central_header(entry: _Entry) -> bytes:
    fields = b""
    big = entry.nbytes >= _ZIP64_LIMIT
    far = entry.offset >= _ZIP64_LIMIT
    if big:
        fields += struct.pack("<QQ", entry.nbytes, entry.nbytes)
    if far:
        fields += struct.pack("<Q", entry.offset)
    extra = struct.pack("<HH", 1, len(fields)) + fields if fields else b""
    size = 0xFFFFFFFF if big else entry.nbytes
    offset = 0xFFFFFFFF if far else entry.offset
    version = 45 if fields else 20
    return (
        struct.pack(
            "<IHHHHHHIIIHHHHHII", 0x02014B50, version, version, 0x0800, 0, 0, 0x21, entry.crc32, size, size,
            len(entry.name), len(extra), 0, 0, 0, 0, offset,
        )
        + entry.name
        + extra
    )  # fmt: skip


# ---- checksums -----------------------------------------------------------------------------------------------------

_POLYNOMIAL = 0xEDB88320


def _multiply(a: int, b: int) -> int:
    """``a * b`` modulo the CRC-32 polynomial, bits reflected (the highest bit is the constant term)."""
    product = 0
    bit = 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product


def _powers() -> list[int]:
    """``x ** (2 ** k)`` for k = 0 .. 63."""
    table = [1 << 30]
    for _ in range(63):
        table.append(_multiply(table[-1], table[-1]))
    return table


_SQUARES = _powers()


def join_crc32(first: int, second: int, second_nbytes: int) -> int:
    """CRC-32 of two runs of bytes laid end to end, from the CRC-32 of each.

    Appending ``n`` bytes multiplies the first remainder by ``x ** (8 * n)``. Source: zlib's ``crc32_combine``.
    """
    factor, exponent, k = 1 << 31, second_nbytes * 8, 0
    while exponent:
        if exponent & 1:
            factor = _multiply(_SQUARES[k], factor)
        exponent >>= 1
        k += 1
    return _multiply(factor, first) ^ second
