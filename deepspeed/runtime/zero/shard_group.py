"""The tensors of one run of parameters: model views, gradient shard, master shard, and their fragments.

A :class:`ShardGroup` holds the parameters of one optimizer group that share a dtype and a communication dtype. When
its state is sharded it owns the flat parameter buffer (parameters become views of it, so the all-gather after a step
needs no copy), the gradient shard and, for low-precision parameters, the master shard. When it is replicated it owns
at most the masters. When its parameters are sharded too (stage 3) it keeps only this rank's shard of them, and each
segment of the layout is a ``ParamBlock`` that a gatherer makes whole for a while.

[Note: aliased masters] A parameter whose dtype already is the master dtype is its own master: the optimizer updates
the rank's piece of the flat buffer in place. That saves 4 bytes a parameter and makes user edits of weights take
effect by themselves.

[Note: one leaf per fragment] The base optimizer sees one leaf tensor per fragment, in the parameter's shape when the
rank owns it whole. So torch's own rules hold: a parameter without gradient is skipped (no weight decay, no moment
decay), step counts are per parameter, and any optimizer works on whole tensors where the layout keeps them whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.runtime.swap_tensor.host_store import HOST, HostMemory
from deepspeed.runtime.zero.layout import Fragment, Segment, ShardLayout
from deepspeed.runtime.zero.meta_parameters import is_one_value
from deepspeed.runtime.zero.param_block import ParamBlock, Place, contiguous_stride
from deepspeed.runtime.zero.sharded_parameter import block_of, placeholder

if TYPE_CHECKING:
    from deepspeed.runtime.zero.sharded_module import ShardedModule


@dataclass(slots=True, eq=False)
class BoundFragment:
    """A fragment with the tensors behind it. ``leaf`` is what the base optimizer updates."""

    param: nn.Parameter
    position: int  # of the parameter in ShardGroup.params
    fragment: Fragment
    leaf: nn.Parameter
    model: torch.Tensor  # same elements in the parameter's dtype (shape of leaf); leaf itself when aliased
    segment: int = 0  # index of the segment a shard's fragment lies in

    @property
    def aliased(self) -> bool:
        return self.model.data_ptr() == self.leaf.data_ptr() and self.model.dtype == self.leaf.dtype


@dataclass(eq=False)
class HostGrads:
    """Memory for the reduced gradients of an offloaded group: of sharded ones by segment, else in one run."""

    pieces: list[torch.Tensor | None]
    flat: torch.Tensor | None = None

    def storages(self) -> Iterator[torch.Tensor]:
        yield from (tensor for tensor in (*self.pieces, self.flat) if tensor is not None)


@dataclass(frozen=True)
class GroupSpec:
    """What a group is made of: its optimizer group, parameters in run order, dtypes, and who shares it."""

    group_index: int
    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    order: tuple[int, ...]  # registration order of each parameter, for the order of buckets
    master_dtype: torch.dtype
    accum_dtype: torch.dtype
    comm_dtype: torch.dtype
    rank: int
    world: int  # ranks the state is sharded over; 1 = replicated
    by_rows: bool = False  # replicated embeddings whose gradients travel as touched rows
    host: HostMemory | None = None  # masters, states and reduced gradients live there; None: on the device
    on_disk: bool = False  # masters and states go to files instead (``disk_states.py``)


class ShardGroup:
    """See the module docstring. ``layout`` cuts the run over ``spec.world`` ranks."""

    def __init__(self, spec: GroupSpec, layout: ShardLayout, sharding: ShardedModule | None = None) -> None:
        """``sharding``: who gathers the parameters when they are sharded too; None keeps them whole."""
        self.spec = spec
        self.layout = layout
        self.group_index = spec.group_index
        by_name = dict(zip(spec.names, range(len(spec.names)), strict=True))
        picked = [by_name[slot.name] for slot in layout.slots]
        # Slot order and parameter order are one from here on (by_parameter layouts permute the run).
        self.names = [spec.names[i] for i in picked]
        self.params = [spec.params[i] for i in picked]
        self.order = [spec.order[i] for i in picked]
        self.shapes = [param.shape for param in self.params]
        self.dtype = self.params[0].dtype
        self.device = self.params[0].device
        self.rank, self.world = spec.rank, spec.world
        self.sharded = spec.world > 1 or sharding is not None
        self.master_dtype, self.accum_dtype, self.comm_dtype = spec.master_dtype, spec.accum_dtype, spec.comm_dtype
        self.host = spec.host
        self.offloaded = spec.host is not None
        self.on_disk = spec.on_disk
        self.state_device = HOST if self.offloaded else self.device
        self.aliased = self.master_dtype == self.dtype and not self.offloaded
        self.by_rows = spec.by_rows
        self.before_pull: Callable[[], None] = lambda: None  # called before masters take the weights' values
        # Told of reduced gradients on their way to host memory: a segment's piece, or a parameter's whole gradient.
        self.on_device_grad: Callable[[ShardGroup, int, torch.Tensor], None] | None = None
        # Reduced replicated gradients: in accum dtype where they were sent in it, else in the parameter's.
        self.result_dtype = self.accum_dtype if self.comm_dtype == self.accum_dtype else self.dtype
        self.flat: torch.Tensor | None = None  # 1D, all parameters
        self.shard: torch.Tensor | None = None  # 1D, this rank's part of sharded parameters
        self.model_home: HostMemory | None = None  # where ``shard`` lies; None: on the device
        self.blocks: list[ParamBlock] = []  # of sharded parameters, one per segment
        # The gradient shard in accum dtype, a 1D piece per segment, made when that segment is first reduced: by then
        # the full gradients of its bucket are gone.
        self.grads: list[torch.Tensor | None] = [None] * len(layout.segments)
        self.master: torch.Tensor | None = None  # 1D shard; None when aliased or on disk
        self.accum: list[torch.Tensor | None] = [None] * len(self.params)
        self._host_grads: torch.Tensor | None = None  # 1D, of a replicated group whose states live in host memory
        if sharding is not None:
            self._shard(sharding)
        elif self.sharded:
            self._flatten()
        if not self.aliased and not self.on_disk:  # also on a rank that owns nothing but padding
            self.master = self._state_zeros(layout.shard_numel, self.master_dtype)
        self._starts = [segment.shard_start for segment in layout.segments]
        self.fragments = [self._bind(fragment) for fragment in layout.fragments(self.rank if self.sharded else 0)]
        self.versions = [param._version for param in self.params]
        # Where each parameter's elements belong; None where the optimizer updates the parameter itself.
        kept = self.shard is None and (self.sharded or not self.aliased)
        self.homes = [param.data if kept else None for param in self.params]

    # ---- construction ----------------------------------------------------------------------------------------------

    def _state_zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros where this group's states live.  # 1D"""
        if self.host is not None:
            return self.host.zeros(numel, dtype, self.device)
        return torch.zeros(numel, dtype=dtype, device=self.device)

    @torch.no_grad()
    def _flatten(self) -> None:
        flat = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            view = flat[slot.start : slot.end].view(param.shape)
            view.copy_(param)
            param.data = view
        self.flat = flat

    @torch.no_grad()
    def _shard(self, sharding: ShardedModule) -> None:
        """Keep this rank's elements of every parameter and let go of the rest, block by block."""
        numel = self.layout.shard_numel
        if sharding.host is not None:
            self.shard = sharding.host.zeros(numel, self.dtype, self.device)
        else:
            self.shard = torch.zeros(numel, dtype=self.dtype, device=self.device)
        self.model_home = sharding.host
        for segment in self.layout.segments:
            slots = list(self.layout.slots_in(segment))
            places = []
            # Parameters that are sharded already (zero.Init) are gathered by the blocks they are in now.
            for _, run in groupby(slots, key=lambda item: id(block_of(self.params[item[0]]))):
                together = list(run)
                with sharding.whole_values([self.params[index] for index, *_ in together]) as values:
                    for (index, slot, _, start, _), value in zip(together, values, strict=True):
                        shape = self.shapes[index]
                        places.append(Place(self.params[index], slot.name, start, shape, contiguous_stride(shape)))
                        self._keep(segment, start, value)
            block = sharding.add_block(places, self.shard_piece(segment))
            block.on_write = self._on_write([index for index, *_ in slots])
            self.blocks.append(block)

    def _keep(self, segment: Segment, start: int, value: torch.Tensor) -> None:
        low = max(start, self.rank * segment.piece_numel)
        high = min(start + value.numel(), (self.rank + 1) * segment.piece_numel)
        if high > low:
            target = self.shard_piece(segment).narrow(0, low - self.rank * segment.piece_numel, high - low)
            if is_one_value(value):
                target.fill_(value[(0,) * value.dim()])
            else:
                target.copy_(value.reshape(-1).narrow(0, low - start, high - low))

    def _on_write(self, positions: list[int]) -> Any:
        """Masters follow what the user writes into a block's parameters."""

        def follow(changed: set[int]) -> None:
            self.pull_masters({positions[i] for i in changed})

        return follow

    @torch.no_grad()
    def _bind(self, fragment: Fragment) -> BoundFragment:
        param = self.params[fragment.index]
        whole = fragment.numel == param.numel()
        if not self.sharded and self.aliased:
            return BoundFragment(param, fragment.index, fragment, param, param)
        if self.shard is not None:
            model = self.shard.narrow(0, fragment.shard_start if fragment.numel else 0, fragment.numel)
            model = model.view(self.shapes[fragment.index]) if whole else model
        else:
            # ``.data``, not ``detach()``: our own writes must not look like the user's to ``absorb_edits``.
            model = param.data if whole else param.data.view(-1).narrow(0, fragment.param_start, fragment.numel)
        segment = max(bisect_right(self._starts, fragment.shard_start) - 1, 0)
        if self.aliased:
            return BoundFragment(
                param, fragment.index, fragment, nn.Parameter(model, requires_grad=True), model, segment
            )
        if self.on_disk:
            away = placeholder(model.shape, self.master_dtype, HOST)
            return BoundFragment(param, fragment.index, fragment, nn.Parameter(away), model, segment)
        assert self.master is not None
        held = self.master.narrow(0, fragment.shard_start, fragment.numel)
        if whole:
            held = held.view(param.shape)
        held.copy_(model)
        return BoundFragment(param, fragment.index, fragment, nn.Parameter(held, requires_grad=True), model, segment)

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def model_piece(self, segment: Segment) -> torch.Tensor:
        """This rank's piece of ``segment`` of the parameters, where it lies.  # 1D, piece_numel"""
        if self.shard is not None:
            return self.shard_piece(segment)
        assert self.flat is not None, "a replicated group has no flat buffer"
        return self.flat.narrow(0, segment.start + self.rank * segment.piece_numel, segment.piece_numel)

    def shard_piece(self, segment: Segment) -> torch.Tensor:
        """The part of the parameter shard that is this rank's piece of ``segment``.  # 1D, piece_numel"""
        assert self.shard is not None, "parameters are not sharded"
        return self.shard.narrow(0, segment.shard_start, segment.piece_numel)

    def model_segment(self, segment: Segment) -> torch.Tensor:
        assert self.flat is not None, "a replicated group has no flat buffer"
        return self.flat.narrow(0, segment.start, segment.numel)

    def grad_piece(self, segment: Segment, *, written: bool = False) -> torch.Tensor:
        """This rank's gradient piece of ``segment``, made of zeros on first use.  # 1D, piece_numel, accum dtype

        ``written``: the caller writes all of it, so that zeros would be written for nothing.
        """
        piece = self.grads[segment.index]
        if piece is None:
            if written and not self.offloaded:
                piece = torch.empty(segment.piece_numel, dtype=self.accum_dtype, device=self.device)
            else:
                piece = self._state_zeros(segment.piece_numel, self.accum_dtype)
            self.grads[segment.index] = piece
        return piece

    @torch.no_grad()
    def grad_to_host(self, position: int) -> None:
        """Move what autograd has left in ``param.grad`` to this rank's host memory, added to what is there.

        For replicated groups whose states live in host memory. The sum is made on the device and in the order of the
        backward passes, so it has the bits it would have without offload.
        """
        param, held = self.params[position], self.accum[position]
        if param.grad is None:
            return
        grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
        if held is None:
            self.accum[position] = self._grad_home(position).copy_(grad, non_blocking=True)
        elif self.device.type == "cpu":
            grad = held.add_(grad)
        else:
            grad = held.to(self.device, non_blocking=True).add_(grad)
            held.copy_(grad, non_blocking=True)
        if self.on_device_grad is not None:
            self.on_device_grad(self, position, grad)
        param.grad = None

    @torch.no_grad()
    def grads_to_host(self) -> None:
        """:meth:`grad_to_host` for every parameter, and for gradients that a reduction has left on the device."""
        for position, held in enumerate(self.accum):
            if held is not None and not self._is_home(position, held):
                self.accum[position] = self._grad_home(position).copy_(held, non_blocking=True)
            self.grad_to_host(position)

    def _is_home(self, position: int, held: torch.Tensor) -> bool:
        return self._host_grads is not None and held.data_ptr() == self._grad_home(position).data_ptr()

    def _grad_home(self, position: int) -> torch.Tensor:
        """The host memory of one parameter's gradient, kept from window to window.  # shape of the parameter"""
        assert self.host is not None
        if self._host_grads is None:
            self._host_grads = self.host.zeros(self.layout.shard_numel, self.accum_dtype, self.device)
        slot = self.layout.slots[position]
        home = self._host_grads.narrow(0, slot.start, slot.numel).view(self.shapes[position])
        return home.data  # with a version of its own: writes to other gradients are not writes to this one

    def exchange_host_grads(self, spare: HostGrads | None) -> HostGrads:
        """Give away the memory of this window's gradients; those of the next go to ``spare`` (None: to fresh memory).

        For offloaded groups, when nothing is on its way into it.
        """
        given = HostGrads(self.grads, self._host_grads)
        spare = spare or HostGrads([None] * len(self.layout.segments))
        self.grads, self._host_grads = spare.pieces, spare.flat
        self.accum = [None] * len(self.params)
        return given

    def grad_of(self, bound: BoundFragment) -> torch.Tensor | None:
        """The gradient elements of ``bound`` where they are now, in the leaf's shape; None when there are none."""
        if self.sharded:
            if not self.grads or self.grads[bound.segment] is None:
                return None
            return self.grad_view(bound, self.grad_piece(self.layout.segments[bound.segment]))
        held = self.accum[bound.position]
        return held if held is not None else bound.param.grad

    def grad_view(self, bound: BoundFragment, piece: torch.Tensor) -> torch.Tensor:
        """The elements of ``bound`` in ``piece`` (laid out like its segment's piece), in the leaf's shape."""
        start = bound.fragment.shard_start - self._starts[bound.segment]
        return piece.narrow(0, start if bound.fragment.numel else 0, bound.fragment.numel).view(bound.leaf.shape)

    # ---- master <-> model ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def push_masters(self, fragments: Sequence[BoundFragment] | None = None) -> None:
        """Cast masters into the model's own elements (nothing to do when aliased)."""
        chosen = self.fragments if fragments is None else fragments
        if self.aliased or not chosen:
            return
        models, masters = [bound.model for bound in chosen], [bound.leaf.detach() for bound in chosen]
        torch._foreach_copy_(models, masters, non_blocking=self.offloaded)

    @torch.no_grad()
    def pull_masters(self, positions: set[int] | None = None) -> None:
        """Refresh masters from the model's elements: all of them or those of the parameters at ``positions``."""
        if self.aliased:
            return
        self.before_pull()
        for bound in self.fragments:
            if positions is None or bound.position in positions:
                bound.leaf.detach().copy_(bound.model)

    def absorb_edits(self, position: int | None = None, *, everything: bool = False) -> None:
        """Masters follow weights the user wrote to in place since the last look (all parameters, or one).

        Seen by autograd's version counter, so writes into ``param.data`` go unnoticed: see ``refresh_fp32_params``.
        A tensor put in the place of ``param.data`` is copied into the parameter's own memory.
        ``everything``: shards take gathered weights as they are, changed or not.
        """
        if self.shard is not None:
            for block in self.blocks:
                block.absorb(everything=everything)
            return
        looked = range(len(self.params)) if position is None else (position,)
        changed = {i for i in looked if self.params[i]._version != self.versions[i] or self._is_elsewhere(i)}
        self._bring_home([i for i in changed if self._is_elsewhere(i)])
        for i in changed:
            self.versions[i] = self.params[i]._version
        if changed:
            self.pull_masters(changed)

    def _is_elsewhere(self, position: int) -> bool:
        """Whether ``param.data`` was replaced (assigned, or by ``module.to``), so that updates would not reach it."""
        home = self.homes[position]
        return home is not None and self.params[position].data_ptr() != home.data_ptr()

    @torch.no_grad()
    def _bring_home(self, positions: Sequence[int]) -> None:
        for position in positions:
            param, home = self.params[position], self.homes[position]
            assert home is not None
            if (param.shape, param.dtype, param.device) != (home.shape, home.dtype, home.device):
                raise RuntimeError(
                    f"parameter {self.names[position]!r} was replaced after deepspeed.initialize by {param.dtype} "
                    f"{tuple(param.shape)} on {param.device}; the optimizer holds {home.dtype} {tuple(home.shape)} on "
                    f"{home.device}. Convert or move the model before initialize, or call engine.destroy() first"
                )
            home.copy_(param.data)
            param.data = home

    def forget_edits(self) -> None:
        """Take the weights as they are now for ours (after loading wrote masters and weights)."""
        self.versions = [param._version for param in self.params]

    # ---- life ------------------------------------------------------------------------------------------------------

    def drop_grads(self, *, keep_pieces: bool) -> None:
        """Forget every gradient: on the parameters, in the accumulation buffers and in the shard.

        ``keep_pieces``: the shard's memory stays for the next window (its content counts for nothing).
        """
        if not keep_pieces and not self.offloaded:  # locked host memory costs too much to be made anew
            self.grads = [None] * len(self.layout.segments)
        with torch._C.DisableTorchFunctionSubclass():
            for param in self.params:
                param.grad = None
        self.accum = [None] * len(self.params)
        for bound in self.fragments:
            bound.leaf.grad = None

    def storages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(kind, tensor)`` of everything this group keeps alive.

        Kinds: parameter, gathered, secondary, gradient, master; host: offloaded masters and gradients.
        """
        master, gradient = ("host", "host") if self.offloaded else ("master", "gradient")
        if self.shard is not None:
            yield "parameter" if self.model_home is None else self.model_home.kind, self.shard
            yield from (("gathered", block.full) for block in self.blocks if block.full is not None)
            copies = [block.secondary.piece for block in self.blocks if block.secondary is not None]
            yield from (("secondary", piece) for piece in copies if piece is not None)
        elif self.flat is not None:
            yield "parameter", self.flat
        else:
            yield from (("parameter", param) for param in self.params)
        if self.master is not None:
            yield master, self.master
        yield from ((gradient, piece) for piece in self.grads if piece is not None)
        if self._host_grads is not None:
            yield gradient, self._host_grads
        for param, held in zip(self.params, self.accum, strict=True):
            if held is not None:
                yield gradient, held
            if param.grad is not None:
                yield "gradient", param.grad

    @torch.no_grad()
    def release(self) -> None:
        """Give every parameter its own storage again and drop all flat tensors (blocks: their gatherer does it)."""
        self.drop_grads(keep_pieces=False)
        if self.flat is not None:
            for param in self.params:
                param.data = param.data.clone()
        self.flat = self.shard = self.master = self._host_grads = None
        self.grads = [None] * len(self.layout.segments)
        self.blocks, self.fragments, self.homes = [], [], []
