"""How the slices of a parameter under tensor parallelism make the whole, and how the whole is cut again.

``universal_checkpoint_info`` lists patterns of parameter names by category (matched at the start of the name):

    replicated, averaged     the same on all ranks; or nearly so, then the mean is kept
    row parallel             joined along dim 1
    two halves               two fused tensors (gate and up), each cut along dim 0
    sub-parameters           several fused tensors of any sizes (query, key, value), each cut along one dim
    vocabulary               joined along dim 0; rows beyond the original vocabulary are cut off, and padded again
    anything else            joined along dim 0

The whole tensor is stored in an *entry*, a dict with the tensor and what is needed to cut it: see :func:`join`.

Owns: the categories and the arithmetic of joining and cutting, which needs torch. Does not own: files.
Invariant: ``cut(join(slices))`` gives the slices back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_SHARD_WIDTHS_SINCE = 0.4


@dataclass
class SubparamShape:
    """Parameters that are several tensors fused along ``partition_dim``, each of them cut by tensor parallelism.

    ``shape`` is that of the whole, seen so that the fused tensors follow each other along ``partition_dim``, where it
    lists their sizes: ``((8, 2, 2), 16)`` for query, key and value rows. -1 stands for what is left.
    """

    pickled_as: ClassVar[str] = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int


SubparamShape.__module__ = "deepspeed.checkpoint.universal_checkpoint"  # the class path in checkpoint files


def fused_sizes(sub: SubparamShape) -> list[int]:
    """Sizes of the fused tensors along ``partition_dim``."""
    at = sub.shape[sub.partition_dim]
    return list(at) if isinstance(at, (tuple, list)) else [at]


def fused_view(sub: SubparamShape, numel: int, extent: int) -> list[int]:
    """The shape to see ``numel`` elements in, ``extent`` of them along ``partition_dim``."""
    shape = [sum(size) if isinstance(size, (tuple, list)) else int(size) for size in sub.shape]
    shape[sub.partition_dim] = extent
    known = math.prod(size for size in shape if size != -1)
    return [numel // known if size == -1 else size for size in shape]


@dataclass
class Category:
    """What the patterns say of one parameter. ``cat_dim`` None: not cut at all."""

    cat_dim: int | None = 0
    averaged: bool = False
    halves: bool = False
    vocabulary: int | None = None
    sub_params: SubparamShape | None = None
    widths: list[list[int]] | None = None

    def rows(self, shape: Sequence[int]) -> tuple[int, ...]:
        """``shape`` of the whole without the padding of a vocabulary."""
        if self.vocabulary is None or not shape:
            return tuple(shape)
        return (min(self.vocabulary, shape[0]), *shape[1:])

    def entry(self, param: Any) -> dict[str, Any]:
        """``param`` with the keys a reader needs to cut it."""
        made: dict[str, Any] = {}
        if self.cat_dim is not None and self.sub_params is None:
            made[keys.CAT_DIM] = self.cat_dim
        if self.halves:
            made[keys.PARAM_N_SUB_PARAMS] = 2
        if self.sub_params is not None:
            made[keys.SUB_PARAM_SHAPE] = self.sub_params
        if self.vocabulary is not None:
            made[keys.VOCAB_TENSOR] = True
        return {**made, keys.PARAM: param}


WHOLE = Category(None)  # buffers, frozen parameters: nothing says how they were cut


@dataclass
class Patterns:
    """The patterns of one ``universal_checkpoint_info``; :attr:`unused` are those that matched no parameter yet."""

    info: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    @property
    def version(self) -> float:
        return float(self.info.get(keys.UNIVERSAL_CHECKPOINT_VERSION_KEY, keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE))

    def of(self, name: str) -> Category:
        """The category of a parameter. Raises CheckpointError when two patterns of one category match it."""
        refused = self._match(name, keys.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS)
        if refused:
            raise CheckpointError(
                f"parameter {name!r} matches {refused!r} of {keys.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS}: how it was "
                "cut is not known, so it cannot be made whole"
            )
        if self._match(name, keys.TP_REPLICATED_PARAMETER_PATTERNS):
            return Category(None)
        if self._match(name, keys.PARAMETER_TO_AVERAGE_PATTERNS):
            return Category(None, averaged=True)
        sub = self._sub_params(name)
        if sub is not None:
            return sub
        if self._match(name, keys.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0):
            return Category(0, halves=True)
        if self._match(name, keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS):
            return Category(1)
        if self._match(name, keys.VOCABULARY_PARAMETER_PATTERNS):
            if keys.ORIGINAL_VOCAB_SIZE not in self.info:
                raise CheckpointError(
                    f"{keys.UNIVERSAL_CHECKPOINT_INFO} has {keys.VOCABULARY_PARAMETER_PATTERNS} but no "
                    f"{keys.ORIGINAL_VOCAB_SIZE}: how many rows of {name!r} are padding?"
                )
            return Category(0, vocabulary=int(self.info[keys.ORIGINAL_VOCAB_SIZE]))
        return Category()

    def kept_once(self, name: str) -> bool:
        """True for a parameter that several pipeline stages hold."""
        return self._match(name, keys.PIPELINE_REPLICATED_PARAMETER_PATTERNS) is not None

    def unused(self) -> list[str]:
        """Patterns that matched nothing so far."""
        listed: list[str] = []
        for key in _LISTS:
            listed += self.info.get(key) or ()
        for entry in self.info.get(keys.PARAMETER_WITH_SUB_PARAMS) or ():
            listed += as_sub_param(entry).patterns
        return [pattern for pattern in dict.fromkeys(listed) if pattern not in self.used]

    def _match(self, name: str, key: str) -> str | None:
        return self._only(name, key, self.info.get(key) or ())

    def _only(self, name: str, key: str, patterns: Sequence[str]) -> str | None:
        found = [pattern for pattern in dict.fromkeys(patterns) if re.match(pattern, name)]
        if len(found) > 1:
            raise CheckpointError(f"{key}: parameter {name!r} matches {found}; at most one of them may match")
        self.used.update(found)
        return found[0] if found else None

    def _sub_params(self, name: str) -> Category | None:
        listed = [as_sub_param(entry) for entry in self.info.get(keys.PARAMETER_WITH_SUB_PARAMS) or ()]
        by_pattern = {pattern: entry for entry in listed for pattern in entry.patterns}
        found = self._only(name, keys.PARAMETER_WITH_SUB_PARAMS, list(by_pattern))
        if found is None:
            return None
        entry, widths = by_pattern[found], None
        if self.version >= _SHARD_WIDTHS_SINCE:
            table = self.info.get(keys.SUB_PARAM_SHARD_WIDTHS) or {}
            if found not in table:
                raise CheckpointError(
                    f"{keys.UNIVERSAL_CHECKPOINT_INFO} of version {self.version} has no {keys.SUB_PARAM_SHARD_WIDTHS} "
                    f"for the pattern {found!r} of {name!r}: a list of widths per rank for each sub-parameter"
                )
            widths = [list(row) for row in table[found]]
        return Category(entry.partition_dim, sub_params=entry, widths=widths)


_LISTS = (
    keys.TP_REPLICATED_PARAMETER_PATTERNS, keys.PARAMETER_TO_AVERAGE_PATTERNS,
    keys.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0, keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    keys.VOCABULARY_PARAMETER_PATTERNS, keys.PIPELINE_REPLICATED_PARAMETER_PATTERNS,
)  # fmt: skip


def as_sub_param(entry: Any) -> SubparamShape:
    """A :class:`SubparamShape` of one, of a dict with its fields, or of one read from a file as plain data."""
    fields = entry if isinstance(entry, dict) else vars(entry)
    try:
        return SubparamShape(list(fields["patterns"]), tuple(fields["shape"]), int(fields["partition_dim"]))
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{keys.PARAMETER_WITH_SUB_PARAMS}: found {fields!r}, expected patterns, shape and partition_dim"
        ) from error


# ---- joining -------------------------------------------------------------------------------------------------------


def join(name: str, slices: Sequence[torch.Tensor], category: Category) -> torch.Tensor:
    """The whole parameter of the slices of all tensor-parallel ranks, in rank order.

    Raises CheckpointError for replicated slices that differ and for widths that do not fit the slices.
    """
    import torch

    first = slices[0]
    if category.averaged:
        return torch.stack([part.float() for part in slices]).mean(dim=0).to(first.dtype)
    if category.cat_dim is None:
        if any(not torch.equal(first, part) for part in slices[1:]):
            raise CheckpointError(f"parameter {name!r} is said to be replicated, but its {len(slices)} slices differ")
        return first
    if category.sub_params is not None:
        return _join_sub_params(name, slices, category)
    if category.halves:
        halves = [part.chunk(2, dim=0) for part in slices]
        return torch.cat([*(low for low, _ in halves), *(high for _, high in halves)], dim=0)
    if first.dim() <= category.cat_dim:
        # The bias of a row-parallel layer, or a single number: every rank holds all of it.
        return join(name, slices, WHOLE)
    whole = torch.cat(list(slices), dim=category.cat_dim)
    return whole[: category.vocabulary] if category.vocabulary is not None else whole


def _join_sub_params(name: str, slices: Sequence[torch.Tensor], category: Category) -> torch.Tensor:
    import torch

    sub = category.sub_params
    assert sub is not None
    widths = shard_widths(name, category, len(slices))
    pieces: list[list[torch.Tensor]] = []
    for rank, part in enumerate(slices):
        own = [row[rank] for row in widths]
        view = fused_view(sub, part.numel(), sum(own))
        if math.prod(view) != part.numel():
            raise CheckpointError(f"parameter {name!r}: rank {rank} holds {tuple(part.shape)}, its widths are {own}")
        pieces.append(list(part.reshape(view).split(own, dim=sub.partition_dim)))
    whole = torch.cat([piece for group in zip(*pieces, strict=True) for piece in group], dim=sub.partition_dim)
    return whole.reshape(_grown(slices[0].shape, whole.shape[sub.partition_dim + 1 :], whole.numel()))


def _grown(shape: Sequence[int], inner: Sequence[int], numel: int) -> list[int]:
    """``shape`` of a slice, grown to ``numel`` along the dim whose elements are runs of ``inner``."""
    grown, run = list(shape), 1
    for dim in reversed(range(len(grown))):
        if run * grown[dim] > math.prod(inner) or dim == 0:
            grown[dim] = numel * grown[dim] // math.prod(shape)
            break
        run *= grown[dim]
    return grown


def shard_widths(name: str, category: Category, world: int) -> list[list[int]]:
    """Width of every rank's part of every sub-parameter. Raises CheckpointError when they do not add up."""
    sub = category.sub_params
    assert sub is not None
    sizes = fused_sizes(sub)
    if category.widths is None:
        uneven = [size for size in sizes if size % world]
        if uneven:
            raise CheckpointError(f"parameter {name!r}: sub-parameters of {uneven} rows cannot be cut into {world}")
        return [[size // world] * world for size in sizes]
    if [sum(row) for row in category.widths] != sizes or any(len(row) != world for row in category.widths):
        raise CheckpointError(
            f"parameter {name!r}: {keys.SUB_PARAM_SHARD_WIDTHS} are {category.widths}, for {world} ranks and "
            f"sub-parameters of {sizes}"
        )
    return category.widths


# ---- cutting -------------------------------------------------------------------------------------------------------


def cut(
    name: str, entry: dict[str, Any], shape: Sequence[int], rank: int, world: int, widths: list[list[int]] | None = None
) -> torch.Tensor:
    """The slice of ``shape`` that tensor-parallel rank ``rank`` of ``world`` needs of a stored entry.

    ``widths``: as in :func:`shard_widths`, None for an even cut. Raises CheckpointError for a slice of another size.
    """
    import torch

    whole, shape = entry[keys.PARAM], tuple(shape)
    if tuple(whole.shape) == shape:
        return whole
    if entry.get(keys.VOCAB_TENSOR):
        part = _vocabulary_rows(whole, shape[0], rank)
    elif keys.SUB_PARAM_SHAPE in entry:
        part = _cut_sub_params(name, whole, as_sub_param(entry[keys.SUB_PARAM_SHAPE]), rank, world, widths)
    elif keys.PARAM_N_SUB_PARAMS in entry:
        dim = int(entry.get(keys.CAT_DIM, 0))
        parts = whole.chunk(int(entry[keys.PARAM_N_SUB_PARAMS]), dim=dim)
        part = torch.cat([half.chunk(world, dim=dim)[rank] for half in parts], dim=dim)
    else:
        dim = int(entry.get(keys.CAT_DIM, 0))
        wanted = shape[dim] if len(shape) > dim else 0
        if whole.dim() <= dim or wanted * world != whole.shape[dim]:
            raise _misfit(name, whole, shape, rank, world)
        part = whole.narrow(dim, rank * wanted, wanted)
    if part.numel() != math.prod(shape):
        raise _misfit(name, whole, shape, rank, world)
    return part.reshape(shape)


def _misfit(name: str, whole: torch.Tensor, shape: tuple[int, ...], rank: int, world: int) -> CheckpointError:
    return CheckpointError(
        f"parameter {name!r} has shape {tuple(whole.shape)} in the checkpoint, which does not give slice {rank} of "
        f"{world} of shape {shape}"
    )


def _vocabulary_rows(whole: torch.Tensor, rows: int, rank: int) -> torch.Tensor:
    part = whole.new_zeros((rows, *whole.shape[1:]))
    held = whole[rank * rows : (rank + 1) * rows]
    part[: held.shape[0]] = held
    return part


def _cut_sub_params(
    name: str, whole: torch.Tensor, sub: SubparamShape, rank: int, world: int, widths: list[list[int]] | None
) -> torch.Tensor:
    import torch

    table = shard_widths(name, Category(sub.partition_dim, sub_params=sub, widths=widths), world)
    dim, sizes = sub.partition_dim, fused_sizes(sub)
    parts = whole.reshape(fused_view(sub, whole.numel(), sum(sizes))).split(sizes, dim=dim)
    own = [part.narrow(dim, sum(row[:rank]), row[rank]) for part, row in zip(parts, table, strict=True)]
    return torch.cat(own, dim=dim)
