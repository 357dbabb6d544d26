"""Starting what needs no arithmetic of ours: barriers, all-to-alls, and reductions the transport does by itself.

Owns: the choice between a group's channel and its backend for them. Does not own: announcing, counting and waiting
(`collectives.py`, `comm.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm.group_facts import Group, GroupFacts
from deepspeed.comm.pending import What
from deepspeed.comm.same_host import AnyChannel, channel_of
from deepspeed.comm.shm_channel import Channel, fold_of, reduction_code

__all__ = ["piece_bytes", "start_all_to_all", "start_barrier", "start_host_reduction"]


def start_barrier(group: Group | None, facts: GroupFacts, what: What = "", device_ids: list[int] | None = None) -> Any:
    """The work of a barrier; through shared memory where the backend would wait on the host, too."""
    pg: Any = group if group is not None else torch_dist.group.WORLD
    if all(facts.sums_locally(device) for device in pg._device_types):
        channel = channel_of(facts, None, "barrier", what, 0)
        if channel is not None:
            return channel.barrier()
    return pg.barrier() if device_ids is None else torch_dist.barrier(group, async_op=True, device_ids=device_ids)


def start_host_reduction(channel: AnyChannel, tensor: torch.Tensor, op: Any, factor: float | None) -> Any:
    """The work of an all-reduce through shared memory, in place; None when that knows no such dtype or operation."""
    fold = fold_of(op)
    if fold is None or (factor is not None and not tensor.is_floating_point()):
        return None
    code = reduction_code(tensor.dtype, tensor.dtype, fold, False)
    return None if code is None else channel.all_reduce(tensor, code, factor)


def start_all_to_all(
    pg: Any,
    facts: GroupFacts,
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    what: What = "",
) -> Any:
    """The work of an all-to-all of contiguous tensors whose splits count rows of dim 0; None: equal ones."""
    channel = channel_of(facts, input, "all_to_all", what, input.nbytes)
    if channel.__class__ is not Channel:  # across hosts every pair of ranks has bytes of its own: gloo's do
        return pg.alltoall_base(output, input, list(output_splits or ()), list(input_splits or ()))
    sizes = [
        piece_bytes(tensor, splits, facts.size) for tensor, splits in ((output, output_splits), (input, input_splits))
    ]
    return channel.all_to_all(output, input, *sizes)


def piece_bytes(tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """Bytes of each rank's piece of an all-to-all; ValueError when the splits do not fit."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"all_to_all: {rows} rows cannot be split evenly over {size} ranks")
        return [tensor.nbytes // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(f"all_to_all: splits {list(splits)} are not {size} numbers that add up to {rows} rows")
    row_bytes = tensor.nbytes // rows if rows else 0
    return [count * row_bytes for count in splits]
