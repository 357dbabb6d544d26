"""One reduce-scatter for a list of tensors, each cut evenly over the ranks.

Owns: the interleaved layout of the buffer. Does not own: the transport (`deepspeed.comm.collectives`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed.comm import collectives
from deepspeed.comm.group_facts import Group, facts_of

__all__ = ["reduce_scatter_coalesced"]


@torch.no_grad()
def reduce_scatter_coalesced(tensors: Sequence[torch.Tensor], group: Group | None = None) -> list[torch.Tensor]:
    """Average each of `tensors` over the ranks and keep this rank's piece of each.

    Args:
        tensors: any shapes, one dtype and device, equal shapes on all ranks.
        group: default: all ranks.

    Returns:
        For each tensor its elements [r*c, (r+1)*c) of the flattened average, 1D, where c = ceil(numel / N): the pieces
        of the last ranks may be shorter or empty. They are views of one buffer.
    """
    if not tensors:
        return []
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.dtype is not first.dtype or tensor.device != first.device:
            raise ValueError(
                f"reduce_scatter_coalesced: tensor {index} is {tensor.dtype} on {tensor.device}, tensor 0 is "
                f"{first.dtype} on {first.device}; all must be alike"
            )
    facts = facts_of(group)
    chunks = [-(-tensor.numel() // facts.size) for tensor in tensors]
    per_rank = sum(chunks)
    # Row r holds the pieces of rank r, one tensor after the other; pads are zero.
    rows = torch.zeros(facts.size, per_rank, dtype=first.dtype, device=first.device)
    start = 0
    for tensor, chunk in zip(tensors, chunks, strict=True):
        flat = tensor.reshape(-1)
        for rank in range(facts.size if chunk else 0):
            piece = flat[rank * chunk : (rank + 1) * chunk]
            rows[rank, start : start + piece.numel()].copy_(piece)
        start += chunk
    own = torch.empty(per_rank, dtype=first.dtype, device=first.device)
    collectives.reduce_scatter(own, rows.view(-1), group, average=True, what=f"{len(tensors)} tensors")
    pieces = []
    for tensor, chunk, piece in zip(tensors, chunks, own.split(chunks), strict=True):
        held = max(0, min(chunk, tensor.numel() - facts.rank * chunk))
        pieces.append(piece[:held])
    return pieces
