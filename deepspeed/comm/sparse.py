"""Reduction of embedding-style gradients: only the touched rows travel.

A gradient of V rows of which k were touched costs k*(d + 1) elements per rank instead of V*d. Ranks touch different
numbers of rows, so counts are exchanged first and the rows are padded to the largest count.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.comm import collectives
from deepspeed.comm.collectives import What


@torch.no_grad()
def all_reduce_rows(
    rows: torch.Tensor, values: torch.Tensor, group: Any, world: int, *, what: What = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of all ranks, one after the other in rank order, divided by ``world``.

    Args:
        rows: touched row numbers of this rank.  # 1D int64, k elements, may be empty
        values: their gradients.  # 2D, (k, d)

    Returns:
        ``(rows, values)`` of all ranks; a row touched by several ranks occurs several times (their sum is the mean
        gradient).
    """
    if world == 1:
        return rows, values
    counts = torch.zeros(world, dtype=torch.int64, device=rows.device)
    own = torch.tensor([rows.numel()], dtype=torch.int64, device=rows.device)
    collectives.all_gather(counts, own, group, what=what).wait()
    most = int(counts.max())
    if most == 0:
        return rows, values
    width = values.shape[1]
    padded_rows = torch.zeros(most, dtype=torch.int64, device=rows.device)
    padded_rows[: rows.numel()] = rows
    padded = torch.zeros(most * width, dtype=values.dtype, device=rows.device)
    padded[: values.numel()] = values.reshape(-1) / world
    all_rows = torch.empty(world * most, dtype=torch.int64, device=rows.device)
    all_values = torch.empty(world * most * width, dtype=values.dtype, device=rows.device)
    collectives.all_gather(all_rows, padded_rows, group, what=what).wait()
    collectives.all_gather(all_values, padded, group, what=what).wait()
    kept = (torch.arange(most, device=rows.device) < counts.unsqueeze(1)).view(-1)
    return all_rows[kept], all_values.view(world * most, width)[kept]
