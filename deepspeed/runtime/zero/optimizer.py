"""``ZeroOptimizer`` wires the five nouns together; there is one for every stage and precision.

    groups     ShardGroup per (optimizer group, dtype, communication dtype), laid out by ShardLayout
    reducer    GradReducer (several ranks) or LocalGrads (one rank)
    watch      BackwardWatch: autograd hooks -> reducer
    publisher  ParamPublisher: all-gather after the step
    stepper    InlineStepper: the boundary

It owns the loss scaler's use, gradient clipping, and the public optimizer methods. Which stage runs is only a
``Placement``; what a boundary is, is the engine's matter.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.precision import PrecisionPolicy
from deepspeed.runtime.swap_tensor.host_store import HostMemory, is_apart
from deepspeed.runtime.swap_tensor.nvme_store import NvmeStore
from deepspeed.runtime.zero import accounting
from deepspeed.runtime.zero import state_dict as zero_state
from deepspeed.runtime.zero.admission import refuse_unsuited
from deepspeed.runtime.zero.bucket import Workspace, part_nbytes
from deepspeed.runtime.zero.diagnose import first_non_finite, unread_gradients
from deepspeed.runtime.zero.disk_states import DiskStates
from deepspeed.runtime.zero.gather import ShardPublisher
from deepspeed.runtime.zero.hooks import BackwardWatch
from deepspeed.runtime.zero.layout import ShardLayout
from deepspeed.runtime.zero.local_grads import LocalGrads, Reducer
from deepspeed.runtime.zero.norm import BoundaryFacts, boundary_facts, clip_coefficient
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import StatesAway, offload_zero_states, reload_zero_states
from deepspeed.runtime.zero.placement import Placement
from deepspeed.runtime.zero.publish import ParamPublisher, Publisher
from deepspeed.runtime.zero.reduce import GradReducer, ReduceOptions
from deepspeed.runtime.zero.routes import GradRoute, ShardRanks
from deepspeed.runtime.zero.shard_group import BoundFragment, GroupSpec, ShardGroup
from deepspeed.runtime.zero.sharded_module import ShardedModule
from deepspeed.runtime.zero.speculation import Speculation
from deepspeed.runtime.zero.stepper import InlineStepper, scale_in_place
from deepspeed.utils.logging import logger

_ALIGN_BYTES = 64  # parameters and pieces start on cache lines, as torch's own allocations do
_MIN_AUTO_BUCKET = 1 << 20
_MAX_SCRATCH = 1 << 28  # bytes of fresh memory at the boundary where no whole bucket is kept
_MAX_DOUBLED = 1 << 30  # bytes: larger buckets have one buffer, whose filling waits for the last one to land


@dataclass(frozen=True)
class OffloadOptions:
    """Masters, states and reduced gradients live in host memory, and the update runs there.

    ``ratio``: the part of every group's elements that does; the rest stays on the device. ``unit_numel``: at most this
    many elements are updated at a time, while the ones before are on their way back to the device.
    """

    pin: bool = True
    ratio: float = 1.0
    unit_numel: int = 1 << 25
    speculate: bool = False  # update during backward, undo what is clipped or skipped
    # Makes the store that masters and states go to instead, with buffers of so many bytes.
    disk: Callable[[int], NvmeStore] | None = None


@dataclass(frozen=True)
class ZeroOptions:
    """Values that choose among behaviours. ``bucket_numel`` None: a quarter of the model, at least 2**20 elements."""

    bucket_numel: int | None = None
    gather_numel: int | None = None  # at most this many elements per all-gather (and so per bucket)
    accept_unused: bool = True  # parameters without gradient on any rank are skipped, not an error
    overlap: bool = False
    pre_divide: float = 1.0
    sum_gradients: bool = False
    clip: float = 0.0
    compute_norm: bool = True
    elementwise: bool = True
    round_robin: bool = False
    accumulates: bool = False  # more than one backward per step is expected
    by_rows: frozenset[int] = frozenset()  # id() of embeddings whose gradients travel as touched rows
    comm_dtype_of: Callable[[nn.Parameter], torch.dtype | None] = field(default=lambda _: None)
    offload: OffloadOptions | None = None


class _Owner(weakref.ref["ZeroOptimizer"]):
    """Stands on each parameter. A pickled or copied parameter has no owner: this comes back as ``NoneType``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type, (None,)


class UnusedParameters(AssertionError, RuntimeError):
    """``ignore_unused_parameters: false`` and a trainable parameter got no gradient on any rank."""


class ZeroOptimizer(ZeROOptimizer):
    """See the module docstring. ``base`` must hold the model's parameters in its groups; they are replaced by leaves.

    ``names`` maps ``id(parameter)`` to its name, in registration order. ``scaler`` is a loss scaler or None.
    ``sharding`` gathers the parameters where the placement shards them too. Gradients are averaged over
    ``process_group``; ``shards`` are the ranks that states are spread over (default: the same), and ``grad_route`` is
    how sharded gradients travel. Raises ValueError when no parameter in ``base`` is trainable.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        *,
        names: dict[int, str],
        placement: Placement,
        precision: PrecisionPolicy,
        process_group: Any = None,
        rank: int = 0,
        world: int = 1,
        options: ZeroOptions | None = None,
        scaler: Any = None,
        sharding: ShardedModule | None = None,
        shards: ShardRanks | None = None,
        grad_route: GradRoute | None = None,
    ) -> None:
        super().__init__(base)
        refuse_unsuited(base, names, sharded=placement.state_sharded and world > 1)
        self.sharding = sharding
        self.parameter_offload: Any = None  # stage 3's hooks under their historical name
        self.names = names
        self.placement = placement
        self.precision = precision
        self.process_group, self.rank, self.world = process_group, rank, world
        self.shards = shards or ShardRanks(process_group, rank, world)
        self.grad_route = grad_route
        self.options = options or ZeroOptions()
        self.loss_scaler = scaler
        self.clip_grad = self.options.clip
        self.disk_states: DiskStates | None = None
        self.away = StatesAway()
        self.overflow = False
        self.norm: float | None = None  # of the last boundary: unscaled, global, before clipping
        self.clip_coefficient = 1.0
        self.grad_multiplier = 1.0  # the engine's correction for plain loss.backward() under accumulation
        self.should_reduce: Callable[[], bool] = lambda: True
        self.at_boundary: Callable[[], bool] = lambda: False  # of the backward that begins; False: not known
        self.speculation: Speculation | None = None
        self.on_raw_begin: Callable[[], None] = lambda: None
        self.peak_bytes: dict[str, int] = {}
        self._windows_measured = 0
        self._told_unread = False
        self.frozen: list[tuple[int, nn.Parameter]] = []
        self._order = {key: position for position, key in enumerate(names)}
        self.client_groups = [list(group["params"]) for group in base.param_groups]
        self.host = HostMemory(pin=self.options.offload.pin) if self.options.offload is not None else None
        self.groups: list[ShardGroup] = self._build_groups()
        if not self.groups:
            raise ValueError(
                "no trainable parameter: every parameter the optimizer holds has requires_grad=False (or it holds "
                "none). Unfreeze some, or call deepspeed.initialize without an optimizer."
            )
        self._swap_parameters()
        self._wire()

    # ---- construction ----------------------------------------------------------------------------------------------

    def _build_groups(self) -> list[ShardGroup]:
        groups = []
        for index, members in enumerate(self.client_groups):
            trainable = [param for param in members if param.requires_grad]
            self.frozen += [(index, param) for param in members if not param.requires_grad]
            groups += self._groups_for(index, trainable)
        return groups

    def _groups_for(self, index: int, params: Sequence[nn.Parameter]) -> list[ShardGroup]:
        runs: dict[tuple[torch.dtype, torch.dtype, torch.device, bool], list[nn.Parameter]] = {}
        sharded = self.placement.state_sharded
        for param in params:
            rows = not sharded and self.world > 1 and id(param) in self.options.by_rows
            runs.setdefault((param.dtype, self._comm_dtype(param), param.device, rows), []).append(param)
        return [
            self._group(index, part, comm_dtype, rows, host)
            for (_, comm_dtype, device, rows), run in runs.items()
            for part, host in self._homes(run, device)
        ]

    def _homes(
        self, run: list[nn.Parameter], device: torch.device
    ) -> list[tuple[list[nn.Parameter], HostMemory | None]]:
        """``run`` in the parts whose states live on the device and in host memory."""
        offload = self.options.offload
        if offload is None or self.host is None or not (is_apart(device) or offload.disk):
            return [(run, None)]
        stays = (1.0 - offload.ratio) * sum(param.numel() for param in run)
        near: list[nn.Parameter] = []
        for param in run:
            if sum(held.numel() for held in near) + param.numel() > stays:
                break
            near.append(param)
        parts: list[tuple[list[nn.Parameter], HostMemory | None]] = [(near, None), (run[len(near) :], self.host)]
        return [part for part in parts if part[0]]

    def _comm_dtype(self, param: nn.Parameter) -> torch.dtype:
        wanted = self.options.comm_dtype_of(param) or self.precision.comm
        if wanted is not None:
            return wanted
        # What piles up locally in a wider dtype is sent in that dtype; what is sent at once needs no widening.
        local = self.options.accumulates and not self.placement.reduces_every_backward
        return self.precision.accum_dtype(param) if local else param.dtype

    def _group(
        self,
        index: int,
        params: list[nn.Parameter],
        comm_dtype: torch.dtype,
        by_rows: bool,
        host: HostMemory | None,
    ) -> ShardGroup:
        params = sorted(params, key=lambda param: -self._order.get(id(param), 0))  # backward meets the last one first
        world = self.shards.world if self.placement.state_sharded else 1
        if self.options.round_robin and world > 1:
            params = [params[i] for first in range(world) for i in range(first, len(params), world)]
        blocks = self.sharding.cut(params) if self.sharding is not None else [params]
        params = [param for block in blocks for param in block]
        spec = GroupSpec(
            group_index=index,
            names=tuple(self.names.get(id(param), f"group{index}.param{i}") for i, param in enumerate(params)),
            params=tuple(params),
            order=tuple(self._order.get(id(param), 0) for param in params),
            master_dtype=self.precision.master_dtype(params[0]),
            accum_dtype=self.precision.accum_dtype(params[0]),
            comm_dtype=comm_dtype,
            rank=self.shards.rank if world > 1 else 0,
            world=world,
            by_rows=by_rows,
            host=host,
            on_disk=host is not None and self.options.offload is not None and self.options.offload.disk is not None,
        )
        return ShardGroup(spec, self._layout(spec, [len(block) for block in blocks]), self.sharding)

    def _layout(self, spec: GroupSpec, block_lengths: Sequence[int]) -> ShardLayout:
        """Where the group's elements live. Optimizers that look at whole matrices get whole parameters."""
        run = [(name, param.numel()) for name, param in zip(spec.names, spec.params, strict=True)]
        itemsize = spec.params[0].element_size()
        align = self.sharding.align(itemsize) if self.sharding is not None else max(1, _ALIGN_BYTES // itemsize)
        whole = not self.options.elementwise and spec.world > 1
        if self.sharding is not None and not whole:
            parts = iter(run)
            blocks = [[next(parts) for _ in range(length)] for length in block_lengths]
            return ShardLayout.by_block(blocks, spec.world, param_align=align, piece_align=align)
        build = ShardLayout.by_parameter if whole else ShardLayout.by_element
        limit = self._segment_numel(sum(numel for _, numel in run))
        return build(run, spec.world, segment_numel=limit, param_align=align, piece_align=align)

    def _segment_numel(self, total: int) -> int:
        """Elements per bucket of a group of ``total``; a bucket is also what one all-gather publishes."""
        wanted = self.options.bucket_numel or max(_MIN_AUTO_BUCKET, -(-total // 4))
        gather = self.options.gather_numel if self.placement.state_sharded else None
        return min(wanted, gather) if gather else wanted

    def _swap_parameters(self) -> None:
        """Put the leaves where the model's parameters were, in registration order, and carry existing state over."""
        leaves: dict[int, list[tuple[int, nn.Parameter]]] = {}
        for group in self.groups:
            for bound in group.fragments:
                leaves.setdefault(group.group_index, []).append((group.order[bound.position], bound.leaf))
        for index, base_group in enumerate(self.optimizer.param_groups):
            ordered = sorted(leaves.get(index, []), key=lambda item: item[0])
            base_group["params"] = [leaf for _, leaf in ordered]
        for group in self.groups:
            for bound in group.fragments:
                if bound.param is not bound.leaf and bound.param in self.optimizer.state:
                    self._carry_state(bound)
        held = {id(leaf) for base_group in self.optimizer.param_groups for leaf in base_group["params"]}
        for param in [param for param in self.optimizer.state if id(param) not in held]:
            del self.optimizer.state[param]
        own = _Owner(self)
        for group in self.groups:
            for param in group.params:
                param._ds_zero_owner = own  # type: ignore[attr-defined]

    def _carry_state(self, bound: BoundFragment) -> None:
        fragment, carried = bound.fragment, {}
        for key, value in self.optimizer.state[bound.param].items():
            if isinstance(value, torch.Tensor) and value.shape == bound.param.shape and value.dim():
                piece = value.reshape(-1).narrow(0, fragment.param_start, fragment.numel)
                carried[key] = piece.to(bound.leaf.device, copy=True).view(bound.leaf.shape)
            else:
                carried[key] = value.clone() if isinstance(value, torch.Tensor) else value
        self.optimizer.state[bound.leaf] = carried

    def _wire(self) -> None:
        device = self.groups[0].device
        nbytes = max(
            (bucket_numel * group.comm_dtype.itemsize
             for group in self.groups
             for bucket_numel in [group.layout.max_segment_numel]),
            default=0,
        )  # fmt: skip
        sends = self.world > 1 or self.sharding is not None  # one rank that fetches its parameters goes the same way
        two = self.options.overlap and sends and nbytes <= _MAX_DOUBLED
        lean = self.sharding is not None and self.sharding.releases
        in_parts = lean and not self.options.overlap and (self.grad_route is None or self.grad_route.packing is None)
        borrow = lean and not in_parts
        scratch = min(nbytes, _MAX_SCRATCH) if lean else None
        if in_parts:
            every = [(group, segment) for group in self.groups for segment in group.layout.segments]
            nbytes = max((part_nbytes(segment, group.world, group.comm_dtype) for group, segment in every), default=0)
        self.workspace = Workspace(nbytes, 2 if two else 1, device, kept=not borrow, scratch=scratch)
        self.reducer: Reducer
        if sends:
            self.reducer = GradReducer(
                self.groups, self.process_group, self.world, self.workspace,
                ReduceOptions(
                    overlap=self.options.overlap,
                    every_backward=self.placement.reduces_every_backward,
                    in_parts=in_parts,
                    borrow=borrow,
                    pre_divide=self.options.pre_divide,
                    route=self.grad_route,
                ),
            )  # fmt: skip
        else:
            self.reducer = LocalGrads(self.groups)
        self.publisher: Publisher
        if self.sharding is not None:
            self.publisher = ShardPublisher(self.sharding.gatherer)
            self.sharding.gatherer.on_room = self.reducer.send_complete if borrow else None
        else:
            self.publisher = ParamPublisher(self.process_group, overlap=self.options.overlap)
        self.stepper = InlineStepper(
            self.groups,
            self.optimizer,
            self.workspace,
            self.publisher,
            split=self.options.elementwise,
            offload_numel=self.options.offload.unit_numel if self.options.offload is not None else 0,
        )
        offload = self.options.offload
        if offload is not None and offload.disk is not None:
            sizes = [unit.numel * unit.group.master_dtype.itemsize for unit in self.stepper.units]
            store = offload.disk(max(sizes, default=1))
            self.disk_states = DiskStates(store, self.optimizer, self.stepper.units, self.disk_states)
            self.stepper.disk = self.disk_states
        if offload is not None and offload.speculate and self.reducer.replicas == 1:
            if self.speculation is not None:
                self.speculation.close()
            self.speculation = self.stepper.speculation = Speculation(
                self.optimizer, self.stepper.units, at_boundary=lambda: self.at_boundary(), unscale=self.unscale
            )
            self.reducer.on_landed = self.speculation.landed
            for group in self.groups:
                group.before_pull = self.undo_speculation
        self.watch = BackwardWatch(
            self.reducer,
            should_reduce=self._backward_begins,
            on_raw_begin=lambda: self.on_raw_begin(),
            on_ending=self._backward_ending,
            on_end=self._backward_ended,
            hook_parameters=sends
            or any(group.accum_dtype != group.dtype or group.offloaded for group in self.groups),
        )

    def settle_states(self, bounds: Sequence[BoundFragment]) -> None:
        """Base-optimizer states of these fragments, just made or loaded, go where their group keeps them."""
        if self.disk_states is not None:
            self.disk_states.settle(bounds)

    def adopt_unfrozen(self) -> list[str]:
        """Take up parameters of the optimizer's groups that have become trainable; call between windows only.

        Returns their names. Their state starts fresh; everything else keeps its state.
        """
        ready = [(index, param) for index, param in self.frozen if param.requires_grad]
        if not ready:
            return []
        self.frozen = [(index, param) for index, param in self.frozen if not param.requires_grad]
        fresh: list[ShardGroup] = []
        for index in sorted({index for index, _ in ready}):
            fresh += self._groups_for(index, [param for i, param in ready if i == index])
        self.watch.remove()
        self.groups += fresh
        self._swap_parameters()
        self._wire()
        if self.sharding is not None:
            self.sharding.install_hooks()
        return [self.names.get(id(param), "?") for _, param in ready]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's: one more group. Its trainable parameters join at the first forward of the next window."""
        self.optimizer.add_param_group(param_group)
        added = self.optimizer.param_groups[-1]
        refuse_unsuited(self.optimizer, self.names, sharded=self.placement.state_sharded and self.world > 1)
        members, index = list(added["params"]), len(self.client_groups)
        added["params"] = []
        self.client_groups.append(members)
        self.frozen += [(index, param) for param in members]

    # ---- backward --------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        return float(self.loss_scaler.loss_scale) if self.loss_scaler is not None else 1.0

    cur_scale = loss_scale

    def scale_if_loss(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` times the loss scale (fp32 product, as a half loss would overflow)."""
        return value.float() * self.loss_scale if self.needs_scaler() else value

    def needs_scaler(self) -> bool:
        return self.loss_scaler is not None and self.precision.fp16_scaling

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backward of ``loss`` (already divided for accumulation); gradients go where the placement says."""
        self._refuse_if_destroyed()
        self.away.refuse("backward")
        self.watch.begin_managed()
        try:
            with self.sharding.gatherer.tracking() if self.sharding is not None else contextlib.nullcontext():
                self.scale_if_loss(loss).backward(retain_graph=retain_graph)
        except BaseException:
            self.watch.abort()
            raise
        self.watch.end_managed()
        self._measure()

    def _backward_begins(self) -> bool:
        if self.speculation is not None:
            self.speculation.begin()
        return self.should_reduce()

    def undo_speculation(self) -> None:
        """Masters and states are those of the last step when this returns."""
        if self.speculation is not None:
            self.speculation.roll_back()

    def _backward_ending(self) -> None:
        if self.sharding is not None:
            self.sharding.gatherer.clear_out()

    def _backward_ended(self) -> None:
        if self.sharding is not None:
            self.sharding.gatherer.end_backward()

    def rescale_grads(self, factor: float) -> None:
        """Multiply everything the window holds by ``factor``."""
        self.undo_speculation()
        self.reducer.wait()
        self._host_settled()  # or what is still on its way would land over the product
        with torch.no_grad():
            for group in self.groups:
                held = [piece for piece in group.grads if piece is not None]
                held += [param.grad for param in group.params if param.grad is not None]
                held += [buffer for buffer in group.accum if buffer is not None]
                scale_in_place(held, factor)

    # ---- boundary --------------------------------------------------------------------------------------------------

    def reduce_now(self) -> None:
        """Finish this window's reductions so that gradients can be read or changed before ``step``. Collective."""
        self.undo_speculation()
        self._reduce_now()

    def _reduce_now(self) -> None:
        self.reducer.finish()
        self._settle_on_host()

    def _settle_on_host(self) -> None:
        """Offloaded gradients are in host memory, all of them, and may be read."""
        for group in self.groups:
            if group.offloaded and not group.sharded:
                group.grads_to_host()
        self._host_settled()

    def _host_settled(self) -> None:
        """Copies between the device and the host memory of offloaded gradients have ended."""
        if any(group.offloaded for group in self.groups) and not get_accelerator().is_synchronized_device():
            get_accelerator().current_stream().synchronize()

    def unscale(self) -> float:
        """Factor from the gradients as held to the true ones (loss scale, accumulation, mean or sum)."""
        multiplier = self.grad_multiplier * (self.world if self.options.sum_gradients else 1.0)
        return multiplier / (self.loss_scale if self.needs_scaler() else 1.0)

    def expect_gradient(self, param: nn.Parameter) -> None:
        """Someone is about to write ``param``'s gradient: make room and count it as touched on this rank."""
        group, position = self.find(param)
        if group.sharded:
            for bound in self.bound_to(param):
                group.grad_piece(group.layout.segments[bound.segment])
        elif group.grad_of(group.fragments[self._fragment_index(group, position)]) is None:
            param.grad = torch.zeros_like(param)
        self.reducer.touched[self.groups.index(group)][position] = 1

    def _fragment_index(self, group: ShardGroup, position: int) -> int:
        return next(i for i, bound in enumerate(group.fragments) if bound.position == position)

    def _facts(self) -> BoundaryFacts:
        want = self.options.compute_norm or self.clip_grad > 0 or self.precision.check_overflow
        facts = boundary_facts(self.reducer, self.workspace, want_norm=want)
        if facts.left_overs:
            self.reducer.send_all()
            self._settle_on_host()
            facts = boundary_facts(self.reducer, self.workspace, want_norm=want)
        return facts

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update from the gradients of this window. Sets ``norm``, ``overflow`` and ``clip_coefficient``.

        On overflow (inf or nan anywhere, when the precision checks for it) nothing is updated and the loss scale is
        lowered. Raises :class:`UnusedParameters` on all ranks where the options ask for it, and ValueError for a
        closure: the gradients of a window cannot be recomputed here.
        """
        if closure is not None:
            raise ValueError("optimizer.step(closure) is not supported: run forward and backward before step()")
        self.away.refuse("step")
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "step() under torch.inference_mode(): weights and optimizer states made there can never be trained "
                "again. No weight was changed. Call step() outside of it (torch.no_grad() around it is fine)"
            )
        self._absorb_edits()
        self._reduce_now()
        facts = self._facts()
        self._name_unread_gradients()
        if not self.options.accept_unused:
            self._refuse_unused(facts)
        unscale = self.unscale()
        self.norm = facts.norm * unscale
        self.overflow = self.precision.check_overflow and facts.overflow
        if self.overflow:
            self.undo_speculation()
            self._report_overflow(facts)
        else:
            self.clip_coefficient = clip_coefficient(self.norm, self.clip_grad)
            self.stepper.update(facts, unscale * self.clip_coefficient)
        if self.loss_scaler is not None:
            before = self.loss_scale
            self.loss_scaler.update_scale(self.overflow)
            if self.loss_scale != before:
                self.reducer.rescale_feedback(self.loss_scale / before)
        self.clear_window()
        if self.sharding is not None:
            self.sharding.gatherer.end_window()
        self._measure()
        self._windows_measured += 1

    def _refuse_if_destroyed(self) -> None:
        if not self.groups:
            raise RuntimeError(
                "this optimizer has been destroyed: by engine.destroy(), or because a later deepspeed.initialize took "
                "its parameters. Train with the later engine"
            )

    def _name_unread_gradients(self) -> None:
        unread = [] if self._told_unread else unread_gradients(self.groups)
        if unread:
            self._told_unread = True
            logger.warning(
                f"gradients written to param.grad after backward are not used, the reduced ones lie in shards: "
                f"{', '.join(unread[:8])}. Use deepspeed.utils.safe_set_full_grad, or gradient_clipping to clip"
            )

    def _refuse_unused(self, facts: BoundaryFacts) -> None:
        unused = [
            name
            for group, flags in zip(self.groups, facts.touched, strict=True)
            for name, flag in zip(group.names, flags, strict=True)
            if not flag
        ]
        if unused:
            shown = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
            raise UnusedParameters(
                f"{len(unused)} trainable parameters got no gradient on any rank in this window: {shown}. No weight "
                "was changed. Use them in forward, freeze them (requires_grad=False), or set "
                "zero_optimization.ignore_unused_parameters to true"
            )

    def _report_overflow(self, facts: BoundaryFacts) -> None:
        where = first_non_finite(self.groups)
        found = f"first seen here in {where}" if where else "seen on another rank"
        scale = f" at loss scale {self.loss_scale:g}" if self.needs_scaler() else ""
        if where or self.rank == 0:
            # Lowering the loss scale is at work in fp16; elsewhere nothing will mend it by itself.
            log = logger.info if scale else logger.warning
            log(f"gradient overflow{scale}: step skipped, {found}")

    def clear_window(self) -> None:
        """Forget gradients and start a new window (after a step, a skipped step, or ``zero_grad``)."""
        self.undo_speculation()
        self.reducer.reset()
        self.watch.new_window()
        for group in self.groups:
            group.drop_grads(keep_pieces=self.placement.reduces_every_backward)
        self.grad_multiplier = 1.0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the window, those already reduced into shards included."""
        self.clear_window()

    # ---- looking at parameters -------------------------------------------------------------------------------------

    def find(self, param: nn.Parameter) -> tuple[ShardGroup, int]:
        """``(group, position)`` of ``param``. Raises KeyError naming it when this optimizer does not hold it."""
        for group in self.groups:
            for position, held in enumerate(group.params):
                if held is param:
                    return group, position
        raise KeyError(
            f"parameter {self.names.get(id(param), '?')!r} is not held by this optimizer (frozen or foreign)"
        )

    def bound_to(self, param: nn.Parameter) -> list[BoundFragment]:
        """This rank's fragments of ``param`` (empty when other ranks own all of it)."""
        group, position = self.find(param)
        return [bound for bound in group.fragments if bound.position == position]

    def refresh_fp32_params(self) -> None:
        """Masters take the model's current weights (after weights were written behind the optimizer's back)."""
        for group in self.groups:
            group.absorb_edits(everything=True)
            group.pull_masters()

    def absorb_edits(self) -> None:
        """Masters follow weights written in place; called before anything reads or updates masters."""
        self.undo_speculation()
        self._absorb_edits()

    def _absorb_edits(self) -> None:
        self._refuse_if_destroyed()
        for group in self.groups:
            group.absorb_edits()

    def publish_masters(self) -> None:
        """The model takes the masters' values, on every rank (after masters were written). Collective."""
        self.reducer.forget_feedback()
        for group in self.groups:
            if not group.sharded:
                group.push_masters()
                continue
            if group.on_disk:
                group.push_masters()
            for segment in group.layout.segments:
                if group.master is not None:
                    piece = group.master.narrow(0, segment.shard_start, segment.piece_numel)
                    group.model_piece(segment).copy_(piece)
                self.publisher.publish(group, segment)
        self.publisher.wait()

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """See :func:`offload_states.offload_zero_states`."""
        offload_zero_states(self, include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """See :func:`offload_states.reload_zero_states`."""
        reload_zero_states(self, non_blocking)

    # ---- accounting ------------------------------------------------------------------------------------------------

    def model_state_bytes(self) -> dict[str, int]:
        """See :func:`accounting.held_bytes`."""
        return accounting.held_bytes(self)

    def expected_state_bytes(self) -> dict[str, int]:
        """See :func:`accounting.expected_bytes`."""
        return accounting.expected_bytes(self)

    def _measure(self) -> None:
        """Keep the largest bytes seen at the ends of backward and step, over the first windows only (it walks)."""
        if self._windows_measured >= 2:
            return
        for kind, nbytes in self.model_state_bytes().items():
            self.peak_bytes[kind] = max(self.peak_bytes.get(kind, 0), nbytes)

    # ---- life ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's masters, base-optimizer state and loss scaler as a copy; see ``zero/state_dict.py``."""
        self.undo_speculation()
        placement = self.placement
        stage = int(placement.state_sharded) + int(placement.reduces_every_backward) + int(placement.parameter_sharded)
        return zero_state.shard_state(self, stage, zero_state.join_in_memory)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave. Collective. Raises ValueError under another layout."""
        zero_state.load_shard_state(self, state_dict)

    def destroy(self) -> None:
        """Remove hooks, give parameters their own storage, drop every tensor. Once: the base may have a new owner."""
        if not self.groups:
            return
        self.watch.remove()
        if self.speculation is not None:
            self.speculation.close()
        if self.disk_states is not None:
            self.disk_states.close()
        for group in self.groups:
            for param in group.params:
                if hasattr(param, "_ds_zero_owner"):
                    del param._ds_zero_owner
            group.release()
        if self.sharding is not None:
            self.sharding.gatherer.on_room = None
        for base_group, members in zip(self.optimizer.param_groups, self.client_groups, strict=False):
            base_group["params"] = members
        self.optimizer.state.clear()
        self.groups = []
        self.sharding = None  # the engine's, which gives the parameters back
        self.reducer = LocalGrads([])
        self.should_reduce, self.on_raw_begin = (lambda: True), (lambda: None)
