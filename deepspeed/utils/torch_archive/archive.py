"""The archive of a torch file: a zip of stored records, written in order and found again by name.

Records: ``data.pkl``, ``byteorder``, ``version`` and one ``data/<key>`` per storage, aligned for memory mapping, all
below one folder name. Source: PKWARE APPNOTE 6.3, sections 4.3-4.5; PyTorch documentation, "Serialization semantics".

Owns: the bytes of the archive. Does not own: what records hold (``packs.py``, ``load.py``).
Invariant: the CRC-32 and size returned by writing are those of the whole file, from one pass over the data.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import BinaryIO

from deepspeed.utils.crc32 import crc32, join_crc32

__all__ = ["ALIGN", "Piece", "Record", "Seen", "Writer", "Written", "records"]

ALIGN = 64
_ROOT = "archive"
_SMALL_NBYTES = 1 << 16  # records up to here are put together before they are written
_ZIP64_LIMIT = 0xFFFFFFFF  # sizes and offsets from here on take the 64-bit fields
_ZIP64_COUNT = 0xFFFF
_LOCAL, _CENTRAL, _END = 0x04034B50, 0x02014B50, 0x06054B50
_END64, _LOCATOR = 0x06064B50, 0x07064B50
_END_NBYTES = 22
_LONGEST_COMMENT = 0xFFFF


@dataclass(frozen=True)
class Written:
    """A finished file: its size and the CRC-32 of all its bytes."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Record:
    """A record: its name, where its header is, where its data is, the checksum of the data."""

    name: str
    offset: int
    start: int
    nbytes: int
    crc32: int


# Bytes, and where they lie: the number of their first byte for a piece of a mapped file (``PlainTensor.data_ptr``).
Piece = tuple["bytes | memoryview", "int | None"]
# What hears of every piece that is written: the bytes, where they lie, their CRC-32.
Seen = Callable[["bytes | memoryview", "int | None", int], None]


# ---- writing -------------------------------------------------------------------------------------------------------


class Writer:
    """Writes an archive to ``file`` (seekable, at its start), record after record."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._offset = 0
        self._crc = 0  # of all bytes so far
        self._records: list[Record] = []

    def add(
        self, name: str, nbytes: int, pieces: Iterable[Piece], *, aligned: bool = False, seen: Seen | None = None
    ) -> None:
        """Append a record of ``nbytes``. ``seen`` hears of every piece and its CRC-32."""
        path = f"{_ROOT}/{name}"
        offset = self._offset
        if nbytes <= _SMALL_NBYTES:
            parts = []
            for data, address in pieces:
                parts.append(data)
                if seen is not None:
                    seen(data, address, zlib.crc32(data))
            joined = b"".join(parts)
            assert len(joined) == nbytes, f"record {name}: {len(joined)} bytes came, {nbytes} were announced"
            crc = zlib.crc32(joined)
            whole = _local_header(path.encode(), nbytes, crc, offset, aligned) + joined
            self._file.write(whole)
            self._offset += len(whole)
            self._crc = zlib.crc32(whole, self._crc)
            self._records.append(Record(path, offset, self._offset - nbytes, nbytes, crc))
            return
        blank = _local_header(path.encode(), nbytes, 0, offset, aligned)
        self._file.write(blank)
        crc = found = 0
        for data, address in pieces:
            if seen is None:
                crc = crc32(data, crc)
            else:
                own = crc32(data)
                seen(data, address, own)
                crc = join_crc32(crc, own, len(data))
            self._file.write(data)
            found += len(data)
        assert found == nbytes, f"record {name}: {found} bytes came, {nbytes} were announced"
        # The checksum stands before the data but is known only after it: go back and fill it in.
        header = _local_header(path.encode(), nbytes, crc, offset, aligned)
        self._file.seek(offset)
        self._file.write(header)
        start = offset + len(header)
        self._file.seek(start + nbytes)
        self._offset = start + nbytes
        self._crc = join_crc32(zlib.crc32(header, self._crc), crc, nbytes)
        self._records.append(Record(path, offset, start, nbytes, crc))

    def finish(self) -> Written:
        """Write the central directory."""
        start = self._offset
        directory = b"".join(map(_central_header, self._records))
        count = len(self._records)
        tail = b""
        if start >= _ZIP64_LIMIT or len(directory) >= _ZIP64_LIMIT or count >= _ZIP64_COUNT:
            where = start + len(directory)
            tail += struct.pack("<IQHHIIQQQQ", _END64, 44, 45, 45, 0, 0, count, count, len(directory), start)
            tail += struct.pack("<IIQI", _LOCATOR, 0, where, 1)
        short = min(count, _ZIP64_COUNT)
        tail += struct.pack(
            "<IHHHHIIH", _END, 0, 0, short, short, min(len(directory), 0xFFFFFFFF),
            0xFFFFFFFF if start >= _ZIP64_LIMIT else start, 0,
        )  # fmt: skip
        self._file.write(directory)
        self._file.write(tail)
        crc = zlib.crc32(tail, zlib.crc32(directory, self._crc))
        return Written(start + len(directory) + len(tail), crc)


def _local_header(path: bytes, nbytes: int, crc: int, offset: int, aligned: bool) -> bytes:
    big = nbytes >= _ZIP64_LIMIT
    extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if big else b""
    if aligned:
        used = offset + 30 + len(path) + len(extra) + 4
        padding = -used % ALIGN
        extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    size = 0xFFFFFFFF if big else nbytes
    fields = (_LOCAL, 45 if big else 20, 0x0800, 0, 0, 0x21, crc, size, size, len(path), len(extra))
    return struct.pack("<IHHHHHIIIHH", *fields) + path + extra


def _central_header(record: Record) -> bytes:
    fields, path = b"", record.name.encode()
    big = record.nbytes >= _ZIP64_LIMIT
    far = record.offset >= _ZIP64_LIMIT
    if big:
        fields += struct.pack("<QQ", record.nbytes, record.nbytes)
    if far:
        fields += struct.pack("<Q", record.offset)
    extra = struct.pack("<HH", 1, len(fields)) + fields if fields else b""
    size = 0xFFFFFFFF if big else record.nbytes
    offset = 0xFFFFFFFF if far else record.offset
    version = 45 if fields else 20
    return (
        struct.pack(
            "<IHHHHHHIIIHHHHHII", _CENTRAL, version, version, 0x0800, 0, 0, 0x21, record.crc32, size, size,
            len(path), len(extra), 0, 0, 0, 0, offset,
        )
        + path
        + extra
    )  # fmt: skip


# ---- reading -------------------------------------------------------------------------------------------------------


def records(data: memoryview) -> dict[str, Record]:
    """The records of an archive by name, without the name of the folder they are all in.

    Raises ValueError for anything but a whole archive of stored records that lie inside it.
    """
    count, nbytes, start = _directory(data)
    if start + nbytes > len(data):
        raise ValueError(f"the directory of the archive ends at {start + nbytes}, the file at {len(data)}")
    found: dict[str, Record] = {}
    at = start
    for _ in range(count):
        record, at = _record(data, at, start)
        name = record.name.partition("/")[2]
        if name in found:
            raise ValueError(f"two of its records are named {record.name}")
        found[name] = record
    return found


def _directory(data: memoryview) -> tuple[int, int, int]:
    """``(records, bytes, offset)`` of the central directory."""
    first = max(0, len(data) - _END_NBYTES - _LONGEST_COMMENT)
    at = bytes(data[first:]).rfind(struct.pack("<I", _END))
    if at < 0 or first + at + _END_NBYTES > len(data):
        raise ValueError("it has no end of a zip archive")
    at += first
    count, nbytes, start = struct.unpack_from("<HII", data, at + 10)
    if at >= 20 and struct.unpack_from("<I", data, at - 20)[0] == _LOCATOR:
        (where,) = struct.unpack_from("<Q", data, at - 12)
        if where + 56 > len(data) or struct.unpack_from("<I", data, where)[0] != _END64:
            raise ValueError("its 64-bit end of a zip archive is damaged")
        count, nbytes, start = struct.unpack_from("<QQQ", data, where + 32)
    return count, nbytes, start


def _record(data: memoryview, at: int, limit: int) -> tuple[Record, int]:
    """The record whose entry in the directory is at ``at``, and where the next entry is."""
    try:
        signature, _, _, flags, method, _, _, crc, packed, nbytes, *lengths, _, _, _, offset = struct.unpack_from(
            "<IHHHHHHIIIHHHHHII", data, at
        )
        name_nbytes, extra_nbytes, comment_nbytes = lengths
        name = bytes(data[at + 46 : at + 46 + name_nbytes]).decode()
        extra = bytes(data[at + 46 + name_nbytes : at + 46 + name_nbytes + extra_nbytes])
        wide = _wide_fields(extra)
        if nbytes == 0xFFFFFFFF:
            nbytes = wide.pop(0)
        if packed == 0xFFFFFFFF:
            packed = wide.pop(0)
        if offset == 0xFFFFFFFF:
            offset = wide.pop(0)
        local, *_, local_name, local_extra = struct.unpack_from("<IHHHHHIIIHH", data, offset)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"its directory is damaged at {at}: {error}") from error
    start = offset + 30 + local_name + local_extra
    if signature != _CENTRAL or local != _LOCAL or start + nbytes > limit:
        raise ValueError(f"its directory is damaged at {at}")
    if method or packed != nbytes or flags & 1:
        raise ValueError(f"its record {name} is compressed or encrypted")
    return Record(name, offset, start, nbytes, crc), at + 46 + name_nbytes + extra_nbytes + comment_nbytes


def _wide_fields(extra: bytes) -> list[int]:
    """The 64-bit fields of an entry, in order."""
    while len(extra) >= 4:
        kind, nbytes = struct.unpack_from("<HH", extra)
        if kind == 1:
            return list(struct.unpack_from(f"<{nbytes // 8}Q", extra, 4))
        extra = extra[4 + nbytes :]
    return []
