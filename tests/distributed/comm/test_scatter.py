"""Scatter: every rank gets its piece from the source, whatever the dtype, and mistakes of the source are named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.send_pieces import scatter
from tests.harness.pool import on_ranks


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64, torch.bool))
@on_ranks(1, 2, 3)
def test_every_rank_gets_its_piece(dtype: torch.dtype) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for source in range(world):
        pieces = [torch.arange(5).add(10 * r + source).to(dtype) for r in range(world)]
        output = torch.zeros(5, dtype=dtype)
        pending = scatter(output, pieces if rank == source else None, source, None, what="pieces", async_op=True)
        pending.wait()
        assert torch.equal(output, pieces[rank])


@on_ranks(1)
def test_pieces_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"1 pieces of shape \(5,\) and torch.float32"):
        scatter(torch.zeros(5), [torch.zeros(4)], 0, None)
    with pytest.raises(ValueError, match="found"):
        scatter(torch.zeros(5), None, 0, None)
