"""Workspace, reducer and publisher of an optimizer: which kinds, and how much memory buckets may take.

    one rank that gathers nothing   LocalGrads, no workspace to speak of
    parameters stay released        buckets borrow fresh memory, or go in parts; a scratch buffer serves the boundary
    else                            a kept bucket, two of them where the sending overlaps with backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.zero.bucket import Workspace, part_nbytes
from deepspeed.runtime.zero.gather import ShardPublisher
from deepspeed.runtime.zero.local_grads import LocalGrads, Reducer
from deepspeed.runtime.zero.options import ZeroOptions
from deepspeed.runtime.zero.placement import Placement
from deepspeed.runtime.zero.publish import ParamPublisher, Publisher
from deepspeed.runtime.zero.reduce import GradReducer, ReduceOptions
from deepspeed.runtime.zero.routes import GradRoute
from deepspeed.runtime.zero.shard_group import ShardGroup
from deepspeed.runtime.zero.sharded_module import ShardedModule

_MAX_SCRATCH = 1 << 28  # bytes of fresh memory at the boundary where no whole bucket is kept
_MAX_DOUBLED = 1 << 30  # bytes: larger buckets have one buffer, whose filling waits for the last one to land


@dataclass(frozen=True)
class Wires:
    """What :func:`wire` made. ``sends``: gradients go through collectives."""

    sends: bool
    workspace: Workspace
    reducer: Reducer
    publisher: Publisher


def wire(
    groups: Sequence[ShardGroup],
    options: ZeroOptions,
    placement: Placement,
    process_group: Any,
    world: int,
    sharding: ShardedModule | None,
    grad_route: GradRoute | None,
) -> Wires:
    """Make them for ``groups``, whose gradients are averaged over the ``world`` ranks of ``process_group``."""
    nbytes = max((group.layout.max_segment_numel * group.comm_dtype.itemsize for group in groups), default=0)
    sends = world > 1 or sharding is not None  # one rank that fetches its parameters goes the same way
    buffers = 2 if options.overlap and sends and nbytes <= _MAX_DOUBLED else 1
    lean = sharding is not None and sharding.releases
    in_parts = lean and not options.overlap and (grad_route is None or grad_route.packing is None)
    borrow = lean and not in_parts
    scratch = min(nbytes, _MAX_SCRATCH) if lean else None
    if in_parts:
        every = [(group, segment) for group in groups for segment in group.layout.segments]
        nbytes = max((part_nbytes(segment, group.world, group.comm_dtype) for group, segment in every), default=0)
    workspace = Workspace(nbytes, buffers, groups[0].device, kept=not borrow, scratch=scratch)
    reducer: Reducer = LocalGrads(list(groups))
    if sends:
        reduce_options = ReduceOptions(
            overlap=options.overlap,
            every_backward=placement.reduces_every_backward,
            in_parts=in_parts,
            borrow=borrow,
            pre_divide=options.pre_divide,
            route=grad_route,
        )
        reducer = GradReducer(groups, process_group, world, workspace, reduce_options)
    if sharding is None:
        return Wires(sends, workspace, reducer, ParamPublisher(process_group, overlap=options.overlap))
    sharding.gatherer.on_room = reducer.send_complete if borrow else None
    return Wires(sends, workspace, reducer, ShardPublisher(sharding.gatherer))
