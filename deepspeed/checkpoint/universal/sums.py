"""Checksums of the files a conversion reads, made of those of the pieces it writes.

Every element is read once, to be written; its bytes are summed then. What no piece covers (headers, padding, elements
nobody asked for) is read at the end, and the sums are joined to that of the whole file.

Owns: that arithmetic. Does not own: what a file's checksum should be (``disk/manifest.py``).
Invariant: every byte of a file is in its sum, once.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from deepspeed.utils.crc32 import crc32, join_crc32
from deepspeed.utils.torch_archive.load import MappedFile, mapped

__all__ = ["SourceSums"]


class SourceSums:
    """See the module docstring. Pieces may come from several threads."""

    def __init__(self) -> None:
        self._pieces: dict[Path, list[tuple[int, int, int]]] = defaultdict(list)  # (offset, bytes, CRC-32)
        self._files: dict[Path, MappedFile] = {}

    def seen(self, data: bytes | memoryview, address: int | None, crc: int) -> None:
        """A piece that was written: its bytes, where they lie, their CRC-32."""
        source = data.obj if isinstance(data, memoryview) else None
        if isinstance(source, MappedFile) and address is not None:
            self._files[source.path] = source
            self._pieces[source.path].append((address - source.address, len(data), crc))

    def of_file(self, path: Path) -> int:
        """CRC-32 of the whole file: of the bytes that were written where they were, of the rest as it is now."""
        data = memoryview(self._files.get(path) or mapped(path))
        reached = crc = 0
        for start, nbytes, own in sorted(self._pieces.get(path, ())):
            if start < reached:
                continue  # written twice
            if start > reached:
                crc = crc32(data[reached:start], crc)
            crc, reached = join_crc32(crc, own, nbytes), start + nbytes
        return crc32(data[reached:], crc)
