"""`ParallelMesh`: the process groups of this rank, by axis.

Owns: which ranks form the group of an axis, the groups it has made, and the one process-wide variable of the project,
the current mesh (set by `initialize`, read by `deepspeed.utils.groups` for clients; our own code is handed a mesh).
Does not own: the numbering of ranks (`rank_grid.py`).
Invariants: groups are made in the same order on all ranks, once per set of ranks, and only by their members, so a mesh
of any size costs each rank a few groups. A world of one rank makes no group at all.

Axes:
    dp, sp, tp, pp   data, sequence, tensor, pipeline parallel
    zero             dp x sp: the ranks that hold the same parameters, over which ZeRO shards
    mp               pp x tp: the ranks that hold one copy of the model
    zero_inner       blocks of neighbours of `zero`, and
    zero_outer       the ranks at the same place of all blocks; several sizes: `group("zero_inner", inner=4)`
    hpz, hpz_outer   the same two for the blocks that hold a secondary copy of the parameters
    ep, edp          experts, and the ranks that hold the same expert; several sizes: `group("ep", ep_size=4)`
    world            all ranks
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.comm.group_facts import Group, forget
from deepspeed.comm.group_pool import GroupPool, Key, Numbered
from deepspeed.comm.levels import Levels
from deepspeed.comm.rank_grid import RankGrid, refuse_uneven, split_line

__all__ = ["ParallelMesh", "current_mesh", "device_mesh", "set_current_mesh"]

_FOLDED = {"zero": ("dp", "sp"), "mp": ("pp", "tp")}
_ZERO_LEVELS = ("zero_inner", "zero_outer")
# Order in which a mesh makes its groups, equal on all ranks.
_GROUP_ORDER = ("tp", "sp", "dp", "zero", "mp", "pp")


class ParallelMesh:
    """Groups, sizes and positions of this rank along every axis. Make one with `build` or `from_mpu`."""

    def __init__(
        self,
        lines: Mapping[str, tuple[int, ...]],
        rank: int,
        world_size: int,
        *,
        grid: RankGrid | None = None,
        groups: Mapping[tuple[int, ...], Group] | None = None,
        mpu: Any = None,
    ) -> None:
        self.global_rank = rank
        self.world_size = world_size
        self.grid = grid
        self.mpu = mpu
        self.torch_mesh: Any = None  # torch's view, once somebody asked for one over all ranks
        self.position_overrides: dict[str, int] = {}
        self.size_overrides: dict[str, int] = {}
        self._lines: dict[str, tuple[int, ...]] = {"world": tuple(range(world_size)), **lines}
        self._groups: dict[tuple[int, ...], Group] = dict(groups or {})
        self._made: list[Group] = []
        self._separate: dict[Key, Numbered] = {}
        self._leaving: weakref.finalize[Any, Any] | None = None
        self._use_pool(_current._pool if _current is not None and _current.is_current_world() else GroupPool())
        self._ep_sizes: list[int] = []
        self._inner_sizes: list[int] = []
        world = torch_dist.group.WORLD if torch_dist.is_initialized() else None
        self._default_group: weakref.ref[Any] | None = None if world is None else weakref.ref(world)
        self._make_groups(self._lines[axis] for axis in _GROUP_ORDER if axis in self._lines)

    @classmethod
    def build(
        cls,
        world: RankGrid | int | None = None,
        *,
        rank: int | None = None,
        pp: int = 1,
        tp: int = 1,
        sp: int = 1,
        hpz: int = 1,
        ep: int | Sequence[int] = (),
    ) -> ParallelMesh:
        """The mesh of a job. All ranks must call, with equal arguments.

        Args:
            world: number of ranks (default: of the default group), from which dp follows; or a grid whose axes are
                among pp, dp, sp, tp, in any order.
            rank: this rank; default: of the default group.
            pp, tp, sp: sizes of the other axes when `world` is a number.
            hpz: ranks that share one secondary copy of the parameters.
            ep: expert-parallel size, or several.

        Raises:
            ValueError: the sizes do not divide the world; the text has the equation.
        """
        running = torch_dist.is_initialized()
        if world is None:
            world = torch_dist.get_world_size() if running else 1
        if rank is None:
            rank = torch_dist.get_rank() if running else 0
        if isinstance(world, int):
            others = pp * sp * tp
            if world % others:
                raise ValueError(
                    f"{world} ranks cannot be divided into pp {pp} x sp {sp} x tp {tp} = {others} ranks per replica"
                )
            grid = RankGrid({"pp": pp, "dp": world // others, "sp": sp, "tp": tp})
        else:
            unknown = set(world.axes) - {"pp", "dp", "sp", "tp"}
            if unknown:
                raise ValueError(f"unknown axis {sorted(unknown)[0]!r}; a mesh is built of pp, dp, sp and tp")
            missing = {axis: 1 for axis in ("pp", "dp", "sp", "tp") if axis not in world.axes}
            grid = RankGrid({**missing, **world.sizes})
        if running and grid.world_size != torch_dist.get_world_size():
            raise ValueError(f"{grid} has {grid.world_size} ranks, the job has {torch_dist.get_world_size()}")
        lines = {axis: grid.line(axis, rank) for axis in grid.axes}
        lines |= {name: grid.line(_in_grid_order(axes, grid), rank) for name, axes in _FOLDED.items()}
        mesh = cls(lines, rank, grid.world_size, grid=grid)
        if hpz > 1:
            mesh.add_hpz(hpz)
        for size in (ep,) if isinstance(ep, int) else ep:
            mesh.add_ep(size)
        return mesh

    @classmethod
    def from_mpu(cls, mpu: Any) -> ParallelMesh:
        """The mesh that a Megatron-style object describes, on its own groups.

        Read, as far as they exist: get_{data,sequence,tensor_model,model,pipe,pipeline_model}_parallel_group and
        get_sequence_data_parallel_group. Objects that call their sequence group the model group are understood.
        """
        from deepspeed.comm.mpu import read_mpu

        own = getattr(mpu, "mesh", None)
        if isinstance(own, cls):
            own.mpu = mpu
            return own
        found = read_mpu(mpu)
        return cls(found.lines, found.rank, found.world_size, groups=found.groups, mpu=mpu)

    # Questions

    def size(self, axis: str, *, ep_size: int | None = None, inner: int | None = None) -> int:
        """Number of ranks along the axis."""
        override = self.size_overrides.get(axis)
        return override if override is not None else len(self.ranks(axis, ep_size=ep_size, inner=inner))

    def rank(self, axis: str, *, ep_size: int | None = None, inner: int | None = None) -> int:
        """Position of this rank along the axis."""
        override = self.position_overrides.get(axis)
        if override is not None:
            return override
        return self.ranks(axis, ep_size=ep_size, inner=inner).index(self.global_rank)

    def ranks(self, axis: str, *, ep_size: int | None = None, inner: int | None = None) -> tuple[int, ...]:
        """Ranks of the job in this rank's group along the axis."""
        key = self._key(axis, ep_size, inner)
        line = self._lines.get(key)
        if line is None:
            if axis in ("ep", "edp") and ep_size is not None:
                raise ValueError(f"no experts of ep_size={ep_size}; sizes in use: {self.ep_sizes or 'none'}")
            if axis in _ZERO_LEVELS:
                known = tuple(self._inner_sizes) or "none"
                raise ValueError(f"no blocks of inner={inner} in zero; sizes in use: {known}; see add_zero_levels")
            valid = ", ".join(sorted({name.split("_of_")[0] for name in self._lines}))
            raise ValueError(f"unknown axis {axis!r}; this mesh has {valid}")
        return line

    def group(self, axis: str, *, ep_size: int | None = None, inner: int | None = None) -> Group:
        """Process group of this rank along the axis; None (the default group) in a world without torch.distributed."""
        return self._group_of(self.ranks(axis, ep_size=ep_size, inner=inner))

    def separate_group(self, axis: str, purpose: str) -> Group:
        """Another group of the same ranks, for collectives whose order is independent of those on `group(axis)`.

        One per ranks and purpose; all ranks of the axis must ask for it at the same point.
        """
        return self._separate_group(self.ranks(axis), purpose)

    def _separate_group(self, ranks: tuple[int, ...], purpose: str) -> Group:
        if not purpose or not torch_dist.is_initialized() or len(ranks) == 1:
            return self._group_of(ranks)
        key = (ranks, purpose)
        if key not in self._separate:
            self._separate[key] = self._pool.take(key, lambda: self._group_of(ranks))
            self._made.append(self._separate[key][1])
        return self._separate[key][1]

    def has(self, axis: str, *, ep_size: int | None = None, inner: int | None = None) -> bool:
        """Whether the mesh knows the axis."""
        return self._key(axis, ep_size, inner) in self._lines

    @property
    def ep_sizes(self) -> tuple[int, ...]:
        """Expert-parallel sizes in use, ascending."""
        return tuple(sorted(self._ep_sizes))

    def is_current_world(self) -> bool:
        """Whether the default group is still the one this mesh was made for."""
        world = torch_dist.group.WORLD if torch_dist.is_initialized() else None
        known = self._default_group() if self._default_group is not None else None
        return world is known

    # Additions; all ranks must make them in the same order

    def add_ep(self, size: int, *, data_before_expert: bool = False) -> None:
        """Add axes "ep" (neighbours along zero, `size` ranks) and "edp" (ranks with the same experts).

        `data_before_expert` numbers the other way round: the ranks with the same experts are neighbours.
        """
        if size in self._ep_sizes:
            return
        zero = self.ranks("zero")
        if size < 1 or len(zero) % size:
            raise ValueError(
                f"ep_size={size} does not divide the {len(zero)} ranks that hold the same layers "
                f"(dp {len(self.ranks('dp'))} x sp {len(self.ranks('sp'))})"
            )
        index = zero.index(self.global_rank)
        if data_before_expert:
            edp, ep = split_line(zero, index, len(zero) // size)
        else:
            ep, edp = split_line(zero, index, size)
        self._ep_sizes.append(size)
        self._lines[f"ep_of_{size}"] = ep
        self._lines[f"edp_of_{size}"] = edp
        self._make_groups((ep, edp))

    def add_hpz(self, size: int) -> None:
        """Add axes "hpz" (neighbours along zero, `size` ranks) and "hpz_outer"."""
        inner, outer = self._cut_zero(size, "zero_hpz_partition_size")
        if self._lines.get("hpz", inner) != inner:
            raise ValueError(f"this mesh already has hpz groups of {len(self._lines['hpz'])} ranks, not {size}")
        self._lines["hpz"] = inner
        self._lines["hpz_outer"] = outer
        self._make_groups((inner, outer))

    def add_zero_levels(self, inner: int, *, name: str = "inner") -> None:
        """Add axes "zero_inner" (blocks of `inner` neighbours along zero) and "zero_outer" (same place in all blocks).

        Args:
            name: of the number, for the error.

        Raises:
            ValueError: `inner` does not divide the ranks of zero.
        """
        if inner in self._inner_sizes:
            return
        near, far = self._cut_zero(inner, name)
        self._inner_sizes.append(inner)
        self._lines[f"zero_inner_of_{inner}"] = near
        self._lines[f"zero_outer_of_{inner}"] = far
        self._make_groups((near, far))

    def levels(self, inner: int, *, within: int | None = None, purpose: str = "", name: str = "inner") -> Levels:
        """Groups for two-hop collectives over zero, cut into blocks of `inner` ranks. All ranks must call.

        Args:
            within: the two levels of this rank's block of `within` neighbours instead of all of zero: a shard group
                of MiCS that spans several nodes.
            purpose: groups of their own, see `separate_group`.
            name: of `inner`, for the error.
        """
        self.add_zero_levels(inner, name=name)
        near, far = self.ranks("zero_inner", inner=inner), self.ranks("zero_outer", inner=inner)
        if within is not None:
            block, _ = self._cut_zero(within, "within")
            if within % inner:
                raise ValueError(f"blocks of {within} ranks cannot be cut into blocks of {name}={inner}")
            far = tuple(rank for rank in far if rank in block)
        return Levels(self._separate_group(near, purpose), self._separate_group(far, purpose))

    def device_mesh(self, *axes: str) -> Any:
        """torch `DeviceMesh` over the sub-grid of this rank, for DTensor and compile users; uses this mesh's groups."""
        if self.grid is None:
            raise ValueError("a mesh made from an mpu object has no grid; ask for the groups of its axes instead")
        sizes = [self.size(axis) for axis in axes]
        ranks = torch.tensor(self.grid.line(axes, self.global_rank)).view(sizes)
        return _torch_device_mesh(ranks, axes, [self.group(axis) for axis in axes])

    def follow(self, earlier: ParallelMesh | None) -> None:
        """Use the separate groups again that ``earlier`` and those before it have left, in the same world."""
        if earlier is not None and earlier.is_current_world():
            self._use_pool(earlier._pool)

    def _use_pool(self, pool: GroupPool) -> None:
        """Take separate groups of ``pool``, and give them back to it when this mesh is garbage."""
        if self._leaving is not None:
            self._leaving.detach()
        self._pool = pool
        self._leaving = weakref.finalize(self, pool.drop, self._separate)
        self._leaving.atexit = False

    def retire(self) -> None:
        """The engine of this mesh is gone: its separate groups are free for the next one. All ranks must call it."""
        for _, group in self._separate.values():
            self._made.remove(group)
        self._pool.retire(self._separate)

    def close(self) -> None:
        """Destroy the groups this mesh has made. Idempotent; no mesh that uses them may be used afterwards."""
        made, self._made = self._made, []
        self._groups.clear()
        self._separate.clear()
        self._pool.forget(made)
        for group in made:
            forget(group)
            if torch_dist.is_initialized() and group in torch_dist.distributed_c10d._world.pg_map:
                torch_dist.destroy_process_group(group)

    def check_divides(self, size: int, name: str) -> None:
        """Raise ValueError where the ranks of zero cannot be cut into blocks of ``size``. Local."""
        which = f"ZeRO shards over (dp {len(self.ranks('dp'))} x sp {len(self.ranks('sp'))})"
        refuse_uneven(name, size, len(self.ranks("zero")), which)

    # Groups

    def _cut_zero(self, inner: int, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(this rank's block of `inner` neighbours in zero, the ranks at its place of all blocks)."""
        zero = self.ranks("zero")
        self.check_divides(inner, name)
        return split_line(zero, zero.index(self.global_rank), inner)

    def _group_of(self, ranks: tuple[int, ...]) -> Group:
        group = self._groups.get(ranks)
        if group is None and torch_dist.is_initialized():
            group = self._make_group(ranks)
        return group

    def _key(self, axis: str, ep_size: int | None, inner: int | None) -> str:
        if axis in _ZERO_LEVELS:
            if inner is None and len(self._inner_sizes) > 1:
                raise ValueError(f"axis {axis!r} has the sizes {tuple(self._inner_sizes)}: say which, as inner=...")
            return f"{axis}_of_{inner if inner is not None or not self._inner_sizes else self._inner_sizes[0]}"
        if axis not in ("ep", "edp"):
            return axis
        if ep_size is None:
            if len(self._ep_sizes) != 1:
                return axis if not self._ep_sizes else self._ambiguous(axis)
            ep_size = self._ep_sizes[0]
        return f"{axis}_of_{ep_size}"

    def _ambiguous(self, axis: str) -> str:
        raise ValueError(f"axis {axis!r} has the sizes {self.ep_sizes}: say which, e.g. ep_size={self.ep_sizes[0]}")

    def _make_groups(self, lines: Iterable[tuple[int, ...]]) -> None:
        for ranks in lines:
            if len(ranks) > 1 and ranks not in self._groups and torch_dist.is_initialized():
                self._make_group(ranks)

    def _make_group(self, ranks: tuple[int, ...]) -> Group:
        world = torch_dist.group.WORLD
        if len(ranks) == self.world_size and ranks == tuple(range(self.world_size)):
            group: Group = world
        else:
            group, is_new = self._pool.common(ranks)
            if is_new:
                self._made.append(group)
        self._groups[ranks] = group
        return group


def _in_grid_order(axes: Sequence[str], grid: RankGrid) -> tuple[str, ...]:
    return tuple(axis for axis in grid.axes if axis in axes)


def device_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """torch `DeviceMesh` of this shape over all ranks of the job, with the default group's time limit."""
    grid = RankGrid(dict(zip(names, shape, strict=True)))
    world = torch_dist.get_world_size()
    if grid.world_size != world:
        raise ValueError(f"a mesh of {dict(grid.sizes)} needs {grid.world_size} ranks; the job has {world}")
    rank = torch_dist.get_rank()
    helper = ParallelMesh({axis: grid.line(axis, rank) for axis in names}, rank, world)
    helper._make_groups(helper.ranks(axis) for axis in names)
    return _torch_device_mesh(torch.arange(world).view(shape), names, [helper.group(axis) for axis in names])


def _torch_device_mesh(ranks: torch.Tensor, names: Sequence[str], groups: list[Group]) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    kind = get_accelerator().device_name()
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], kind, mesh_dim_names=tuple(names))
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=tuple(names))


_current: ParallelMesh | None = None


def current_mesh() -> ParallelMesh:
    """The mesh of the running job: the one `initialize` has set, else all ranks data parallel."""
    global _current
    if _current is None or not _current.is_current_world():
        _current = ParallelMesh.build()
    return _current


def set_current_mesh(mesh: ParallelMesh | None) -> None:
    """Make `mesh` the current one; None forgets it."""
    global _current
    if mesh is not None:
        mesh.follow(_current)
    _current = mesh
