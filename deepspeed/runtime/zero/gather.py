"""``ParamGatherer``: which blocks of parameters are gathered, when, and when they are let go of.

Sharded parameters are paged: the first use of one (a module's forward hook, a torch function that meets it, autograd
unpacking it in backward) *fetches* its block. Then the policy runs:

    keep      while all gathered elements fit ``max_live``, blocks stay until their values change. Above it the least
              recently used go first, and blocks whose next use is farther than ``max_reuse`` go at once.
    prefetch  the blocks that the last window used next are launched, up to ``prefetch`` elements in flight; above
              ``max_live`` only the very next one: with 0, two blocks at most are gathered at any time.

Invariants:
- Which blocks are fetched, prefetched and released follows from the order of uses and the options alone, so ranks that
  do the same work issue the same collectives. Nothing here looks at this rank's memory or clock.
- Releasing is always safe (see ``param_block.py``), so every decision may be wrong without changing a number.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import _saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]

from deepspeed.comm.holders import held_elsewhere, until_let_go
from deepspeed.runtime.zero.apart import in_transform
from deepspeed.runtime.zero.fetch_trace import NEVER, FetchTrace
from deepspeed.runtime.zero.layout import Segment
from deepspeed.runtime.zero.outside_use import OutsideUse
from deepspeed.runtime.zero.param_block import ParamBlock
from deepspeed.runtime.zero.saved_tensors import give_values_a_status, keep_sharded
from deepspeed.runtime.zero.sharded_parameter import copy_refusal

if TYPE_CHECKING:
    from deepspeed.runtime.zero.shard_group import ShardGroup


_MAX_IN_FLIGHT = 8  # blocks: enough to keep a wire busy, few enough to be looked at in every fetch


@dataclass(frozen=True)
class GatherOptions:
    """Sizes in elements. ``max_live``: gathered at once; ``max_reuse``: distance to the next use above which a block
    is released after use; ``prefetch``: in flight ahead of use (0: no prefetch). ``overlap``: the gathers of blocks
    that stay gathered over a step run under the update of the next ones."""

    max_live: int = 1_000_000_000
    max_reuse: int = 1_000_000_000
    prefetch: int = 50_000_000
    overlap: bool = True


class ParamGatherer:
    """Fetches and releases the blocks added to it."""

    def __init__(self, options: GatherOptions | None = None) -> None:
        give_values_a_status()
        self.options = options or GatherOptions()
        self.blocks: list[ParamBlock] = []
        self.sizes: list[int] = []
        self.trace = FetchTrace(self.sizes)
        self.depth = 0  # forwards of the whole module under way
        self.tracked = 0  # of these, the ones whose graph goes through our saved-tensor hooks
        self.fetches = self.prefetches = 0  # collectives started, for counters
        self._live: OrderedDict[int, ParamBlock] = OrderedDict()  # gathered or in flight, least recently used first
        self._live_numel = 0
        self._current: ParamBlock | None = None
        self._in_flight: list[ParamBlock] = []  # prefetched, as far as not waited for yet
        self._refreshing: list[Any] = []
        self._held_in_backward: list[ParamBlock] = []
        self.outside: OutsideUse | None = None  # the last use since the last step that nothing makes the others do
        self._strays: list[ParamBlock] = []  # released while somebody held a view of their buffer
        # Called in a backward when a block has been used up, with the buffers of those released for the next one.
        self.on_room: Callable[[list[torch.Tensor]], None] | None = None

    def add(self, block: ParamBlock) -> None:
        """Take charge of a released block."""
        block.owner = self
        self.blocks.append(block)
        self.sizes.append(block.numel)

    # ---- uses ------------------------------------------------------------------------------------------------------

    def fetch(self, block: ParamBlock) -> None:
        """Bind the parameters of ``block`` to their values. Collective unless they are here."""
        noted = _saved_tensors_hooks_is_enabled()  # not in torch.func.grad and its like
        if block is self._current and block.bound and (noted or block.held):
            return
        self.fetch_buffer(block)
        block.bind()
        if not (self.tracked and noted) and torch.is_grad_enabled():
            self._hold(block)

    def fetch_many(self, blocks: Sequence[ParamBlock]) -> None:
        """Bind the parameters of all ``blocks``; none of them makes room for another. Collective."""
        if len(blocks) == 1:
            self.fetch(blocks[0])
            return
        with contextlib.ExitStack() as pins:
            for block in blocks:
                pins.enter_context(block.pinned())
            for block in blocks:
                if block.full is None:
                    self._make_room(block)
                    self._launch(block)
                    self.fetches += 1
            for block in blocks:
                self.fetch(block)

    def fetch_buffer(self, block: ParamBlock) -> torch.Tensor:
        """The full buffer of ``block``, for backward; parameters stay as they are. Collective unless it is here."""
        another = block is not self._current
        if another:
            self._current = block
            self.trace.use(block.index)
        if self._strays:
            self._strays = [stray for stray in self._strays if not stray.drop_stray()]
        if another and self.on_room is not None and self._in_backward():
            self.on_room(self._make_room(block))
        if block.full is None:
            self._make_room(block)
            self._launch(block)
            self.fetches += 1
        self._live.move_to_end(block.index)
        landing = block.pending is not None
        full = block.arrive()
        if landing and not self._keeps_everything():
            until_let_go(full)
        self._make_room(block)
        self._prefetch()
        return full

    def _hold(self, block: ParamBlock) -> None:
        """A graph is being built that our saved-tensor hooks do not see: its memory must stay what it is."""
        if not block.held and self._in_backward():
            self._held_in_backward.append(block)  # recomputed and used up inside this backward
        block.held = True

    def fetch_all(self, blocks: Iterable[ParamBlock]) -> None:
        """Make several blocks available at once, whatever they need in memory; pin them first to keep them.

        By hand, so with the shards' very values, also where training gathers packed ones.
        """
        wanted = list(blocks)
        for block in wanted:
            if block.full is None:
                self._launch(block, exact=True)
                self.fetches += 1
        for block in wanted:
            block.make_exact()
            block.bind()

    def may_gather(self) -> bool:
        """Whether a use of a parameter here may be taken for one that every rank makes."""
        return self.in_training() or torch.is_grad_enabled()

    def in_training(self) -> bool:
        """Inside a forward of the module or inside a backward: every rank does the same."""
        return self.depth > 0 or self._in_backward()

    @staticmethod
    def _in_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    def fetching_for(self, use: str, *, by_hand: bool = False) -> contextlib.AbstractContextManager[None]:
        """Around a fetch for ``use``; outside of training that is kept for the error where it hangs."""
        return self._noting(use, by_hand)

    @contextlib.contextmanager
    def _noting(self, use: str, by_hand: bool) -> Iterator[None]:
        noted = OutsideUse.here(use, by_hand=by_hand) if by_hand or not self.in_training() else None
        self.outside = noted or self.outside
        try:
            yield
        finally:
            if noted is not None:
                noted.current = False

    def before_write(self) -> bool:
        """A released parameter is about to be written. True: values may differ between ranks, so gather it first."""
        return False

    def copy(self, held: Any, memo: dict[int, Any]) -> Any:
        """``copy.deepcopy`` of a released parameter, or of its data."""
        raise copy_refusal(held)

    @contextlib.contextmanager
    def forward_scope(self) -> Iterator[None]:
        """Around a forward of the module: parameters may be gathered, and graphs do not keep them gathered."""
        self.depth += 1
        try:
            if torch.is_grad_enabled() and not in_transform():  # transforms refuse saved-tensor hooks
                with self.tracking():
                    yield
            else:
                yield
        finally:
            self.depth -= 1
            if self.depth == 0:
                self._leave()

    def _leave(self) -> None:
        """Out of the module: what may be released before backward is hidden, so that uses outside are noticed."""
        if self._keeps_everything():
            return
        for block in self._live.values():
            if block.bound and not block.pins and not block.held:
                block.conceal()

    def _keeps_everything(self) -> bool:
        """No block is released before its values change, whatever is used."""
        total = sum(self.sizes)
        return total <= self.options.max_live and total <= self.options.max_reuse

    @contextlib.contextmanager
    def tracking(self) -> Iterator[None]:
        """Graphs built inside find sharded parameters again when backward needs them."""
        self.tracked += 1
        try:
            with keep_sharded():
                yield
        finally:
            self.tracked -= 1

    # ---- policy ----------------------------------------------------------------------------------------------------

    def _launch(self, block: ParamBlock, *, exact: bool = False) -> None:
        block.launch(exact=exact)
        self._live[block.index] = block
        self._live_numel += block.numel

    def _make_room(self, needed: ParamBlock | None) -> list[torch.Tensor]:
        """Release what the options do not let stay beside ``needed`` and what is in flight.

        Returns the buffers let go of, as far as nobody else holds them.
        """
        options = self.options
        coming = 0 if needed is None or needed.full is not None else needed.numel
        over = self._live_numel + coming > options.max_live
        spare: list[torch.Tensor] = []
        if not over and options.max_reuse >= self._live_numel:
            return spare
        for block in list(self._live.values()):
            if block is needed or block.pins or block.held or block.persistent or block.pending is not None:
                continue
            if self._live_numel + coming <= options.max_live and self._stays(block):
                continue
            full = block.full
            self._release(block)
            if full is not None and self.on_room is not None and not held_elsewhere(full):
                spare.append(full)
        return spare

    def clear_out(self) -> None:
        """Autograd is done with a backward: what may not stay goes, and the last gradients may use its memory."""
        spare = self._make_room(None)
        if self.on_room is not None:
            self.on_room(spare)

    def _stays(self, block: ParamBlock) -> bool:
        distance = self.trace.distance(block.index)
        return distance == NEVER or distance <= self.options.max_reuse

    def _prefetch(self) -> None:
        room = self.options.prefetch
        if not room:
            return
        self._in_flight = [block for block in self._in_flight if block.pending is not None]
        room -= sum(block.numel for block in self._in_flight)
        for index in self.trace.upcoming():
            if len(self._in_flight) >= _MAX_IN_FLIGHT:
                return
            block = self.blocks[index]
            if not block.places:
                continue  # its parameters have moved to another block since
            if block.full is not None:
                if block.pending is None and block is not self._current:
                    return  # already here: what follows it is its own prefetch's matter
                continue
            crowded = self._live_numel + block.numel > self.options.max_live
            if block.numel > room or (crowded and self._in_flight):
                return  # beyond the limit, one block may be on its way
            room -= block.numel
            self._launch(block)
            self._in_flight.append(block)
            self.prefetches += 1

    def _release(self, block: ParamBlock, *, drop_edits: bool = False) -> None:
        block.release(drop_edits=drop_edits)
        self.dropped(block)
        if block.stray is not None:
            self._strays.append(block)
        if block is self._current:
            self._current = None

    def release(self, blocks: Iterable[ParamBlock], *, drop_edits: bool = False) -> None:
        """Release these blocks, as far as nobody has pinned them and no untracked graph may need them."""
        for block in list(blocks):
            if block.pins or block.full is None:
                continue
            if block.held:
                block.conceal()
            else:
                self._release(block, drop_edits=drop_edits)

    def release_all(self) -> None:
        """Release every block that :meth:`release` may."""
        self.release(self._live.values())

    def dropped(self, block: ParamBlock) -> None:
        """``block`` lets go of its buffer by itself."""
        if self._live.pop(block.index, None) is not None:
            self._live_numel -= block.numel

    @contextlib.contextmanager
    def borrowed(self, block: ParamBlock) -> Iterator[torch.Tensor]:
        """The full buffer of ``block`` for a look between steps. Collective.

        Parameters and the order of uses stay as they are; a buffer that was not there before is let go of afterwards.
        """
        was_here = block.full is not None
        if not was_here:
            self._launch(block, exact=True)
        try:
            block.make_exact()
            yield block.arrive()
        finally:
            if not was_here:
                self._release(block)

    # ---- changes of the values -------------------------------------------------------------------------------------

    def absorb_edits(self) -> None:
        """Shards (and through them masters) take in-place edits of gathered weights."""
        for block in self._live.values():
            block.absorb()

    def publish(self, block: ParamBlock) -> None:
        """The shards of ``block`` have new values. Collective where it is gathered."""
        if block.full is None:
            block.generation += 1
            return
        if block.pending is not None:  # prefetched for nothing: the values are old
            block.arrive()
        pending = block.refresh(async_op=self.options.overlap)
        if self.options.overlap:
            self._refreshing.append(pending)

    def finish_refresh(self) -> None:
        """Wait for gathers that :meth:`publish` has started."""
        pending, self._refreshing = self._refreshing, []
        for one in pending:
            one.wait()

    def forget(self, block: ParamBlock) -> None:
        """``block`` has lost parameters; without any left it holds nothing."""
        if not block.places:
            self.dropped(block)
            block.drop()
            self.sizes[block.index] = 0
            self._current = None

    def end_window(self) -> None:
        """An optimizer step is done: graphs of before are no longer valid, the next window begins."""
        self.trace.end_window()
        self.outside = None
        for block in self._live.values():
            block.held = False
        self._current = None
        if self.depth == 0:
            self._leave()

    def end_backward(self) -> None:
        """A backward is done: what it recomputed outside our hooks is used up."""
        for block in self._held_in_backward:
            block.held = False
        self._held_in_backward.clear()

    # ---- looking ---------------------------------------------------------------------------------------------------

    @property
    def live_numel(self) -> int:
        """Elements gathered or in flight now."""
        return self._live_numel

    def destroy(self, *, whole: bool) -> None:
        """Give every parameter back: whole (collective), or empty."""
        self.finish_refresh()
        self.on_room = None
        for block in self.blocks:
            block.dissolve(whole=whole)
        self.blocks, self._strays, self._live, self._current = [], [], OrderedDict(), None
        self.sizes.clear()
        self._live_numel = 0


class ShardPublisher:
    """What the stepper publishes through when parameters are sharded: only blocks that are gathered move."""

    def __init__(self, gatherer: ParamGatherer) -> None:
        self.gatherer = gatherer

    def publish(self, group: ShardGroup, segment: Segment) -> None:
        self.gatherer.publish(group.blocks[segment.index])

    def wait(self) -> None:
        """All published parameters are in place when this returns."""
        self.gatherer.finish_refresh()
