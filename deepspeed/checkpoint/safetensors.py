"""Models as safetensors files, split and indexed the way Hugging Face libraries read them, and back.

A file is 8 bytes of length, a JSON header (dtype, shape and place of each tensor) and the data. Its layout follows from
names and shapes alone, so tensors may be written in the order in which they become available, one at a time. Tied
tensors are stored once, under their first name. Source: the format's description in the safetensors repository.

Owns: the format. Does not own: where tensors come from (``export.py``).
Invariant: files have their names only when all of them are complete and on disk; the index comes last.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from deepspeed.checkpoint.disk import durable
from deepspeed.checkpoint.errors import CheckpointError

SUFFIX = ".safetensors"
DEFAULT_SHARD_NBYTES = 5 * 10**9
_PIECE_NUMEL = 1 << 21
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor to come."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * self.dtype.itemsize


# ---- writing -------------------------------------------------------------------------------------------------------


class Writer:
    """Writes ``entries`` as ``path``, or as numbered files beside it with an index when they exceed ``limit`` bytes."""

    def __init__(self, path: Path, entries: Iterable[Entry], limit: int = DEFAULT_SHARD_NBYTES) -> None:
        """Raises CheckpointError naming a tensor whose dtype the format does not know."""
        entries = list(entries)
        for entry in entries:
            if entry.dtype not in _CODES:
                raise CheckpointError(f"{entry.name} has dtype {entry.dtype}, which safetensors files cannot hold")
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        shards = _split(entries, limit)
        stem = path.name.removesuffix(SUFFIX)
        self._names = [
            path.name if len(shards) == 1 else f"{stem}-{number:05}-of-{len(shards):05}{SUFFIX}"
            for number in range(1, len(shards) + 1)
        ]
        self._aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
        self._files: list[BinaryIO] = []
        self._places: dict[str, tuple[int, int, Entry]] = {}
        self._total = 0
        for number, shard in enumerate(shards):
            self._files.append(durable.open_for_writing(self._aside / self._names[number]))
            self._begin(number, shard)

    def _begin(self, number: int, shard: Sequence[Entry]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in shard:
            end = offset + entry.nbytes
            header[entry.name] = {
                "dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [offset, end]
            }  # fmt: skip
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._files[number].write(len(text).to_bytes(8, "little") + text)
        for entry in shard:
            begin = header[entry.name]["data_offsets"][0]
            self._places[entry.name] = (number, 8 + len(text) + begin, entry)
        self._total += offset

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """The elements of ``name``, from any device; each name once. Raises ValueError for another shape or dtype."""
        number, place, entry = self._places.pop(name)
        if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
            found = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"{name} is {found}, announced as {entry.shape} {entry.dtype}")
        file = self._files[number]
        file.seek(place)
        flat = tensor.detach().reshape(-1)
        for start in range(0, flat.numel(), _PIECE_NUMEL):
            piece = flat[start : start + _PIECE_NUMEL].cpu().contiguous()
            if piece.numel() == 1:
                piece = piece.as_strided((1,), (1,))  # one element may keep any stride, which a view in bytes refuses
            file.write(memoryview(piece.view(torch.uint8).numpy()))  # type: ignore[arg-type]

    def finish(self) -> list[Path]:
        """Put the files in place; what another export with the same name left there is removed. Their paths."""
        if self._places:
            raise CheckpointError(f"{self.path}: {', '.join(sorted(self._places))} did not come")
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        where = {name: file for file in self._names for name in read_header(self._aside / file)[0]}
        index = self.path.with_name(f"{self.path.name}.index.json")
        for old in _files_of(self.path):
            if old.name not in self._names:
                old.unlink()
        for name in self._names:
            os.replace(self._aside / name, self.path.with_name(name))
        durable.sync_folder(self.path.parent)
        if len(self._names) > 1:
            record = {"metadata": {"total_size": self._total}, "weight_map": where}
            durable.write_text(index, json.dumps(record, indent=2, sort_keys=True) + "\n")
        self._aside.rmdir()
        return [self.path.with_name(name) for name in self._names]

    def abandon(self) -> None:
        """Remove what was written."""
        for file in self._files:
            file.close()
        shutil.rmtree(self._aside, ignore_errors=True)


def _split(entries: list[Entry], limit: int) -> list[list[Entry]]:
    """Entries in order, at most ``limit`` bytes a shard (or one entry); wide dtypes first, so that all are aligned."""
    shards: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        if shards[-1] and used + entry.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += entry.nbytes
    return [sorted(shard, key=lambda entry: -entry.dtype.itemsize) for shard in shards]


def _files_of(path: Path) -> list[Path]:
    """What an export to ``path`` may have left: the file, or its shards and index."""
    stem = path.name.removesuffix(SUFFIX)
    shards = sorted(path.parent.glob(f"{stem}-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]{SUFFIX}"))
    return [one for one in (path.with_name(f"{path.name}.index.json"), path, *shards) if one.exists()]


# ---- reading -------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """``(entries by name, where the data starts)``. Raises CheckpointError naming a file that is torn."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if 0 < length <= size - 8 else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error!r}") from error
    if size != 8 + length + end:
        raise CheckpointError(f"{path} has {size} bytes, its header says {8 + length + end}")
    return header, 8 + length


def read(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of a file, or of a folder with one file or an index, mapped: nothing is read before it is used.

    Raises CheckpointError naming what is missing, torn or outside the folder.
    """
    found: dict[str, torch.Tensor] = {}
    for file in _chosen(Path(path)):
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        header, start = read_header(file)
        with open(file, "rb") as opened:
            room = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        for name, entry in header.items():
            found[name] = _tensor(file, room, start, name, entry)
    return found


def _chosen(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    indexes = sorted(path.glob(f"*{SUFFIX}.index.json"))
    if len(indexes) == 1:
        listed = sorted(set(json.loads(indexes[0].read_text())["weight_map"].values()))
        outside = [name for name in listed if os.path.basename(name) != name or name in ("", ".", "..")]
        if outside:
            raise CheckpointError(f"{indexes[0]} names files outside its folder: {', '.join(outside)}; refused")
        return [path / name for name in listed]
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) != 1:
        raise CheckpointError(f"{path} holds {len(files)} {SUFFIX} files and {len(indexes)} indexes; name the file")
    return files


def _tensor(file: Path, room: mmap.mmap, start: int, name: str, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype = _DTYPES.get(entry["dtype"])
    begin, end = entry["data_offsets"]
    expected = Entry(name, tuple(entry["shape"]), dtype or torch.uint8)
    if dtype is None or end - begin != expected.nbytes or begin < 0:
        raise CheckpointError(f"{file}: the header's entry of {name} makes no sense: {dict(entry)}")
    if end == begin:
        return torch.empty(expected.shape, dtype=dtype)
    if (start + begin) % dtype.itemsize:
        return torch.frombuffer(bytearray(room[start + begin : start + end]), dtype=dtype).reshape(expected.shape)
    numel = expected.nbytes // dtype.itemsize
    return torch.frombuffer(room, dtype=dtype, count=numel, offset=start + begin).reshape(expected.shape)


def load(module: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> Any:
    """Load an export into ``module``; names tied there may be stored once. As ``module.load_state_dict`` otherwise."""
    state = read(path)
    first: dict[int, str] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if name in state:
            first.setdefault(id(tensor), name)
    for name, tensor in named:
        if name not in state and id(tensor) in first:
            state[name] = state[first[id(tensor)]]
    return module.load_state_dict(state, strict=strict)
