"""reduce_scatter_coalesced: every rank keeps its piece of each tensor's average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced


def pieces() -> list[list[float]]:
    factor = dist.get_rank() + 1
    tensors = [torch.arange(7.0) * factor, torch.ones(2, 3) * factor, torch.ones(1) * factor, torch.ones(0)]
    with pytest.raises(ValueError, match=r"tensor 1 is torch.float64"):
        reduce_scatter_coalesced([torch.ones(2), torch.ones(2, dtype=torch.float64)])
    assert reduce_scatter_coalesced([]) == []
    return [piece.tolist() for piece in reduce_scatter_coalesced(tensors)]


def test_pieces_of_uneven_tensors(pool: Any) -> None:
    # The ranks' factors 1, 2, 3 average to 2; the values are those of 0.19.8.
    assert pool.run(3, pieces) == [
        [[0.0, 2.0, 4.0], [2.0, 2.0], [2.0], []],
        [[6.0, 8.0, 10.0], [2.0, 2.0], [], []],
        [[12.0], [2.0, 2.0], [], []],
    ]


def test_one_rank_keeps_everything(pool: Any) -> None:
    assert pool.run(1, pieces) == [[[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0] * 6, [1.0], []]]
