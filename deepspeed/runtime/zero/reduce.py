"""When a gradient bucket goes over the wire, in which order, and where its result lands.

The reducer sees "this parameter's gradient is ready" events and ends of backward. It decides whether a backward
reduces at all (sharded gradients: every backward; replicated ones: the boundary only), launches buckets in one fixed
order on every rank, and lands results in the gradient shard (sharded state) or back in ``param.grad`` (replicated).

Invariants:
- Every rank launches the same buckets in the same order, whatever its model did: a parameter without gradient sends
  zeros. The order is the launch index, never the order of readiness.
- A result is the mean over ranks, added to what the window already holds, so several backward passes per step,
  re-entrant checkpointing and late gradients sum up correctly.
- Gradients of a parameter are freed as soon as its last bucket has been filled.
- Where parameters are released after use, buckets need little memory of their own: ``in_parts`` sends each in parts
  straight from the gradients; ``borrow`` sends it when its block goes (``send_complete``), in that block's memory.
- Where shards have replicas, a backward sums over the ranks of one replica alone; the replicas are added up once, when
  the window is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.comm import collectives
from deepspeed.comm.holders import holders, until_let_go
from deepspeed.comm.sparse import all_reduce_rows
from deepspeed.runtime.zero.bucket import Bucket, Workspace
from deepspeed.runtime.zero.local_grads import accumulate_locally
from deepspeed.runtime.zero.routes import GradRoute, push_on
from deepspeed.runtime.zero.shard_group import ShardGroup
from deepspeed.utils.logging import logger


@dataclass(frozen=True)
class ReduceOptions:
    """``overlap``: start a bucket's collective during backward and keep two in flight. ``every_backward``: gradients
    are sharded. ``in_parts``, ``borrow``: as above, one or none. ``pre_divide``: divide by this before the sum and by
    ``world / pre_divide`` after it. ``route``: how sharded gradients travel; default: exactly, over the reducer's
    group."""

    overlap: bool = False
    every_backward: bool = False
    in_parts: bool = False
    borrow: bool = False
    pre_divide: float = 1.0
    route: GradRoute | None = None


class GradReducer:
    """Reduces the gradients of all ``groups`` over ``process_group`` of ``world`` ranks."""

    def __init__(
        self, groups: Sequence[ShardGroup], process_group: Any, world: int, workspace: Workspace, options: ReduceOptions
    ) -> None:
        self.groups = list(groups)
        self.process_group = process_group
        self.world = world
        self.workspace = workspace
        self.options = options
        self.route = options.route or GradRoute(process_group)
        self.replicas = self.route.replica_count
        self.buckets = self._ordered_buckets()
        self._sharded = any(group.sharded for group in self.groups)
        self.touched = [bytearray(len(group.params)) for group in self.groups]  # in this window, on this rank
        self._buckets_of = self._index_buckets()
        self._ready = [bytearray(len(group.params)) for group in self.groups]  # in this backward
        # One backward's gradients between leaving ``param.grad`` and being sent (sharded) or landed (replicated).
        self._taken: list[dict[int, torch.Tensor | None]] = [{} for _ in self.groups]
        self._made = [bytearray(len(group.params)) for group in self.groups]  # ``param.grad`` exists only by write-back
        self._gone = [bytearray(len(group.params)) for group in self.groups]  # taken in this backward
        self._open = [[0] * len(group.params) for group in self.groups]  # buckets of the parameter not done yet
        self._late = 0  # gradients that came after theirs had been taken
        self._next = 0
        self._in_flight: list[tuple[Bucket, torch.Tensor, Any, int] | None] = [None] * workspace.count
        self.active = False  # the current backward reduces
        self.held_back = False  # gradients have accumulated locally since the last launch
        self.launched = 0  # collectives in this window
        # Told when the gradients of a segment are in the shard, as far as this window's backward passes went.
        self.on_landed: Callable[[ShardGroup, int], None] = lambda group, segment: None
        self._rows_sent = False  # row-wise gradients of this window are reduced (at the boundary only)
        # Parameters without gradient in the last backward are not waited for: one unused layer must not hold up every
        # bucket behind it. Only the moment of a launch depends on this, never the order.
        self._expected: list[bytes] = [b"\1" * len(group.params) for group in self.groups]

    def _ordered_buckets(self) -> list[Bucket]:
        dense = [group for group in self.groups if not group.by_rows]
        buckets = [Bucket(group, segment) for group in dense for segment in group.layout.segments]
        buckets.sort(key=lambda bucket: -bucket.ready_key)
        for index, bucket in enumerate(buckets):
            bucket.index = index
            bucket.loco = self.route.feedback(bucket.dtype) if bucket.group.sharded else None
        return buckets

    def _index_buckets(self) -> list[list[list[Bucket]]]:
        where: dict[int, int] = {id(group): i for i, group in enumerate(self.groups)}
        table: list[list[list[Bucket]]] = [[[] for _ in group.params] for group in self.groups]
        for bucket in self.buckets:
            for position in bucket.positions:
                table[where[id(bucket.group)]][position].append(bucket)
        self._where = where
        return table

    # ---- one backward ----------------------------------------------------------------------------------------------

    def begin_backward(self, *, reduce: bool) -> None:
        """Arm for one backward; ``reduce`` False lets gradients pile up locally (no_sync, inside a window)."""
        self.active = reduce
        if not reduce:
            return
        self.wait()
        self._next = self._late = 0
        for i, group in enumerate(self.groups):
            self._ready[i] = bytearray(len(group.params))
            self._gone[i] = bytearray(len(group.params))
            self._taken[i].clear()
            self._open[i] = [len(buckets) for buckets in self._buckets_of[i]]
        for bucket in self.buckets:
            bucket.arm(self._expected[self._where[id(bucket.group)]])

    def grad_ready(self, group_number: int, position: int) -> None:
        """Autograd has finished this parameter's gradient (called from its post-accumulate hook)."""
        self.touched[group_number][position] = 1
        self._rows_sent = False
        group = self.groups[group_number]
        if not self.active:
            self.held_back = True
            if group.accum_dtype != group.dtype:
                accumulate_locally(group, position)
            return
        if group.accum[position] is not None:
            accumulate_locally(group, position)
        if self._gone[group_number][position]:
            self._late += 1  # its bucket has left without it; the next round sends it
        ready = self._ready[group_number]
        if ready[position]:
            return  # again in the same backward (re-entrant checkpointing)
        ready[position] = 1
        if self._expected[group_number][position]:
            for bucket in self._buckets_of[group_number][position]:
                bucket.missing -= 1
        # Sharded: full gradients leave as soon as they can, which is what bounds memory. Replicated: only to overlap.
        if self.options.overlap or self._sharded:
            self._send_while_complete(wait_for=1 if self.options.borrow else 0)

    def _send_while_complete(self, wait_for: int) -> None:
        """Launch what is complete, less the last ``wait_for`` of the run."""
        buckets = self.buckets
        while self._next + wait_for < len(buckets) and buckets[self._next].missing <= 0:
            if wait_for and buckets[self._next + wait_for].missing > 0:
                return
            self._launch(buckets[self._next])
            self._next += 1

    def send_complete(self, spare: list[torch.Tensor]) -> None:
        """Blocks of parameters have been released: what is complete goes, in the memory of ``spare`` where it can.

        ``spare`` is emptied.
        """
        if self.active:
            self.workspace.lend(spare)
            self._send_while_complete(wait_for=0)
            self.workspace.lend([])

    def end_backward(self) -> None:
        """Send what this backward has not sent yet."""
        if not self.active:
            return
        while self._next < len(self.buckets):
            self._launch(self.buckets[self._next])
            self._next += 1
        self._push_on()
        self.active = self.held_back = False
        self._expected = [bytes(ready) for ready in self._ready]

    def finish(self) -> None:
        """Every gradient of the window is sent and landed when this returns (the boundary calls it).

        Only :meth:`left_overs` can remain; whether any rank has some is for all ranks to agree on first.
        """
        if self.active:
            self.end_backward()
        if self.held_back or not self.launched:
            self.send_all()
        self.wait()
        self._add_replicas()
        if not self._rows_sent:
            self._send_rows()

    def send_all(self) -> None:
        """One round over every bucket outside a backward."""
        expected = self._expected
        self.begin_backward(reduce=True)
        self.end_backward()
        self.wait()
        self._add_replicas()
        self._expected = expected

    def left_overs(self) -> int:
        """Gradients that came after their bucket had gone: re-entrant checkpointing, or a layer back in use."""
        return self._late

    def wait(self) -> None:
        """Land everything in flight."""
        for index in range(len(self._in_flight)):
            self._land(index)

    def reset(self) -> None:
        """Start a new window."""
        self.wait()
        for i, group in enumerate(self.groups):
            self.touched[i] = bytearray(len(group.params))
            self._made[i] = bytearray(len(group.params))
        for bucket in self.buckets:
            bucket.reduced = bucket.complete = False
        self.active = self.held_back = False
        self.launched = self._next = self._late = 0
        self._rows_sent = False

    # ---- one bucket ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _launch(self, bucket: Bucket) -> None:
        index = self.launched % self.workspace.count
        if self.options.overlap:  # before one is waited for: second hops queue up behind what is on the slow link
            self._push_on()
        self._land(index)
        self.launched += 1
        number, group = self._where[id(bucket.group)], bucket.group
        sources = [self._take(number, position) for position in bucket.positions]
        if self.options.in_parts:
            self._send_in_parts(number, bucket, sources)
            return
        straight = group.sharded and self.options.pre_divide == 1.0  # what is sent is not written to
        buffer = bucket.as_it_lies(sources) if straight else None
        if buffer is None:
            buffer = self.workspace.take(index, bucket.segment.numel, bucket.dtype)
            bucket.fill(buffer, sources, remember=self.workspace.kept)
        del sources
        self.workspace.lend([])  # what is left must not stay while this bucket is sent
        held = holders(buffer)
        if self.options.pre_divide != 1.0:
            buffer.mul_(1.0 / self.options.pre_divide)
        if group.sharded:
            self._close(number, bucket)
            pending = self.route.reduce_scatter(
                self._open_piece(bucket), buffer, scale=self.options.pre_divide / self.world,
                accumulate=bucket.reduced, loco=bucket.loco, what=bucket.describe,
                async_op=self.options.overlap, key=bucket.index + 1,
            )  # fmt: skip
        else:
            pending = collectives.all_reduce(
                buffer, self.process_group, op="avg", deterministic=True,
                what=bucket.describe, async_op=self.options.overlap, key=bucket.index + 1,
            )  # fmt: skip
        self._in_flight[index] = (bucket, buffer, pending, held)
        bucket.reduced = True
        if not self.options.overlap:
            self._land(index)

    def _send_in_parts(self, number: int, bucket: Bucket, sources: list[torch.Tensor | None]) -> None:
        """A bucket of sharded gradients, part by part in the one buffer of the workspace."""
        flat = [source if source is None else source.reshape(-1) for source in sources]
        sources.clear()
        self._close(number, bucket)
        piece = self._open_piece(bucket)
        for start, length in bucket.parts():
            part = self.workspace.take(0, bucket.group.world * length, bucket.dtype)
            bucket.fill_part(part, flat, start)
            if self.options.pre_divide != 1.0:
                part.mul_(1.0 / self.options.pre_divide)
            self.route.reduce_scatter(
                piece.narrow(0, start, length), part, scale=self.options.pre_divide / self.world,
                accumulate=bucket.reduced, loco=None, what=bucket.describe, async_op=False, key=bucket.index + 1,
            )  # fmt: skip
        bucket.close_piece()
        bucket.reduced = True
        self.on_landed(bucket.group, bucket.segment.index)

    def _push_on(self) -> None:
        """Start the second hops of what is in flight, in the order of the launches."""
        count = self.workspace.count
        for index in ((self.launched + place) % count for place in range(count)):
            entry = self._in_flight[index]
            if entry is not None:
                push_on(entry[2])

    def _open_piece(self, bucket: Bucket) -> torch.Tensor:
        """Where the result of ``bucket`` lands. A sum over replicas that is there already counts once more below."""
        piece = bucket.open_piece(holds=bucket.reduced)
        if bucket.complete:
            piece.mul_(1.0 / self.replicas)
            bucket.complete = False
        return piece

    @torch.no_grad()
    def _add_replicas(self) -> None:
        """Add up what the replicas of the shards have reduced, each bucket once. Two are on their way at a time."""
        if self.replicas == 1:
            return
        started: list[tuple[Bucket, Any]] = []

        def land() -> None:
            bucket, pending = started.pop(0)
            pending.wait()
            bucket.close_piece()

        for bucket in self.buckets:
            if bucket.complete or not bucket.group.sharded:
                continue
            bucket.complete = True
            if len(started) == 2:
                land()
            piece = bucket.open_piece(holds=True)
            pending = self.route.add_replicas(piece, what=bucket.describe, async_op=True, key=bucket.index + 1)
            started.append((bucket, pending))
        while started:
            land()

    def rescale_feedback(self, factor: float) -> None:
        """The loss scale of the gradients to come is ``factor`` times that of before."""
        for bucket in self.buckets:
            if bucket.loco is not None:
                bucket.loco.rescale(factor)

    def forget_feedback(self) -> None:
        """What packed reductions have lost belongs to weights that are gone."""
        kept = [bucket.loco for bucket in self.buckets if bucket.loco is not None]
        for loco in kept:
            loco.reset()
        if kept:
            logger.info("LoCo error feedback starts from zero: the weights were replaced (checkpoints do not hold it)")

    def _take(self, number: int, position: int) -> torch.Tensor | None:
        """The gradient of a parameter, out of autograd's reach: what comes later is a gradient of its own.

        All buckets of one parameter send the same gradient, whenever each of them leaves.
        """
        taken = self._taken[number]
        if position in taken:
            return taken[position]
        group = self.groups[number]
        if group.accum[position] is not None:
            accumulate_locally(group, position)
        param = group.params[position]
        held = group.accum[position] if group.accum[position] is not None else param.grad
        if held is not None:
            if not self._made[number][position]:
                self.touched[number][position] = 1
            held = held.to_dense() if held.is_sparse else held
        group.accum[position] = param.grad = None
        taken[position] = held
        self._gone[number][position] = 1
        return held

    def _close(self, number: int, bucket: Bucket) -> list[int]:
        """One more bucket of its parameters is done; the positions of those that have no other left."""
        still, done = self._open[number], []
        for position in bucket.positions:
            still[position] -= 1
            if not still[position]:
                done.append(position)
                if bucket.group.sharded:
                    del self._taken[number][position]
        return done

    @torch.no_grad()
    def _send_rows(self) -> None:
        for group in self.groups:
            if not group.by_rows:
                continue
            for name, param in zip(group.names, group.params, strict=True):
                rows, values = touched_rows(param)
                rows, values = all_reduce_rows(
                    rows, values, self.process_group, self.world, what=f"gradient rows of {name}"
                )
                if param.grad is not None and not param.grad.is_sparse:
                    param.grad.zero_().index_add_(0, rows, values)
                else:
                    param.grad = torch.sparse_coo_tensor(
                        rows.unsqueeze(0), values, param.shape, check_invariants=False
                    ).coalesce()
        self._rows_sent = True

    def _land(self, index: int) -> None:
        entry = self._in_flight[index]
        if entry is None:
            return
        self._in_flight[index] = None
        bucket, buffer, pending, held = entry
        pending.wait()
        bucket.close_piece()
        if bucket.group.sharded:
            self.on_landed(bucket.group, bucket.segment.index)
        if not bucket.group.sharded:
            self._write_back(bucket, buffer)
        elif not self.workspace.owns(buffer):
            until_let_go(buffer, held)
            if self.options.borrow and not any(self._in_flight):
                self.route.release_buffers()

    @torch.no_grad()
    def _write_back(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Replicated gradients: every parameter gets the mean, also where this rank had none."""
        if self.options.pre_divide != 1.0:
            buffer.mul_(self.options.pre_divide)
        number, group = self._where[id(bucket.group)], bucket.group
        taken, dtype = self._taken[number], group.result_dtype
        targets = []
        for position in bucket.positions:
            held = taken[position]
            if held is None or held.dtype is not dtype or not held.is_contiguous():
                self._made[number][position] |= held is None
                # Every rank keeps the result in one dtype, or their masters would drift apart.
                held = taken[position] = torch.zeros(group.shapes[position], dtype=dtype, device=group.device)
            targets.append(held)
        bucket.spill(buffer, targets)
        for position in self._close(number, bucket):
            held, param = taken.pop(position), group.params[position]
            assert held is not None
            if dtype is not group.dtype:
                group.accum[position] = held
            elif param.grad is None:
                param.grad = held
            else:
                param.grad.add_(held)  # a late gradient is there already; the next round averages the sum


def touched_rows(param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers and rows of ``param.grad`` (sparse or dense) that are not zero.  # 1D int64; 2D"""
    grad = param.grad
    if grad is None:
        empty = torch.empty(0, dtype=torch.int64, device=param.device)
        return empty, param.new_empty((0, param.shape[1]))
    if grad.is_sparse:
        grad = grad.coalesce()
        return grad.indices()[0], grad.values()
    rows = grad.ne(0).any(dim=1).nonzero().squeeze(1)
    return rows, grad[rows]
