"""``ParamBlock``: parameters that are gathered and released together, and the states they go through.

A block is one segment of a layout seen from the parameters' side. Every rank keeps one piece of it, the *shard*; the
*full* buffer exists only while the block is gathered, and its parameters are views of it then.

    NOT_AVAILABLE --launch--> INFLIGHT --arrive--> gathered --bind--> AVAILABLE --hide--> gathered --release--> ...

Between *gathered* and AVAILABLE the full buffer is there but the parameters are not bound to it: that is all that
backward needs, whose saved tensors are found by their place in the buffer.

This is the only code that changes where a sharded parameter's data lies, its class (see ``sharded_parameter.py``) and
its historical ``ds_*`` attributes.

[Note: releasing is always safe] A released buffer is only let go of, never resized: whoever still holds a view of it
(autograd, a user's variable) keeps its memory alive and its values right. So the policy of what to release when
(``gather.py``) decides about memory and traffic, never about numbers. One thing autograd holds is not a view: a graph
built outside our saved-tensor hooks may have saved the parameter itself. Hiding a parameter therefore moves its version
counter, so that such a graph, if it was not kept safe otherwise, ends in torch's error about modified variables.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from deepspeed.comm import collectives
from deepspeed.comm.holders import held_elsewhere
from deepspeed.runtime.swap_tensor.host_store import HostMemory
from deepspeed.runtime.zero.apart import apart
from deepspeed.runtime.zero.historical_params import BlockReference, ZeroParamStatus, attach, detach
from deepspeed.runtime.zero.routes import GatherRoute, SecondaryShard
from deepspeed.runtime.zero.sharded_parameter import guard_class, placeholder


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter of a block: ``numel`` elements of ``shape`` from element ``start`` of the full buffer."""

    param: nn.Parameter
    name: str
    start: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


# Full buffers by the address of their storage, of all models: what autograd's saved-tensor hook looks a tensor up in.
live_buffers: weakref.WeakValueDictionary[int, ParamBlock] = weakref.WeakValueDictionary()


class ParamBlock:
    """See the module docstring. ``shard`` is this rank's piece; ``numel == world * shard.numel()``."""

    def __init__(
        self,
        places: Sequence[Place],
        shard: torch.Tensor,
        *,
        process_group: Any,
        rank: int,
        world: int,
        index: int,
        persistent: bool = False,
        route: GatherRoute | None = None,
        offloaded_from: torch.device | None = None,
    ) -> None:
        """``route``: how it is gathered; default: exactly, over ``process_group``.

        ``offloaded_from``: the device the block is gathered on, where ``shard`` lies in host memory instead.
        """
        self.offloaded = offloaded_from is not None
        self.device = offloaded_from if offloaded_from is not None else shard.device
        self.places = list(places)
        self.shard = shard.data  # a version counter of its own, not that of all blocks of an optimizer group
        self.process_group, self.rank, self.world = process_group, rank, world
        self.index = index  # names the block in collectives: the same on every rank
        self.persistent = persistent
        self.route = route or GatherRoute(process_group)
        self.secondary = SecondaryShard(self.route.secondary) if self.route.secondary is not None else None
        self.rounded = False  # ``full`` holds packed values, close to those of the shards; else the very same
        self.numel = shard.numel() * world
        self.full: torch.Tensor | None = None  # 1D, numel, the parameters' dtype
        self.bound = False  # the parameters are views of ``full``
        self.stray: torch.Tensor | None = None  # a released buffer that somebody else still holds, and may write to
        self._stray_state = (0, 0)  # version of the shard and generation when it agreed with the stray
        self.pending: collectives.Pending | None = None
        self.pins = 0  # GatheredParameters contexts that hold it
        self.held = False  # a graph may need its memory that our hooks do not see: keep until told
        self.by_hand: set[int] = set()  # positions that the user has gathered with param.all_gather()
        self.generation = 0  # counts changes of the values
        self.owner: Any = None  # the gatherer that fetches and releases it
        self.on_write: Callable[[set[int]], None] | None = None  # positions whose values the user changed
        self._address = 0
        self._gathered_version = -1  # of the shard, when ``full`` last took its values, or it those of ``full``
        self._classes = [type(place.param) for place in self.places]
        self._guards = [guard_class(cls) for cls in self._classes]
        self._versions = [0] * len(self.places)
        for position, place in enumerate(self.places):
            self._describe(position, place)

    @torch.no_grad()
    def move_shard(self, home: HostMemory) -> None:
        """The shard lives off the device from here on, in ``home``."""
        moved = home.zeros(self.shard.numel(), self.shard.dtype, self.device)
        moved.copy_(self.shard)
        self.shard, self.offloaded = moved, True
        self._gathered_version = -1
        for position, place in enumerate(self.places):
            _, own = self.own(position)
            place.param.ds_tensor = own  # type: ignore[attr-defined]

    def _describe(self, position: int, place: Place) -> None:
        param: Any = place.param
        attach(param, world=self.world, persistent=self.persistent)
        param.ds_shape, param.ds_numel = place.shape, place.numel
        param._ds_block = BlockReference(self)
        param._ds_position = position
        param.__dict__.pop("_ds_keeper", None)  # of the block it was in before
        low = max(place.start, self.rank * self.shard.numel())
        high = min(place.start + place.numel, (self.rank + 1) * self.shard.numel())
        offset = min(max(low - self.rank * self.shard.numel(), 0), self.shard.numel())
        param.ds_tensor = self.shard.narrow(0, offset, max(high - low, 0))  # this rank's elements; may be empty

    # ---- states ----------------------------------------------------------------------------------------------------

    @property
    def status(self) -> ZeroParamStatus:
        if self.pending is not None:
            return ZeroParamStatus.INFLIGHT
        return ZeroParamStatus.AVAILABLE if self.bound else ZeroParamStatus.NOT_AVAILABLE

    @apart
    def hide(self) -> None:
        """Parameters let go of their data: shape, dtype and device stay, values are out of reach."""
        self.bound = False
        for place, guard in zip(self.places, self._guards, strict=True):
            param: Any = place.param
            increment_version(param)
            param.data = placeholder(place.shape, self.shard.dtype, self.device)
            param.__class__ = guard
            param.ds_status = ZeroParamStatus.NOT_AVAILABLE

    @apart
    def launch(self, *, exact: bool = False) -> None:
        """Start the all-gather of this block; ``exact``: of the shards' very values. Collective."""
        assert self.full is None, "a block is gathered once at a time"
        self.take_stray()
        self.stray = None
        full = torch.empty(self.numel, dtype=self.shard.dtype, device=self.device)
        self.full = full
        near = self.secondary
        if near is not None and near.holds(self.generation) and not (exact and near.rounded):
            self.rounded = near.rounded
            self._gathered_version = self.shard._version
            self.pending = near.gather(full, what=self.explain, key=self.index + 1)
        else:
            self.pending = self._gather(exact=exact, async_op=True)

    def _gather(self, *, exact: bool, async_op: bool) -> collectives.Pending:
        assert self.full is not None
        self.rounded = not exact and self.route.rounds(self.shard.dtype)
        self._gathered_version = self.shard._version
        near = self.shard
        if self.offloaded:
            near = torch.empty_like(near, device=self.device).copy_(near, non_blocking=True)
        return self.route.gather(
            self.full, near, exact=exact, what=self.explain, async_op=async_op, key=self.index + 1
        )

    @apart
    def make_exact(self) -> None:
        """A full buffer that a packed gather has filled takes the shards' very values. Collective if it has."""
        self.arrive()
        if self.rounded:
            self.absorb()
            self._gather(exact=True, async_op=False)

    def arrive(self) -> torch.Tensor:
        """Wait for the all-gather; the full buffer.  # 1D, numel"""
        assert self.full is not None
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
            self._address = self.full.untyped_storage().data_ptr()
            live_buffers[self._address] = self
        return self.full

    @apart
    def bind(self) -> None:
        """Give every parameter its data, once it is here."""
        full = self.arrive()
        if self.bound:
            return
        self.bound = True
        with torch._C.DisableTorchFunctionSubclass():
            for position, (place, cls) in enumerate(zip(self.places, self._classes, strict=True)):
                param: Any = place.param
                param.data = full.as_strided(place.shape, place.stride, place.start)
                param.__class__ = cls
                param.ds_status = ZeroParamStatus.AVAILABLE
                self._versions[position] = param._version

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Inside, nobody releases this block."""
        self.pins += 1
        try:
            yield
        finally:
            self.pins -= 1

    def hold(self, position: int) -> None:
        """The user wants this parameter gathered until :meth:`unhold`: the block is pinned once for all of them."""
        self.pins += not self.by_hand
        self.by_hand.add(position)

    def unhold(self, position: int) -> None:
        """Undo :meth:`hold`; nothing where it was not called."""
        if position in self.by_hand:
            self.by_hand.remove(position)
            self.pins -= not self.by_hand

    def conceal(self) -> None:
        """Hide the parameters and keep the buffer; in-place edits are taken into the shard first."""
        if self.bound:
            self.absorb()
            self.hide()

    def release(self, *, drop_edits: bool = False) -> None:
        """Let go of the full buffer; in-place edits of it are taken into the shard first, or dropped."""
        if self.full is None:
            return
        self.arrive()
        ours = not (self.bound and drop_edits)  # no edits that shards do not have
        if self.bound:
            if not drop_edits:
                self.absorb()
            self.hide()
        if self.secondary is not None and ours:
            self.secondary.keep(self.full, self.generation, rounded=self.rounded)
        live_buffers.pop(self._address, None)
        if ours and not self.rounded and self.secondary is None and held_elsewhere(self.full):
            self.stray, self._stray_state = self.full, (self.shard._version, self.generation)
        self.full = None

    @apart
    def take_stray(self) -> None:
        """What was written into a released buffer through an alias of it (``a = w.data``) reaches the shard.

        Each rank takes its own elements, unless the values have changed otherwise since (a step, another write).
        """
        if self.stray is not None and (self.shard._version, self.generation) == self._stray_state:
            self.shard.copy_(self.stray.narrow(0, self.rank * self.shard.numel(), self.shard.numel()))
            self._stray_state = (self.shard._version, self.generation)

    def drop_stray(self) -> bool:
        """Let go of the stray once nobody else holds it; True when there is none left."""
        if self.stray is not None and not held_elsewhere(self.stray):
            self.take_stray()
            self.stray = None
        return self.stray is None

    @apart
    def refresh(self, *, async_op: bool) -> collectives.Pending:
        """All-gather again into the buffer that is there, after the shards have changed. Collective."""
        assert self.full is not None
        assert self.pending is None
        self.generation += 1
        return self._gather(exact=False, async_op=async_op)

    # ---- edits -----------------------------------------------------------------------------------------------------

    def view(self, place: Place) -> torch.Tensor:
        """The elements of ``place`` in the full buffer, in its shape."""
        assert self.full is not None
        return self.full.as_strided(place.shape, place.stride, place.start)

    @apart
    def absorb(self, *, everything: bool = False) -> set[int]:
        """Take weights that the user has changed while they were gathered into the shard; their positions.

        An edit is seen by the version counter or, when ``param.data`` was assigned, by its address. Writes into
        ``param.data`` move neither: a shard that was not written to itself takes all of its elements as they are, and
        only masters of another dtype do not notice, as at stages 0 to 2 (not a shard in host memory, which would cost
        a copy over the bus each time). Every rank is taken to have made the same edit, as in data-parallel training
        without sharding.
        """
        self.take_stray()
        if not self.bound:
            return set()
        assert self.full is not None
        changed = set()
        for position, place in enumerate(self.places):
            param = place.param
            if param._version != self._versions[position]:
                self._versions[position] = param._version
            elif not place.numel or (not everything and param.data_ptr() == self._address_of(place)):
                continue
            self.take_back(position)
            changed.add(position)
        self.written(changed)
        if not self.rounded and not self.offloaded and self.shard._version == self._gathered_version:
            self.shard.copy_(self.full.narrow(0, self.rank * self.shard.numel(), self.shard.numel()))
            self._gathered_version = self.shard._version
        return changed

    def absorb_if_edited(self, offset: int) -> None:
        """:meth:`absorb` where the parameter at ``offset`` of the full buffer was edited since the last look."""
        if self.bound:
            position = max(bisect_right(self.places, offset, key=lambda place: place.start) - 1, 0)
            if self.places[position].param._version != self._versions[position]:
                self.absorb()

    def _address_of(self, place: Place) -> int:
        return self._address + place.start * self.shard.element_size()

    def unsaved(self, position: int) -> bool:
        """Whether a bound parameter has been edited, or its data replaced, since its shard last followed."""
        place = self.places[position]
        moved = bool(place.numel) and place.param.data_ptr() != self._address_of(place)
        return moved or place.param._version != self._versions[position]

    @apart
    def differs(self, position: int) -> bool:
        """Whether this rank's elements of a gathered parameter are other bits than those of its shard."""
        if self.full is None or self.rounded:
            return False
        start, elements = self.own(position)
        held = self.full.narrow(0, self.places[position].start + start, elements.numel()).to(elements.device)
        return not torch.equal(held.view(torch.uint8), elements.view(torch.uint8))  # NaN equals itself

    @apart
    def take_back(self, position: int) -> None:
        """Copy a parameter whose data may lie elsewhere into the full buffer, and bind it there again.

        Raises ValueError for data of another shape or dtype; the parameter has its own data back then.
        """
        place = self.places[position]
        param, view = place.param, self.view(place)
        dtype, shape = param.dtype, tuple(param.shape)
        if dtype is not self.shard.dtype or shape != tuple(place.shape):
            param.data = view
            self._versions[position] = param._version
        if dtype is not self.shard.dtype:
            raise ValueError(
                f"parameter {place.name!r}: its dtype was changed to {dtype} while it is sharded as "
                f"{self.shard.dtype}. Choose the dtype in the config (bf16, fp16), or convert before "
                "deepspeed.initialize"
            )
        if shape != tuple(place.shape):
            raise ValueError(
                f"parameter {place.name!r}: its data was replaced by a tensor of shape {shape}; it is "
                f"sharded as {tuple(place.shape)}. Assign a tensor of that shape, or replace the module"
            )
        if param.data_ptr() != view.data_ptr() or param.stride() != place.stride:
            view.copy_(param.data)
            param.data = view
        self._versions[position] = param._version

    @apart
    def written(self, positions: set[int]) -> None:
        """The full buffer has new values at ``positions``: the shard follows, and so do masters."""
        if not positions:
            return
        assert self.full is not None
        in_step = self.shard._version == self._gathered_version
        for position in positions:  # not the whole piece: other elements of a packed gather are rounded
            start, elements = self.own(position)
            elements.copy_(self.full.narrow(0, self.places[position].start + start, elements.numel()))
        if in_step:
            self._gathered_version = self.shard._version
        self.changed(positions)

    def changed(self, positions: set[int]) -> None:
        """The shard has new values at ``positions``."""
        self.generation += 1
        if self.on_write is not None:
            self.on_write(positions)

    def write_shard(self, position: int, value: torch.Tensor | float) -> None:
        """Set a parameter that is not bound from a whole value (or one number) known to every rank; local."""

        def copy(elements: torch.Tensor, start: int) -> None:
            if isinstance(value, torch.Tensor):
                flat = value.detach().expand(self.places[position].shape).reshape(-1)
                elements.copy_(flat.narrow(0, start, elements.numel()))
            else:
                elements.fill_(value)

        self.write_own(position, copy)

    def own(self, position: int) -> tuple[int, torch.Tensor]:
        """``(start in the parameter, elements)``: this rank's part of a parameter, in the shard.  # 1D, may be empty"""
        place, piece = self.places[position], self.shard.numel()
        low = max(place.start, self.rank * piece)
        high = min(place.start + place.numel, (self.rank + 1) * piece)
        if high <= low:
            return 0, self.shard.narrow(0, 0, 0)
        return low - place.start, self.shard.narrow(0, low - self.rank * piece, high - low)

    @apart
    def write_own(self, position: int, fill: Callable[[torch.Tensor, int], None]) -> None:
        """Every rank sets its own elements of a parameter that is not bound: ``fill(elements, start)``; local."""
        if self.full is not None:  # its buffer would be stale
            self.arrive()
            live_buffers.pop(self._address, None)
            self.owner.dropped(self)
            self.full = None
        start, elements = self.own(position)
        if elements.numel():
            fill(elements, start)
        self.changed({position})

    # ---- life ------------------------------------------------------------------------------------------------------

    @apart
    def dissolve(self, *, whole: bool) -> None:
        """Make plain parameters of its parameters again: whole ones (collective), or empty ones."""
        if whole and self.full is None:
            self.launch(exact=True)
        if self.full is not None:
            self.arrive()
        self.absorb()
        if whole:
            self.make_exact()
        self.bound = False
        for place, cls in zip(self.places, self._classes, strict=True):
            param: Any = place.param
            param.__class__ = cls  # first: a sharded one would take the data for a write to its shard
            param.data = self.view(place).clone() if whole else torch.empty(0, dtype=param.dtype, device=param.device)
            detach(param)
        live_buffers.pop(self._address, None)
        self.full = self.secondary = self.stray = None
        self.places, self._classes, self._guards, self._versions = [], [], [], []
        self.owner = self.process_group = self.on_write = None  # an old graph may still hold the block
        self.route = GatherRoute(None)

    @apart
    def remove(self, params: Sequence[nn.Parameter]) -> None:
        """Forget ``params``, which another block has taken over; without any left, the block lets go of its shard."""
        gone = {id(param) for param in params}
        kept = [position for position, place in enumerate(self.places) if id(place.param) not in gone]
        if self.bound:  # else their views would keep the full buffer
            for place in self.places:
                if id(place.param) in gone:
                    place.param.data = placeholder(place.shape, self.shard.dtype, self.device)
        self.places = [self.places[position] for position in kept]
        self._classes = [self._classes[position] for position in kept]
        self._guards = [self._guards[position] for position in kept]
        self._versions = [self._versions[position] for position in kept]
        for position, place in enumerate(self.places):
            place.param._ds_position = position  # type: ignore[attr-defined]
        if self.owner is not None:
            self.owner.forget(self)
        elif not self.places:
            self.drop()

    def drop(self) -> None:
        """Let go of all memory of a block without parameters."""
        live_buffers.pop(self._address, None)
        self.full = self.secondary = self.stray = None
        self.shard, self.numel = self.shard.new_empty(0), 0

    def name_of(self, param: nn.Parameter) -> str:
        """The name of one of its parameters."""
        return next((place.name for place in self.places if place.param is param), "?")

    def explain(self) -> str:
        """:meth:`describe` with the remedies, for the error of a gather that not every rank has joined."""
        outside = self.owner.outside if self.owner is not None else None
        if outside is not None:
            return f"{self.describe()}{outside.clause()}\n{outside.advice()}"
        return (
            f"{self.describe()}\nZeRO stage 3 gathers on every rank or on none. Where ranks run different parts of a "
            "block (experts), mark it before initialize: deepspeed.utils.set_z3_leaf_modules(model, [ItsClass]). Where "
            "they run different numbers of forwards, make these equal, or gather once around all of them: "
            "`with deepspeed.zero.GatheredParameters(model.parameters()):`"
        )

    def describe(self) -> str:
        names = [place.name for place in self.places]
        shown = ", ".join(names[:3]) + (f" ... {names[-1]} ({len(names)} parameters)" if len(names) > 3 else "")
        return f"gather of parameters {shown}"


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of ``shape``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
