"""Sharding the parameters of a module that has just been built, and owning them until an engine takes them over.

Each module's own parameters become one block per dtype. Rank 0's values count: it sends every rank its piece, in
chunks, so that beside the module and the shards only a few MiB are needed. There is no copy of the module. Small
modules are still on their way while the next one is built; every use of a shard waits for them first.

Until an engine takes over, the blocks belong to an :class:`InitGatherer`. It keeps nothing gathered for longer than it
must and knows no order of uses. While models are built it may gather whenever it is asked, since every rank runs the
same constructors, and what constructors write to parameters of inner modules again counts as rank 0 has it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from deepspeed.comm.pending import Pending
from deepspeed.runtime.swap_tensor.host_store import HostMemory
from deepspeed.runtime.zero.gather import GatherOptions, ParamGatherer
from deepspeed.runtime.zero.historical_params import attach_whole
from deepspeed.runtime.zero.init_patch import constructing, innermost
from deepspeed.runtime.zero.init_send import Ranks, Values, send_pieces
from deepspeed.runtime.zero.layout import ShardLayout
from deepspeed.runtime.zero.param_block import ParamBlock, Place, contiguous_stride
from deepspeed.runtime.zero.sharded_parameter import block_of, parameter_of

_ALIGN_BYTES = 64
_UNDER_WAY_NBYTES = 8 << 20  # of modules that are being sent while others are built


class InitGatherer(ParamGatherer):
    """Owner of blocks that no engine has taken over yet. Does not keep them alive: their parameters do."""

    def __init__(self, home: HostMemory | None = None) -> None:
        """``home``: where shards live; None: on the device."""
        super().__init__(GatherOptions(max_live=0, max_reuse=0, prefetch=0, overlap=False))
        self.home = home
        self._near: list[weakref.ref[ParamBlock]] = []  # blocks whose shards are still on the device
        self._count = 0
        self._sending: list[Pending] = []
        self._sending_nbytes = 0

    def send(self, sends: Iterable[Pending], nbytes: int) -> None:
        """Start ``sends``, of a module of ``nbytes``; large ones, and all before, have arrived when this returns."""
        if self._sending_nbytes + nbytes > _UNDER_WAY_NBYTES:
            self.finish_sends()
        for pending in sends:
            if nbytes > _UNDER_WAY_NBYTES:
                pending.wait()
            else:
                self._sending.append(pending)
        self._sending_nbytes += nbytes if self._sending else 0

    def finish_sends(self) -> None:
        """Shards hold their values when this returns."""
        sending, self._sending, self._sending_nbytes = self._sending, [], 0
        for pending in sending:
            pending.wait()
        self._move_home()

    def _move_home(self) -> None:
        """Shards on the device that have their values go to where they live."""
        near, self._near = self._near, []
        for reference in near:
            block = reference()
            if block is not None and self.home is not None:
                block.move_shard(self.home)

    def drop_sends(self) -> None:
        """Wait for nothing: an exception passes, and other ranks may never come here."""
        self._sending, self._sending_nbytes = [], 0

    @property
    def built(self) -> int:
        """How many blocks there have been."""
        return self._count

    def next_index(self) -> int:
        """A number for the next block, the same on every rank."""
        self._count += 1
        return self._count - 1

    def add(self, block: ParamBlock) -> None:
        """Take charge of a released block."""
        block.owner = self
        if self.home is not None:
            self._near.append(weakref.ref(block))
        for place in block.places:
            place.param._ds_keeper = block  # type: ignore[attr-defined]

    def forget(self, block: ParamBlock) -> None:
        """``block`` has lost parameters; without any left it holds nothing."""
        if not block.places:
            self.dropped(block)
            block.drop()
        self._current = None

    def may_gather(self) -> bool:
        """Also while models are built: every rank runs the same constructors."""
        return innermost() is not None or super().may_gather()

    def fetching_for(self, use: str, *, by_hand: bool = False) -> contextlib.AbstractContextManager[None]:
        """While models are built, every rank runs the same constructors."""
        return super().fetching_for(use, by_hand=by_hand) if innermost() is None else contextlib.nullcontext()

    def before_write(self) -> bool:
        """Constructors draw their values: gather first, so that rank 0's draw can be spread afterwards."""
        self.finish_sends()
        return constructing()

    def _launch(self, block: ParamBlock, *, exact: bool = False) -> None:
        self.finish_sends()
        super()._launch(block, exact=exact)

    def fetch_buffer(self, block: ParamBlock) -> torch.Tensor:
        """See :meth:`ParamGatherer.fetch_buffer`; there is no order of uses to learn here."""
        self.trace.recorded.clear()
        return super().fetch_buffer(block)

    def fetch_all(self, blocks: Iterable[ParamBlock]) -> None:
        """Make several blocks available at once; what was gathered before is settled first."""
        wanted = list(blocks)
        if innermost() is not None:
            self.settle()
            for block in wanted:
                if block.full is not None and block.pins <= 1:  # the pin of who asks for it now
                    self._release(block)
        super().fetch_all(wanted)

    def copy(self, held: Any, memo: dict[int, Any]) -> Any:
        """``copy.deepcopy`` of a parameter of these blocks, shard by shard. Local."""
        self.finish_sends()
        return copy_sharded(held, memo)

    def _hold(self, block: ParamBlock) -> None:
        if innermost() is None:  # nobody runs the graphs of constructors backward
            super()._hold(block)

    def _release(self, block: ParamBlock, *, drop_edits: bool = False) -> None:
        if block.bound and not drop_edits:
            for position in range(len(block.places)):
                block.take_back(position)  # an edit may have gone by ``param.data``, which no counter sees
            if innermost() is not None:
                spread(block)
            else:
                block.written(set(range(len(block.places))))
        super()._release(block, drop_edits=True)

    def settle(self, *, drop_edits: bool = False) -> None:
        """Release what constructors have used, with rank 0's values of it. Collective, unless edits are dropped."""
        for block in list(self._live.values()):
            if not block.pins:
                block.held = False
                self._release(block, drop_edits=drop_edits)


# ---- from whole to sharded -------------------------------------------------------------------------------------------


def shardable(params: Iterable[nn.Parameter | None]) -> list[nn.Parameter]:
    """Those of ``params`` that have dense values and are in no block yet, each once."""
    unique = {id(param): param for param in params if param is not None}
    return [
        param
        for param in unique.values()
        if not isinstance(param, UninitializedParameter)
        and block_of(param) is None
        and param.layout is torch.strided
        and "_ds_world" not in param.__dict__
    ]


@torch.no_grad()
def shard_module_parameters(
    module: nn.Module, gatherer: InitGatherer, ranks: Ranks, *, dtype: torch.dtype | None, device: torch.device
) -> None:
    """Shard the parameters ``module`` holds itself, with rank 0's values; floating ones in ``dtype``. Collective.

    On one rank they stay whole, unless shards live off the device. Parameters on the meta device are replaced by new
    ones on ``device`` that hold NaN (0 for integers) until they are loaded.
    """
    registered = module.__dict__.get("_parameters") or {}
    fresh = shardable(registered.values())
    if not fresh:
        return
    names = {id(param): f"{type(module).__name__}.{key}" for key, param in registered.items() if param is not None}
    runs: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for param in fresh:
        wanted = dtype if dtype is not None and param.is_floating_point() else param.dtype
        runs.setdefault((wanted, param.is_meta), []).append(param)
    for (wanted, is_meta), run in runs.items():
        listed = [(names[id(param)], param) for param in run]
        if is_meta:
            listed = _off_meta(module, listed, wanted, device)
        if ranks.world == 1 and gatherer.home is None:
            _keep_whole([param for _, param in listed], wanted, device, is_meta)
        else:
            _shard_run(listed, gatherer, ranks, wanted, device, is_meta)


def _off_meta(
    module: nn.Module, run: Sequence[tuple[str, nn.Parameter]], dtype: torch.dtype, device: torch.device
) -> list[tuple[str, nn.Parameter]]:
    """New parameters on ``device`` in the places of meta ones; torch can give these no other data."""
    made = []
    for name, param in run:
        element = torch.zeros((), dtype=dtype, device=device)
        new = nn.Parameter(element.expand(param.shape), requires_grad=param.requires_grad)
        new.__dict__.update(param.__dict__)
        for key, held in list(module._parameters.items()):
            if held is param:
                module._parameters[key] = new
        made.append((name, new))
    return made


def _unset(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0


def _keep_whole(params: list[nn.Parameter], dtype: torch.dtype, device: torch.device, is_meta: bool) -> None:
    for param in params:
        if is_meta:
            param.data = torch.full(param.shape, _unset(dtype), dtype=dtype, device=device)
        elif param.dtype is not dtype or param.device != device:
            param.data = param.data.to(dtype=dtype, device=device)
    attach_whole(params)


def _shard_run(
    run: Sequence[tuple[str, nn.Parameter]],
    gatherer: InitGatherer,
    ranks: Ranks,
    dtype: torch.dtype,
    device: torch.device,
    is_meta: bool,
) -> None:
    align = max(1, _ALIGN_BYTES // dtype.itemsize)
    entries = [(f"{i}:{name}", param.numel()) for i, (name, param) in enumerate(run)]
    layout = ShardLayout.by_block([entries], ranks.world, param_align=align, piece_align=align)
    # All that is known before the model is whole: of many layers alike, which one of those that were sharded.
    number = gatherer.built + 1
    places = [
        Place(
            param,
            f"{name} {tuple(param.shape)} (sharded as number {number})",
            slot.start,
            param.shape,
            contiguous_stride(param.shape),
        )
        for (name, param), slot in zip(run, layout.slots, strict=True)
    ]
    shard = torch.empty(layout.shard_numel, dtype=dtype, device=device)  # padding arrives with the values
    if is_meta:
        shard.fill_(_unset(dtype))
    else:
        source = Values(places, dtype, device) if ranks.rank == 0 else None
        gatherer.send(send_pieces(shard, source, ranks, places), layout.numel * dtype.itemsize)
    _new_block(places, shard, gatherer, ranks)


def _new_block(places: Sequence[Place], shard: torch.Tensor, gatherer: InitGatherer, ranks: Ranks) -> ParamBlock:
    block = ParamBlock(
        places, shard, process_group=ranks.group, rank=ranks.rank, world=ranks.world, index=gatherer.next_index()
    )
    block.hide()
    gatherer.add(block)
    return block


@torch.no_grad()
def spread(block: ParamBlock) -> None:
    """Every rank's shard of a gathered block takes the values that group rank 0 has in its full buffer. Collective."""
    full = block.arrive()
    whole = Place(nn.Parameter(full, requires_grad=False), block.describe(), 0, full.shape, (1,))
    ranks = Ranks(block.process_group, block.rank, block.world)
    source = Values([whole], full.dtype, full.device) if block.rank == 0 else None
    for pending in send_pieces(block.shard, source, ranks, block.places):
        pending.wait()
    block.changed(set(range(len(block.places))))


# ---- conversions of sharded parameters -------------------------------------------------------------------------------


def blocks_of(params: Iterable[nn.Parameter]) -> Iterator[tuple[ParamBlock, list[int]]]:
    """The blocks of those of ``params`` that are sharded, with the positions meant, each once, in order of use."""
    found: dict[int, tuple[ParamBlock, list[int]]] = {}
    for param in params:
        block = block_of(param)
        if block is not None:
            positions = found.setdefault(id(block), (block, []))[1]
            if param._ds_position not in positions:  # type: ignore[attr-defined]
                positions.append(param._ds_position)  # type: ignore[attr-defined]
    yield from found.values()


@torch.no_grad()
def cast_sharded(params: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Give sharded parameters that no engine holds another dtype. Local: every rank casts its own elements."""
    for block, positions in list(blocks_of(params)):
        assert isinstance(block.owner, InitGatherer), "an engine's parameters keep their dtype"
        block.owner.finish_sends()
        block.owner.release([block])
        places = [block.places[i] for i in sorted(positions)]
        classes = [block._classes[i] for i in sorted(positions)]
        # Padding and elements of parameters that stay behind are cast along; nobody reads them there.
        shard = block.shard.to(dtype)
        block.remove([place.param for place in places])
        ranks = Ranks(block.process_group, block.rank, block.world)
        for place, cls in zip(places, classes, strict=True):
            place.param.__class__ = cls
        _new_block(places, shard, block.owner, ranks)


def make_whole(params: Iterable[nn.Parameter]) -> int:
    """Undo the sharding of ``params`` (and of what shares a block with them); how many were sharded. Collective."""
    count = 0
    for block, _ in list(blocks_of(params)):
        count += len(block.places)
        owner = block.owner
        if isinstance(owner, InitGatherer):
            owner.finish_sends()
        block.dissolve(whole=True)
        owner.dropped(block)
    return count


@torch.no_grad()
def copy_sharded(held: Any, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` of a parameter that no engine holds: a copy of its whole block, shard by shard. Local."""
    param = parameter_of(held)
    block: Any = block_of(param)
    places = []
    for place, cls in zip(block.places, block._classes, strict=True):
        with torch._C.DisableTorchFunctionSubclass():
            twin = torch.Tensor._make_subclass(cls, place.param.data, place.param.requires_grad)
        memo[id(place.param)] = twin
        places.append(Place(twin, place.name, place.start, place.shape, place.stride))
    ranks = Ranks(block.process_group, block.rank, block.world)
    _new_block(places, block.shard.clone(), block.owner, ranks)
    return memo[id(param)] if held is param else memo[id(param)].data
