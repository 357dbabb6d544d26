"""Storages made of parts, and a torch file whose content is known but not yet read.

Owns: parts, and the order of records in a file. Does not own: how an object is pickled (``utils/torch_file.py`` for
torch's tensors, ``save.py`` for plain ones), the archive (``archive.py``).
Invariant: parts are read while the file is written, a few MiB at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from deepspeed.utils.torch_archive.archive import Piece, Seen, Writer, Written
from deepspeed.utils.torch_archive.cast import cast
from deepspeed.utils.torch_archive.tensors import DType, PlainTensor

__all__ = ["ArchiveFile", "Pack", "PackNumbers", "Slice", "StorageReference"]

_PIECE_NBYTES = 8 << 20  # bytes handled at a time: checksum and write share the cache, device copies stay small


class Pack:
    """A storage made of parts: tensors of one dtype laid end to end. Parts are read when the file is written.

    Tensors and ``dtype`` are torch's, or plain (``tensors.py``). Parts of another dtype are cast, piece by piece.
    """

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.parts: list[Any] = []
        self.numel = 0

    def add(self, tensor: Any, shape: Iterable[int] | None = None) -> Slice:
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


class StorageReference:
    """What a pickled tensor refers to: a pack of one or more parts."""

    __slots__ = ("pack",)

    def __init__(self, pack: Pack) -> None:
        self.pack = pack


class PackNumbers:
    """The packs a pickle refers to, in the order in which it first does."""

    def __init__(self) -> None:
        self.packs: list[Pack] = []
        self._keys: dict[int, str] = {}  # by id(pack)

    def key_of(self, pack: Pack) -> str:
        """The name of its record."""
        key = self._keys.get(id(pack))
        if key is None:
            key = self._keys[id(pack)] = str(len(self.packs))
            self.packs.append(pack)
        return key


class ArchiveFile:
    """A file ready to be written: ``pickled`` refers to ``packs`` by number; ``obj`` keeps their tensors alive."""

    def __init__(self, obj: Any, pickled: bytes, packs: list[Pack]) -> None:
        self._obj, self.pickled, self.packs = obj, pickled, packs

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors and the pickle; the archive adds a few hundred bytes per storage."""
        return len(self.pickled) + sum(pack.nbytes for pack in self.packs)

    def write(self, file: BinaryIO, seen: Seen | None = None) -> Written:
        """Write the archive to ``file`` (seekable, at its start). ``seen`` hears of every piece of a storage."""
        archive = Writer(file)
        archive.add("data.pkl", len(self.pickled), [(self.pickled, None)])
        archive.add("byteorder", len(sys.byteorder), [(sys.byteorder.encode(), None)])
        for key, pack in enumerate(self.packs):
            archive.add(f"data/{key}", pack.nbytes, _pieces(pack), aligned=True, seen=seen)
        archive.add("version", 2, [(b"3\n", None)])
        return archive.finish()


def _pieces(pack: Pack) -> Iterator[Piece]:
    """The bytes of ``pack``, a few MiB at a time, without a copy where a part lies in host memory in one piece."""
    for part in pack.parts:
        yield from _plain_pieces(part, pack.dtype) if isinstance(part, PlainTensor) else _torch_pieces(part, pack.dtype)


def _plain_pieces(part: PlainTensor, dtype: DType) -> Iterator[Piece]:
    if part.dtype is not dtype:
        flat, step = part.reshape(-1), _PIECE_NBYTES // part.dtype.itemsize
        yield from ((cast(flat[start : start + step], dtype), None) for start in range(0, part.numel(), step))
        return
    data, address = part.bytes(), part.data_ptr() if part.is_contiguous() else None
    for start in range(0, len(data), _PIECE_NBYTES):
        yield data[start : start + _PIECE_NBYTES], None if address is None else address + start


def _torch_pieces(part: Any, dtype: Any) -> Iterator[Piece]:
    import torch

    step = max(1, _PIECE_NBYTES // dtype.itemsize)
    flat = part.resolve_conj().resolve_neg().reshape(-1)  # 1D, elements; copies only what is not contiguous
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step].to(device="cpu", dtype=dtype).contiguous()
        if piece.numel() == 1:
            piece = piece.as_strided((1,), (1,))  # one element may keep any stride, which a view in bytes refuses
        yield memoryview(piece.view(torch.uint8).numpy()), None
