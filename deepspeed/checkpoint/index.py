"""Where every saved element is: parameter name -> extents, each a run of elements of a tensor in a file.

An *extent* says: elements ``start .. start + numel`` of the parameter are elements ``offset ..`` of tensor ``key`` in
``file``. Asking for a run of elements of one kind (the fp32 master, one optimizer state) gives the extents that cover
it exactly, whatever ranks, stages and buckets they were saved with; a hole is an error that names it.

Tensors are torch's, or plain ones (``utils/torch_archive``) where nothing but looking up and copying is asked for.

Owns: the lookup and the arithmetic of covering. Does not own: opening files (``reader.py``), what the keys mean.
Invariant: :meth:`FragmentIndex.cover` returns extents clipped to the request, in order, without hole or overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint.constants import FLAT, FP32_WEIGHT_KEY, PLAIN, SCALAR, TENSOR
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.runtime.zero.layout import ShardLayout
from deepspeed.utils.torch_archive.tensors import is_tensor

if TYPE_CHECKING:
    import torch

MASTER = FP32_WEIGHT_KEY
WEIGHT = "weight"  # of a parameter without an optimizer


@dataclass(frozen=True)
class Extent:
    """See the module docstring. ``value``: the whole tensor ``key`` (mapped), or the plain value."""

    file: str
    key: str
    offset: int
    start: int
    numel: int
    kind: str
    value: Any

    @property
    def end(self) -> int:
        return self.start + self.numel

    def elements(self) -> Any:
        """The elements of a flat extent, a tensor of the kind that ``value`` is.  # 1D, numel"""
        return self.value.reshape(-1).narrow(0, self.offset, self.numel)

    def whole(self) -> Any:
        """The value of an extent of another kind: a 0-dim tensor, a tensor, or plain data."""
        return self.value.reshape(-1)[self.offset] if self.kind == SCALAR else self.value

    def clip(self, start: int, end: int) -> Extent:
        """The part of a flat extent that lies in ``start .. end`` of the parameter."""
        low, high = max(self.start, start), min(self.end, end)
        if (low, high) == (self.start, self.end):
            return self
        return Extent(self.file, self.key, self.offset + low - self.start, low, high - low, self.kind, self.value)


@dataclass(frozen=True)
class Owner:
    """Elements ``start .. end`` of a parameter were saved by shard ``rank``."""

    start: int
    end: int
    rank: int


@dataclass
class FragmentIndex:
    """Extents by parameter and kind. ``open_rank`` adds those of one shard's file when they are first needed."""

    owners: dict[str, list[Owner]] = field(default_factory=dict)
    open_rank: Callable[[int], None] = lambda rank: None
    extents: dict[str, dict[str, list[Extent]]] = field(default_factory=dict)
    _opened: set[int] = field(default_factory=set)

    def add(self, name: str, what: str, extent: Extent) -> None:
        """``what``: ``"fp32"`` for masters, else the key of an optimizer state."""
        self.extents.setdefault(name, {}).setdefault(what, []).append(extent)

    def knows(self, name: str) -> bool:
        """True when the optimizer that was saved held this parameter."""
        return name in self.owners or name in self.extents

    def kinds(self, name: str, start: int, numel: int) -> list[str]:
        """What was saved of these elements: masters and optimizer state keys."""
        self._open(name, start, numel)
        return list(self.extents.get(name, {}))

    def cover(self, name: str, what: str, start: int, numel: int) -> list[Extent]:
        """The extents of exactly these elements: one for every kind but ``flat``.

        Raises CheckpointError naming the parameter, the kind and the elements that are nowhere.
        """
        self._open(name, start, numel)
        found = sorted(self.extents.get(name, {}).get(what, []), key=lambda extent: extent.start)
        if numel == 0:
            return found[:1]
        end = start + numel
        near = [extent for extent in found if extent.start < end and extent.end > start]
        if near and near[0].kind != FLAT:
            return [_covering(name, what, near, start, end)]
        chosen, reached = [], start
        for extent in near:
            if extent.start > reached:
                break
            if extent.end > reached:
                chosen.append(extent.clip(reached, end))
                reached = chosen[-1].end
        if reached < end:
            raise CheckpointError(
                f"{what} of parameter {name!r}: elements {reached} to {end} are not in the checkpoint "
                f"(found in {sorted({extent.file for extent in near}) or 'no file'})"
            )
        return chosen

    def _open(self, name: str, start: int, numel: int) -> None:
        for owner in self.owners.get(name, ()):
            touches = (owner.start < start + numel and owner.end > start) or numel == 0 or owner.start == owner.end
            if touches and owner.rank not in self._opened:
                self._opened.add(owner.rank)
                self.open_rank(owner.rank)


def _covering(name: str, what: str, near: list[Extent], start: int, end: int) -> Extent:
    """A value that is one per fragment (scalar) or belongs to the whole parameter (tensor, plain)."""
    first = near[0]
    # Every fragment of a parameter steps together, so the number of any of them will do.
    if first.kind in (SCALAR, PLAIN) or (first.start, first.end) == (start, end):
        return first
    raise CheckpointError(
        f"optimizer state {what!r} of parameter {name!r} has the shape {tuple(first.value.shape)}, belongs to the "
        f"whole parameter and cannot be cut to its elements {start} to {end}; load with load_optimizer_states=False"
    )


def copy_into(target: torch.Tensor, extents: Iterable[Extent], start: int) -> None:
    """Fill ``target`` (contiguous, elements from ``start`` of the parameter) from flat extents, casting as needed."""
    flat = target.view(-1)
    for extent in extents:
        if extent.numel:
            flat.narrow(0, extent.start - start, extent.numel).copy_(extent.elements())


# ---- filling it ----------------------------------------------------------------------------------------------------


def owners_of(groups: Iterable[dict[str, Any]]) -> dict[str, list[Owner]]:
    """Which shard saved which elements, from these groups of the layout record."""
    table: dict[str, list[Owner]] = {}
    for group in groups:
        layout = ShardLayout.from_record(group["layout"])
        for rank in range(layout.world):
            for fragment in layout.fragments(rank):
                owner = Owner(fragment.param_start, fragment.param_start + fragment.numel, rank)
                table.setdefault(fragment.name, []).append(owner)
    return table


def add_fragments(
    index: FragmentIndex,
    file: str,
    fragments: list[tuple[str, int, int]],
    state: dict[str, Any],
    table: dict[str, dict[str, Any]],
    master: torch.Tensor | None,
    where: str,
) -> None:
    """Add one shard group of one optimizer-states file.

    ``fragments``: (name, start, numel) in file order; ``state`` and ``table``: see ``runtime/zero/state_dict.py``;
    ``master``: the flat masters of these fragments or None; ``where``: the key path of the state, for messages.
    Raises CheckpointError when a tensor has not the length its fragments need.
    """
    if master is not None:
        offset = 0
        for name, start, numel in fragments:
            index.add(name, MASTER, Extent(file, f"{where}.master", offset, start, numel, FLAT, master))
            offset += numel
        _check_length(file, f"{where}.master", master, offset)
    for place, entry in table.items():
        holders = range(len(fragments)) if entry["holders"] is None else entry["holders"]
        value, kind, offset = state[place], entry["kind"], 0
        for position, holder in enumerate(holders):
            name, start, numel = fragments[holder]
            key = f"{where}.{place}"
            if kind == FLAT:
                index.add(name, entry["key"], Extent(file, key, offset, start, numel, kind, value))
                offset += numel
            elif kind == SCALAR:
                index.add(name, entry["key"], Extent(file, key, position, start, numel, kind, value))
                offset += 1
            else:
                index.add(name, entry["key"], Extent(file, key, 0, start, numel, kind, value[position]))
        if kind in (FLAT, SCALAR):
            _check_length(file, f"{where}.{place}", value, offset)


def add_weight(index: FragmentIndex, file: str, name: str, start: int, numel: int, value: torch.Tensor) -> None:
    """Add one rank's elements of a parameter without an optimizer. Raises CheckpointError for a wrong length."""
    key = f"frozen_param_fragments.{name}"
    _check_length(file, key, value, numel)
    index.add(name, WEIGHT, Extent(file, key, 0, start, numel, FLAT, value))


def _check_length(file: str, key: str, value: torch.Tensor, expected: int) -> None:
    if value.numel() != expected:
        raise CheckpointError(f"{file}: {key} has {value.numel()} elements, its layout record says {expected}")


def add_parameter_states(
    index: FragmentIndex, file: str, names: list[str], numels: list[int], state: dict[Any, dict[str, Any]]
) -> None:
    """Add a torch optimizer state dict over whole parameters: ``state[i]`` belongs to ``names[i]``."""
    for position, (name, numel) in enumerate(zip(names, numels, strict=True)):
        for key, value in state.get(position, {}).items():
            kind = kind_of(value, numel)
            index.add(name, key, Extent(file, f"optimizer.state.{position}.{key}", 0, 0, numel, kind, value))


def kind_of(value: Any, numel: int) -> str:
    """How optimizer state ``value`` of a whole parameter of ``numel`` elements belongs to them (a kind of extent)."""
    if not is_tensor(value):
        return PLAIN
    if value.dim() == 0:
        return SCALAR
    return FLAT if value.numel() == numel else TENSOR
