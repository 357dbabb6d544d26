"""What a saved tag holds, item by item, whatever layout it has: weights, buffers, masters and optimizer state by name.

Nothing is read until an item's elements are asked for, so going through a checkpoint takes memory for one tensor.

Owns: the walk. Does not own: finding elements (``index.py``), opening files (``reader.py``).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import index as indexing
from deepspeed.checkpoint import names, reader
from deepspeed.checkpoint.constants import FLAT, SCALAR
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.reference.reader import open_saved
from deepspeed.checkpoint.sharded_weight import ShardedWeight
from deepspeed.utils.torch_archive import bridge
from deepspeed.utils.torch_archive.tensors import DType, PlainTensor

PARAMETER, FROZEN, BUFFER, TIED = "parameter", "frozen", "buffer", "tied"


def add_tag_arguments(parser: argparse.ArgumentParser) -> None:
    """What all commands take: DIR, ``--tag`` and ``--json``."""
    parser.add_argument("dir", type=Path, help="checkpoint folder or tag folder")
    parser.add_argument("--tag", help="tag in DIR (default: the one `latest` names)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


@dataclass(frozen=True, eq=False)
class Item:
    """One saved value. ``what``: ``weight``, ``fp32`` (master) or the key of an optimizer state.

    ``extents`` say where its elements lie; a value that is not a tensor has no shape.
    """

    name: str
    what: str
    role: str
    shape: tuple[int, ...] | None
    dtype: DType | None
    extents: tuple[indexing.Extent, ...]

    def stored(self) -> Any:
        """The value in the dtype it was saved in, put together in host memory where it lies in several pieces."""
        first = self.extents[0]
        if first.kind != FLAT:
            return first.whole()
        assert self.shape is not None
        if len(self.extents) == 1:
            return first.elements().reshape(self.shape)
        parts = [extent.elements().bytes() for extent in self.extents]
        return PlainTensor(memoryview(b"".join(parts)), first.value.dtype, self.shape)

    def value(self) -> Any:
        """The value itself, a tensor as one of torch: a weight may have been saved as the master it is cast from."""
        found = self.stored()
        if not isinstance(found, PlainTensor):
            return found
        made = bridge.tensor_to_torch(found)
        return made if self.dtype is None else made.to(bridge.dtype_to_torch(self.dtype))


def tag_folder(path: Path, tag: str | None = None) -> Path:
    """The tag folder ``path`` means: itself, or its ``tag`` (default: the one ``latest`` names). Opens nothing.

    Raises CheckpointError that lists what is there when it means none.
    """
    if tag is None and _is_tag_folder(path):
        return path.resolve()
    tag = reader.read_latest(path) if tag is None else names.check_tag(tag)
    if tag is None:
        raise CheckpointError(
            f"{reader.describe(path)}: neither a tag folder nor a checkpoint folder with a {names.LATEST} file; "
            "give a tag folder, or --tag"
        )
    return path / tag


def open_tag(path: Path, tag: str | None = None, *, plain: bool = True) -> reader.SavedTag:
    """The tag ``path`` means, see :func:`tag_folder`; ``plain``: without torch, and its tensors are plain ones.

    Raises CheckpointError when it cannot be opened.
    """
    folder = tag_folder(path, tag)
    if (folder / names.UNIVERSAL_COMMON).exists():
        raise CheckpointError(
            f"{folder} is a universal folder, whose tensors are the files {names.UNIVERSAL_STATES}/PARAMETER/*.pt; "
            "verify checks it, and the other commands are for tags: give the tag it was made from"
        )
    return open_saved(folder.parent, folder.name, plain=plain)


def _is_tag_folder(path: Path) -> bool:
    return (path / names.MANIFEST).is_file() or any(path.glob(f"*{keys.MODEL_FILE_SUFFIX}"))


def items(saved: reader.SavedTag) -> Iterator[Item]:
    """Everything saved by name, in the order of the module's state, each parameter followed by its optimizer state.

    Raises CheckpointError for elements that are nowhere.
    """
    listed = set()
    first: dict[Any, str] = {}
    buffers = set(saved.model.get(keys.BUFFER_NAMES) or ())
    for name, value in saved.module_state().items():
        held = name in saved.parameters
        if isinstance(value, (PlainTensor, ShardedWeight)):
            tied = first.setdefault(_identity(value), name) != name
            role = TIED if tied and not held else BUFFER if name in buffers else PARAMETER if held else FROZEN
            yield weight_item(saved, name, value, role)
        if held:
            listed.add(name)
            yield from optimizer_items(saved, name)
    for name in saved.parameters:
        if name not in listed:  # not in the module's state: kept by the optimizer alone
            yield from optimizer_items(saved, name)


def _identity(value: PlainTensor | ShardedWeight) -> Any:
    """Equal for tied names alone: they are one tensor in the file."""
    if isinstance(value, ShardedWeight) or not value.numel():
        return id(value)
    return value.data_ptr(), tuple(value.shape), value.dtype


def weight_item(saved: reader.SavedTag, name: str, value: PlainTensor | ShardedWeight, role: str) -> Item:
    """The weight or buffer ``name`` of the module's state."""
    shape = tuple(value.shape)
    if isinstance(value, ShardedWeight):
        extents = tuple(value.cover(0, math.prod(shape)))
    else:
        plain = indexing.Extent(saved.model_file, f"{keys.MODULE}.{name}", 0, 0, value.numel(), FLAT, value)
        extents = (plain,)
    return Item(name, indexing.WEIGHT, role, shape, value.dtype, extents)


def optimizer_items(saved: reader.SavedTag, name: str) -> Iterator[Item]:
    """Master and optimizer state of the parameter ``name``."""
    held = saved.parameters[name]
    numel = math.prod(held.shape)
    for what in sorted(saved.index.kinds(name, 0, numel), key=lambda what: (what != indexing.MASTER, what)):
        extents = tuple(saved.index.cover(name, what, 0, numel))
        if not extents:
            continue
        first = extents[0]
        tensor = isinstance(first.value, PlainTensor)
        shape = held.shape if first.kind == FLAT else () if first.kind == SCALAR else None
        if shape is None and tensor:
            shape = tuple(first.value.shape)
        yield Item(name, what, PARAMETER, shape, first.value.dtype if tensor else None, extents)
