"""``ZeroOptimizer`` wires the five nouns together; there is one for every stage and precision.

    groups     ShardGroup per (optimizer group, dtype, communication dtype), laid out by ShardLayout
    reducer    GradReducer (several ranks) or LocalGrads (one rank)
    watch      BackwardWatch: autograd hooks -> reducer
    publisher  ParamPublisher: all-gather after the step
    stepper    InlineStepper: the boundary, with the Executors beside it

It owns the loss scaler's use, gradient clipping, and the public optimizer methods. Which stage runs is only a
``Placement``; what a boundary is, is the engine's matter.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.precision import PrecisionPolicy
from deepspeed.runtime.swap_tensor.host_store import HostMemory
from deepspeed.runtime.zero import state_dict as zero_state
from deepspeed.runtime.zero.admission import refuse_unsuited
from deepspeed.runtime.zero.diagnose import refuse_unused, report_overflow, tell_unread_gradients
from deepspeed.runtime.zero.executors import Executors
from deepspeed.runtime.zero.fragment_link import unlink_fragments
from deepspeed.runtime.zero.grouping import Grouping, exchange_for_leaves
from deepspeed.runtime.zero.hooks import BackwardWatch
from deepspeed.runtime.zero.local_grads import LocalGrads
from deepspeed.runtime.zero.norm import BoundaryFacts, boundary_facts, clip_coefficient
from deepspeed.runtime.zero.offload_states import StatesAway
from deepspeed.runtime.zero.optimizer_access import OptimizerAccess
from deepspeed.runtime.zero.options import ZeroOptions
from deepspeed.runtime.zero.placement import Placement
from deepspeed.runtime.zero.routes import GradRoute, ShardRanks
from deepspeed.runtime.zero.shard_group import BoundFragment, ShardGroup
from deepspeed.runtime.zero.sharded_module import ShardedModule
from deepspeed.runtime.zero.stepper import InlineStepper, scale_in_place
from deepspeed.runtime.zero.wiring import wire


class _Owner(weakref.ref["ZeroOptimizer"]):
    """Stands on each parameter. A pickled or copied parameter has no owner: this comes back as ``NoneType``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type, (None,)


class ZeroOptimizer(OptimizerAccess, ZeROOptimizer):
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
        self.away = StatesAway()
        self.overflow = False
        self.skip_step = False  # set by clients, on all ranks: the next boundary updates nothing, as on overflow
        self.norm: float | None = None  # of the last boundary: unscaled, global, before clipping
        self.clip_coefficient = 1.0
        self.grad_multiplier = 1.0  # the engine's correction for plain loss.backward() under accumulation
        self.should_reduce: Callable[[], bool] = lambda: True
        self.at_boundary: Callable[[], bool] = lambda: False  # of the backward that begins; False: not known
        self.await_readers: Callable[[], None] = lambda: None  # returns when no thread reads masters and states
        self.on_raw_begin: Callable[[], None] = lambda: None
        self.client_steps: Any = None  # the engine's view of step() and zero_grad() called here
        self.peak_bytes: dict[str, int] = {}
        self._windows_measured = 0
        self._told_unread = False
        self.frozen: list[tuple[int, nn.Parameter]] = []
        self.client_groups = [list(group["params"]) for group in base.param_groups]
        self.host = HostMemory(pin=self.options.offload.pin) if self.options.offload is not None else None
        self.groups: list[ShardGroup] = []
        self.executors = Executors(base, self.groups, self.shards)
        made: list[ShardGroup] = []
        grouping = self._grouping()
        for index, members in enumerate(self.client_groups):
            self.frozen += [(index, param) for param in members if not param.requires_grad]
            made += grouping.groups_for(index, [param for param in members if param.requires_grad])
        if not made:
            raise ValueError(
                "no trainable parameter: every parameter the optimizer holds has requires_grad=False (or it holds "
                "none). Unfreeze some, or call deepspeed.initialize without an optimizer."
            )
        self._adopt(made)
        self._wire()

    # ---- construction ----------------------------------------------------------------------------------------------

    def _grouping(self) -> Grouping:
        order = {key: position for position, key in enumerate(self.names)}
        return Grouping(
            placement=self.placement,
            precision=self.precision,
            options=self.options,
            shards=self.shards,
            world=self.world,
            names=self.names,
            order=order,
            host=self.host,
            sharding=self.sharding,
        )

    def _adopt(self, groups: Sequence[ShardGroup]) -> None:
        """``groups`` join: the base optimizer steps their leaves, and their parameters know their owner."""
        self.groups += groups
        exchange_for_leaves(self.optimizer, self.groups)
        own = _Owner(self)
        for group in self.groups:
            group.before_pull = self.hold_still
            for param in group.params:
                param._ds_zero_owner = own  # type: ignore[attr-defined]

    def _wire(self) -> None:
        made = wire(
            self.groups, self.options, self.placement, self.process_group, self.world, self.sharding, self.grad_route
        )
        self.workspace, self.reducer, self.publisher = made.workspace, made.reducer, made.publisher
        offload = self.options.offload
        self.stepper = InlineStepper(
            self.groups,
            self.optimizer,
            self.workspace,
            self.publisher,
            self.executors,
            split=self.options.elementwise,
            offload_numel=offload.unit_numel if offload is not None else 0,
        )
        if offload is not None:
            self.executors.wire(
                offload,
                self.stepper.units,
                reducer=self.reducer,
                publisher=self.publisher,
                at_boundary=lambda: self.at_boundary(),
                unscale=self.unscale,
            )
        self.watch = BackwardWatch(
            self.reducer,
            should_reduce=self._backward_begins,
            on_raw_begin=lambda: self.on_raw_begin(),
            on_ending=self._backward_ending,
            on_end=self._backward_ended,
            hook_parameters=made.sends
            or any(group.accum_dtype != group.dtype or group.offloaded for group in self.groups),
        )

    def settle_states(self, bounds: Sequence[BoundFragment]) -> None:
        """Base-optimizer states of these fragments, just made or loaded, go where their group keeps them."""
        self.executors.settle_states(bounds)

    def states_loaded(self, *, with_states: bool) -> None:
        """Weights and masters, and with ``with_states`` states, have been loaded on all ranks. Collective."""
        self.executors.states_loaded(self.publisher, with_states=with_states)

    def adopt_unfrozen(self) -> list[str]:
        """Take up parameters of the optimizer's groups that have become trainable; call between windows only.

        Returns their names. Their state starts fresh; everything else keeps its state.
        """
        ready = [(index, param) for index, param in self.frozen if param.requires_grad]
        if not ready:
            return []
        self.frozen = [(index, param) for index, param in self.frozen if not param.requires_grad]
        fresh: list[ShardGroup] = []
        grouping = self._grouping()
        for index in sorted({index for index, _ in ready}):
            fresh += grouping.groups_for(index, [param for i, param in ready if i == index])
        self.watch.remove()
        self._adopt(fresh)
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
        self.executors.begin_backward(self.await_readers)
        return self.should_reduce()

    def hold_still(self) -> None:
        """Masters and states are those of the last step when this returns, and may be written to."""
        self.await_readers()
        self.executors.hold_still()

    def memory_of_states(self) -> frozenset[int]:
        """Addresses of storages that only :meth:`step` and who calls :meth:`hold_still` before write to.

        Masters apart from the weights, and states; not those in files.
        """
        found: set[int] = set()
        for group in self.groups:
            for bound in group.fragments if not group.on_disk else ():
                held = list(self.optimizer.state.get(bound.leaf, {}).values())
                held += [bound.leaf] if not group.aliased else []
                found.update(value.untyped_storage().data_ptr() for value in held if _is_large(value))
        return frozenset(found)

    def _backward_ending(self) -> None:
        if self.sharding is not None:
            self.sharding.gatherer.clear_out()

    def _backward_ended(self) -> None:
        if self.sharding is not None:
            self.sharding.gatherer.end_backward()

    def settle_gradients(self) -> None:
        """What has been sent has landed, and may be written to: nothing has been made of it, nor lands over it."""
        self.executors.roll_back()
        self.reducer.wait()
        self._host_settled()

    def rescale_grads(self, factor: float) -> None:
        """Multiply everything the window holds by ``factor``."""
        self.settle_gradients()
        with torch.no_grad():
            for group in self.groups:
                held = [piece for piece in group.grads if piece is not None]
                held += [param.grad for param in group.params if param.grad is not None]
                held += [buffer for buffer in group.accum if buffer is not None]
                scale_in_place(held, factor)

    # ---- boundary --------------------------------------------------------------------------------------------------

    def reduce_now(self) -> None:
        """Finish this window's reductions so that gradients can be read or changed before ``step``. Collective."""
        self.executors.roll_back()
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
        failure = self.executors.failure
        facts = boundary_facts(self.reducer, self.workspace, want_norm=want, failure=failure)
        if facts.left_overs:
            self.reducer.send_all()
            self._settle_on_host()
            facts = boundary_facts(self.reducer, self.workspace, want_norm=want, failure=failure)
        return facts

    def check_overflow(self, partition_gradients: bool = True, external: bool = False) -> bool:
        """Whether the gradients of this window hold an inf or nan on any rank, before ``step`` finds it. Collective.

        Sets ``overflow`` where the precision checks for it. The arguments are accepted for old callers.
        """
        self.reduce_now()
        self.overflow = self.precision.check_overflow and self._facts().overflow
        return self.overflow

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update from the gradients of this window. Sets ``norm``, ``overflow`` and ``clip_coefficient``.

        On overflow (inf or nan anywhere, when the precision checks for it) nothing is updated and the loss scale is
        lowered. Where :attr:`skip_step` is set nothing is updated either, once, and ``overflow`` is True. Raises
        :class:`UnusedParameters` on all ranks where the options ask for it, and ValueError for a closure: the gradients
        of a window cannot be recomputed here.
        """
        if closure is not None:
            raise ValueError("optimizer.step(closure) is not supported: run forward and backward before step()")
        if self.client_steps is None:
            self.update()
        else:
            self.client_steps.step(self.update)

    def update(self) -> None:
        """:meth:`step` wherever the engine's window stands."""
        self.away.refuse("step")
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "step() under torch.inference_mode(): weights and optimizer states made there can never be trained "
                "again. No weight was changed. Call step() outside of it (torch.no_grad() around it is fine)"
            )
        self._absorb_edits()
        self._reduce_now()
        facts = self._facts()
        self._told_unread = self._told_unread or tell_unread_gradients(self.groups)
        if not self.options.accept_unused:
            refuse_unused(self.groups, facts.touched)
        unscale = self.unscale()
        self.norm = facts.norm * unscale
        non_finite = self.precision.check_overflow and facts.overflow
        self.overflow, self.skip_step = non_finite or self.skip_step, False
        if self.overflow:
            self.executors.roll_back()
        if non_finite:
            scale = self.loss_scale if self.needs_scaler() else None
            report_overflow(self.groups, scale, first_rank=self.rank == 0)
        elif not self.overflow:
            self.clip_coefficient = clip_coefficient(self.norm, self.clip_grad)
            self.stepper.update(facts, unscale * self.clip_coefficient)
        if self.loss_scaler is not None:
            before = self.loss_scale
            self.loss_scaler.update_scale(non_finite)
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

    def clear_window(self) -> None:
        """Forget gradients and start a new window (after a step, a skipped step, or ``zero_grad``)."""
        self.executors.roll_back()
        self.reducer.reset()
        self.watch.new_window()
        for group in self.groups:
            group.drop_grads(keep_pieces=self.placement.reduces_every_backward)
        self.grad_multiplier = 1.0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the window, those already reduced into shards included.

        Right after a :meth:`step` that only counted a micro-step they are kept, as the window goes on.
        """
        if self.client_steps is None or not self.client_steps.keep_window():
            self.clear_window()

    def _measure(self) -> None:
        """Keep the largest bytes seen at the ends of backward and step, over the first windows only (it walks)."""
        if self._windows_measured >= 2:
            return
        for kind, nbytes in self.model_state_bytes().items():
            self.peak_bytes[kind] = max(self.peak_bytes.get(kind, 0), nbytes)

    # ---- life ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's masters, base-optimizer state and loss scaler as a copy; see ``zero/state_dict.py``."""
        self.hold_still()
        placement = self.placement
        stage = int(placement.state_sharded) + int(placement.reduces_every_backward) + int(placement.parameter_sharded)
        return zero_state.memory_state(self, stage)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave. Collective. Raises ValueError under another layout."""
        zero_state.load_shard_state(self, state_dict)

    def destroy(self) -> None:
        """Remove hooks, give parameters their own storage, drop every tensor. Once: the base may have a new owner."""
        if not self.groups:
            return
        self.await_readers()  # page-locked memory would be given back under them
        self.watch.remove()
        self.executors.close()
        for group in self.groups:
            for param in group.params:
                if hasattr(param, "_ds_zero_owner"):
                    del param._ds_zero_owner
                unlink_fragments(param)
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
        self.client_steps = None
        self.await_readers = lambda: None


def _is_large(value: Any) -> bool:
    """A tensor with elements to share out, not a step count or the like."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.layout is torch.strided
