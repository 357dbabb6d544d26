"""The manifest of a tag folder: every file with its size and checksum. Written last; a tag of ours without one is torn.

Owns: writing, reading and verifying ``manifest.json``, and finding the complete tags of a folder.
Does not own: atomicity (``disk/durable.py``), which files there are (``writer.py``).
Invariant: a file listed here was complete and on disk, with these bytes, when the manifest was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from deepspeed.checkpoint import names
from deepspeed.checkpoint.disk import durable
from deepspeed.utils.crc32 import crc32
from deepspeed.utils.torch_archive.archive import Written

_VERSION = 1
_CHUNK_NBYTES = 2 << 20  # stays in the cache between reading and summing
_AHEAD_NBYTES = 32 << 20  # that the system is told to fetch before they are asked for


@dataclass(frozen=True)
class Manifest:
    """What a complete tag holds. ``number`` grows with every save into a folder, whatever clocks say; ``save`` is the
    same in all parts of one save, where nodes keep theirs on disks of their own."""

    files: dict[str, Written]
    number: int
    global_steps: int
    world_size: int
    ds_version: str
    save: str = ""

    @property
    def nbytes(self) -> int:
        return sum(written.nbytes for written in self.files.values())

    def write(self, folder: Path) -> None:
        """Write ``manifest.json``, atomically, into ``folder``."""
        record = {"version": _VERSION, **asdict(self)}
        durable.write_text(folder / names.MANIFEST, json.dumps(record, indent=1, sort_keys=True) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of ``folder``; None when there is none. Raises ValueError naming the file when it is damaged."""
    path = folder / names.MANIFEST
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    try:
        if record["version"] != _VERSION:
            raise ValueError(f"{path} has version {record['version']!r}; this release reads version {_VERSION}")
        files = {name: Written(int(entry["nbytes"]), int(entry["crc32"])) for name, entry in record["files"].items()}
        facts = {key: record[key] for key in ("number", "global_steps", "world_size", "ds_version")}
        return Manifest(files, **facts, save=record.get("save", ""))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error


def wrong_sizes(folder: Path, manifest: Manifest, chosen: Iterable[str] | None = None) -> list[str]:
    """One line per file that is missing or has another size than the manifest says; reads no data."""
    problems = []
    for name in sorted(manifest.files if chosen is None else chosen):
        expected = manifest.files[name].nbytes
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            problems.append(f"{name} is missing")
            continue
        if found != expected:
            problems.append(f"{name} has {found} bytes, {expected} were saved")
    return problems


def wrong_checksums(
    folder: Path, manifest: Manifest, chosen: Iterable[str], sum_of: Callable[[Path], int] | None = None
) -> list[str]:
    """One line per file of ``chosen`` whose bytes are not those that were saved; reads them all.

    ``sum_of``: who knows the CRC-32 of a file (default: :func:`file_crc32`).
    """
    problems = []
    for name in sorted(chosen):
        found = (sum_of or file_crc32)(folder / name)
        saved = manifest.files[name].crc32
        if found != saved:
            problems.append(f"{name} is damaged: its bytes have CRC-32 {found:08x}, those saved had {saved:08x}")
    return problems


def file_crc32(path: Path) -> int:
    """CRC-32 of all bytes of a file."""
    crc = 0
    buffer = bytearray(_CHUNK_NBYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        position = 0
        while True:
            if position % _AHEAD_NBYTES == 0 and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), position, 2 * _AHEAD_NBYTES, os.POSIX_FADV_WILLNEED)
            count = file.readinto(buffer)
            if not count:
                break
            crc = crc32(view[:count], crc)
            position += count
    return crc


def is_complete(folder: Path) -> bool:
    """True for a tag folder whose manifest is whole and whose files are all there in full size."""
    try:
        manifest = read_manifest(folder)
    except (ValueError, OSError):
        return False
    return manifest is not None and not wrong_sizes(folder, manifest)


def complete_tags(save_dir: Path) -> list[tuple[int, str]]:
    """``(number, tag)`` of the complete tags directly in ``save_dir``, oldest first.

    Foreign folders are not listed, nor are universal ones: those were made on request, and no save may delete them.
    """
    found = []
    for entry in save_dir.iterdir():
        if (entry / names.UNIVERSAL_COMMON).exists():
            continue
        if entry.name.startswith(".") or not entry.is_dir() or not is_complete(entry):
            continue
        manifest = read_manifest(entry)
        assert manifest is not None
        found.append((manifest.number, entry.name))
    return sorted(found)
