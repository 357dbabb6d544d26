"""`RankGrid`: named axes <-> ranks. Pure integers, no process, no torch.

Owns: the numbering of ranks and every list of ranks derived from it. Does not own: process groups (`mesh.py`).
Invariant: ranks are numbered row-major, the last axis fastest. The usual order is pp, dp, sp, tp: the ranks that talk
most (tp) are neighbours, those that talk least (pp) are far apart.

Derived axes need no new numbering: *folding* walks several axes as one (`("dp", "sp")` is the axis ZeRO shards over),
*splitting* cuts one axis into nested ones (`dp` into `(expert_dp, ep)`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

Axes = str | Sequence[str]


@dataclass(frozen=True)
class RankGrid:
    """A grid of ranks.

    Args:
        sizes: axis name -> size, outermost first. The sizes multiply to the world size.
    """

    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"axis {axis!r} has size {size!r}; a size is a whole number of at least 1")
        object.__setattr__(self, "sizes", MappingProxyType(dict(self.sizes)))

    def __hash__(self) -> int:
        return hash(tuple(self.sizes.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankGrid) and list(self.sizes.items()) == list(other.sizes.items())

    def __repr__(self) -> str:
        return f"RankGrid({dict(self.sizes)})"

    @property
    def axes(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(self.sizes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    def size(self, axes: Axes) -> int:
        """Number of ranks along the axis or folded axes."""
        return prod(self.sizes[axis] for axis in self._names(axes))

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along the axis."""
        (name,) = self._names(axis)
        names = self.axes
        return prod(self.sizes[inner] for inner in names[names.index(name) + 1 :])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> coordinate of a rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a grid of {self.world_size} ranks")
        found: dict[str, int] = {}
        for axis in reversed(self.axes):
            rank, found[axis] = divmod(rank, self.sizes[axis])
        return {axis: found[axis] for axis in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Rank at these coordinates; every axis must be given."""
        missing = [axis for axis in self.axes if axis not in coordinates]
        if missing:
            raise ValueError(f"coordinates {dict(coordinates)} lack the axes {missing} of {self}")
        self._names(tuple(coordinates))
        result = 0
        for axis, size in self.sizes.items():
            if not 0 <= coordinates[axis] < size:
                raise ValueError(f"coordinate {axis}={coordinates[axis]} is outside 0..{size - 1}")
            result = result * size + coordinates[axis]
        return result

    def line(self, axes: Axes, rank: int) -> tuple[int, ...]:
        """Ranks that share all other coordinates with `rank`: its group along the axes, the first axis outermost."""
        names = self._names(axes)
        coordinates = self.coordinates(rank)
        base = rank - sum(coordinates[axis] * self.stride(axis) for axis in names)
        return tuple(base + offset for offset in self._offsets(names))

    def position(self, axes: Axes, rank: int) -> int:
        """Index of `rank` in `line(axes, rank)`."""
        coordinates = self.coordinates(rank)
        result = 0
        for axis in self._names(axes):
            result = result * self.sizes[axis] + coordinates[axis]
        return result

    def lines(self, axes: Axes, order: Sequence[str] | None = None) -> list[tuple[int, ...]]:
        """All groups along the axes; together they hold every rank once.

        Args:
            order: the other axes, slowest first; default: as in the grid.
        """
        names = self._names(axes)
        others = tuple(axis for axis in self.axes if axis not in names)
        if order is not None:
            if sorted(order) != sorted(others):
                raise ValueError(f"order {tuple(order)} must name exactly the other axes {others}")
            others = tuple(order)
        inside = self._offsets(names)
        return [tuple(start + offset for offset in inside) for start in self._offsets(others)]

    def matching(self, **coordinates: int) -> list[int]:
        """Ranks, ascending, with these coordinates (axes not named are free)."""
        self._names(tuple(coordinates))
        ranges = [[coordinates[axis]] if axis in coordinates else range(size) for axis, size in self.sizes.items()]
        return [self.rank(dict(zip(self.axes, at, strict=True))) for at in itertools.product(*ranges)]

    def split(self, axis: str, parts: Mapping[str, int]) -> RankGrid:
        """The same numbering with `axis` cut into nested axes, outermost first; their sizes must multiply to its."""
        size = self.size(axis)
        if prod(parts.values()) != size:
            equation = " x ".join(f"{name} {part}" for name, part in parts.items())
            raise ValueError(f"axis {axis!r} of size {size} cannot be split into {equation} = {prod(parts.values())}")
        sizes: dict[str, int] = {}
        for name, old in self.sizes.items():
            sizes.update(parts if name == axis else {name: old})
        return RankGrid(sizes)

    def fold(self, axes: Sequence[str], name: str) -> RankGrid:
        """The same numbering with neighbouring axes, outermost first, as one axis `name`."""
        names = self._names(axes)
        at = self.axes.index(names[0])
        if self.axes[at : at + len(names)] != names:
            raise ValueError(f"only neighbouring axes can be folded: {names} are not neighbours in {self.axes}")
        sizes: dict[str, int] = {}
        for axis, size in self.sizes.items():
            if axis == names[0]:
                sizes[name] = self.size(names)
            elif axis not in names:
                sizes[axis] = size
        return RankGrid(sizes)

    def _offsets(self, names: Sequence[str]) -> list[int]:
        """Ranks of all coordinates along the axes, zero on the others; the first axis slowest."""
        offsets = [0]
        for axis in names:
            step = self.stride(axis)
            offsets = [offset + step * i for offset in offsets for i in range(self.sizes[axis])]
        return offsets

    def _names(self, axes: Axes) -> tuple[str, ...]:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        unknown = [axis for axis in names if axis not in self.sizes]
        if unknown:
            raise ValueError(f"unknown axis {unknown[0]!r}; the axes are {', '.join(self.axes)}")
        return names


def split_line(ranks: Sequence[int], index: int, inner: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cut a line of ranks into blocks of `inner` neighbours.

    Returns:
        (the block of the rank at `index`, the ranks at the same place of all blocks).
    """
    if inner < 1 or len(ranks) % inner:
        raise ValueError(f"{len(ranks)} ranks cannot be cut into blocks of {inner}")
    block = index // inner * inner
    return tuple(ranks[block : block + inner]), tuple(ranks[index % inner :: inner])


def refuse_uneven(name: str, size: int, count: int, whose: str) -> None:
    """Raise ValueError, with the equation and the sizes that fit, where blocks of ``size`` do not fill ``count`` ranks.

    ``name``: of the size, as the user knows it; ``whose``: which ranks these are, in words.
    """
    if size >= 1 and count % size == 0:
        return
    equation = f"; {count} = {count // size} x {size} + {count % size}" if size > 0 else ""
    fitting = ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
    raise ValueError(f"{name}={size} does not divide the {count} ranks {whose}{equation}; sizes that do: {fitting}")


def unique(lines: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The lines without repetition, in order of first appearance."""
    return list(dict.fromkeys(lines))
