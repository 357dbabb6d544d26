"""The one definition of the gradient norm, and what every rank must know at a boundary.

Norm = L2 norm of all gradients of all parameters, unscaled (loss scale and gradient sum undone), global (every
element counted once over all ranks), before clipping. It is what ``get_global_grad_norm`` reports in every mode.

One small all-reduce carries everything that ranks must agree on before they update: the sum of squares, which
parameters got a gradient on any rank, gradients that came late, and two check sums of how often each rank has
communicated. So a parameter used on one rank only is updated everywhere, one unused everywhere is skipped everywhere,
and ranks that have drifted apart stop before they touch a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deepspeed.comm import collectives
from deepspeed.native.build import NativeUnavailable
from deepspeed.ops import native_kernels
from deepspeed.runtime.zero.bucket import Workspace
from deepspeed.runtime.zero.local_grads import Reducer
from deepspeed.runtime.zero.rank_failures import raise_everywhere
from deepspeed.runtime.zero.shard_group import ShardGroup

_NORM_PART = 1 << 17  # elements: half a megabyte in fp32, inside the second-level cache
_SMALL_PART = 1 << 13  # elements: up to here a fresh fp32 copy is not worth avoiding
_ROOMY = 8  # parts: in a workspace of so many, one fresh copy more does not count
_HEADER = 4  # sum of squares, left-overs, calls, calls squared


class RanksDiverged(RuntimeError):
    """Ranks reached the same boundary with different histories; nothing has been updated."""


@dataclass(slots=True)
class BoundaryFacts:
    """``norm``: as held (still multiplied by the loss scale); ``touched``: per group, per parameter, any rank."""

    norm: float
    touched: list[bytes]
    left_overs: bool

    @property
    def overflow(self) -> bool:
        return not math.isfinite(self.norm)


def local_grads(group: ShardGroup) -> list[torch.Tensor]:
    """The gradient tensors of ``group`` on this rank (for a shard: whole pieces, padding is zero).

    Reduced replicated gradients are on every rank, whether it had one of its own or not.
    """
    if group.sharded:
        return [piece for piece in group.grads if piece is not None]
    grads: list[torch.Tensor] = []
    for bound in group.fragments:
        grad = group.grad_of(bound)
        if grad is not None and grad.numel():
            grads.append(grad.coalesce().values() if grad.is_sparse else grad)
    return grads


def _parts(grad: torch.Tensor) -> Sequence[torch.Tensor]:
    """``grad`` in parts whose fp32 copies stay in cache: the CPU norm of a 16-bit tensor casts it whole first."""
    if grad.dtype.itemsize >= 4 or grad.numel() <= _NORM_PART or grad.device.type != "cpu":
        return (grad,)
    return grad.reshape(-1).split(_NORM_PART)


def sum_of_squares(groups: Sequence[ShardGroup], workspace: Workspace) -> torch.Tensor | None:
    """Sum of squared gradients in fp32; None when there is no gradient at all.  # 0D

    The bytes of ``workspace`` are written over: no bucket is in flight at a boundary.
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for group in groups:
        for grad in local_grads(group):
            by_device.setdefault(grad.device, []).append(grad)
    if not by_device:
        return None
    sums = [_sum_on_device(grads, workspace) for grads in by_device.values()]
    return sums[0] if len(sums) == 1 else torch.stack([part.cpu() for part in sums]).sum()


def _sum_on_device(grads: list[torch.Tensor], workspace: Workspace) -> torch.Tensor:
    total = _native_sum(grads)
    if total is not None:
        return torch.tensor(total, dtype=torch.float64)
    grads = [part for grad in grads for part in _parts(grad)]
    room = _room_for_casts(grads[0].device, workspace)
    aside = [grad.dtype.itemsize < 4 and _SMALL_PART < grad.numel() <= room for grad in grads]
    direct = [grad for grad, cast in zip(grads, aside, strict=True) if not cast]
    norms = iter(torch._foreach_norm(direct, 2, dtype=torch.float32) if direct else ())
    scratch = workspace.whole(room, torch.float32) if any(aside) else None
    ordered = [
        _norm_of_cast(grad, scratch) if scratch is not None and cast else next(norms)
        for grad, cast in zip(grads, aside, strict=True)
    ]
    return torch.linalg.vector_norm(torch.stack(ordered), 2).double().square()


def _native_sum(grads: list[torch.Tensor]) -> float | None:
    """The sum by our own kernel, which reads 16-bit CPU gradients once and copies nothing; None where it is no gain."""
    if any(grad.dtype.itemsize != 2 for grad in grads) or not native_kernels.all_readable(grads):
        return None
    try:
        return native_kernels.sumsq(grads)[0]
    except NativeUnavailable:
        return None


def _room_for_casts(device: torch.device, workspace: Workspace) -> int:
    """Elements of ``workspace`` that fp32 copies of 16-bit CPU gradients are written to; 0: they get fresh memory.

    A fresh copy of one part is quicker, so the workspace serves only where it is small itself: there the copy would
    be as large as a bucket, and show in the peak.
    """
    room = workspace.capacity(torch.float32)
    on_cpu = device.type == "cpu" == workspace.device.type
    return room if on_cpu and room < _ROOMY * _NORM_PART else 0


def _norm_of_cast(grad: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """The norm of a 16-bit ``grad`` in fp32 (the bits of ``dtype=float32``), with the copy in ``scratch``.  # 0D"""
    return torch.linalg.vector_norm(scratch[: grad.numel()].view(grad.shape).copy_(grad), 2)


@torch.no_grad()
def boundary_facts(
    reducer: Reducer,
    workspace: Workspace,
    *,
    want_norm: bool,
    failure: Callable[[], BaseException | None] | None = None,
) -> BoundaryFacts:
    """What all ranks agree on before an update. Collective over the reducer's group.

    Call it with every bucket landed: ``workspace`` serves as scratch. ``failure``: what has gone wrong beside training
    on this rank, if anything; given on all ranks or on none.

    Raises:
        RanksDiverged: ranks have another number of backward passes.
        RankFailed: ``failure`` has found something on some rank. Both on all ranks alike.
    """
    error = failure() if failure is not None else None
    groups = reducer.groups
    total = sum_of_squares(groups, workspace) if want_norm else None
    if reducer.world == 1:
        if error is not None:
            raise error
        norm = math.sqrt(float(total)) if total is not None else 0.0
        return BoundaryFacts(norm, [bytes(flags) for flags in reducer.touched], reducer.left_overs() > 0)
    sharded = any(group.sharded for group in groups)
    flags = [float(flag) for marks in reducer.touched for flag in marks]
    calls = reducer.launched
    failed = [] if failure is None else [float(error is not None)]
    vector = torch.tensor(
        [0.0, float(reducer.left_overs()), calls, calls * calls, *flags, *failed], dtype=torch.float64
    )
    device = groups[0].device if groups else torch.device("cpu")
    vector = vector.to(device)
    if total is not None:
        # A replicated gradient is the same on every rank, and so are the shards of each replica: every element counts
        # once in the sum.
        vector[0] = total / (reducer.replicas if sharded else reducer.world)
    collectives.all_reduce(vector, reducer.process_group, op="sum", what="gradient norm").wait()
    values = vector.tolist()
    if failed and values[-1]:
        raise_everywhere(error, reducer.process_group)
    squares, left, calls_sum, calls_squared = values[:_HEADER]
    if calls_sum * calls_sum != calls_squared * reducer.world:
        raise RanksDiverged(
            f"ranks have run a different number of backward passes before this optimizer step: this rank reduced "
            f"{calls} gradient buckets, the mean of {reducer.world} ranks is {calls_sum / reducer.world:g}. No weight "
            "was changed. Give every rank the same number of micro-batches (pad or drop the last ones)."
        )
    touched, offset = [], _HEADER
    for marks in reducer.touched:
        touched.append(bytes(1 if value else 0 for value in values[offset : offset + len(marks)]))
        offset += len(marks)
    return BoundaryFacts(math.sqrt(squares) if squares == squares else math.nan, touched, left > 0)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Factor that brings ``norm`` down to ``max_norm``; 1 when it is not above it or clipping is off (0).

    A norm that is nan gives nan, and the 1e-6 is in the denominator, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    if max_norm <= 0:
        return 1.0
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient
