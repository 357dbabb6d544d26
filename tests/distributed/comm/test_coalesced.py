"""Reduce-scatters of lists of tensors: every rank keeps its piece of each tensor's average."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.runtime.comm.coalesced_collectives import (
    all_to_all_loco_quant_reduce,
    all_to_all_quant_reduce,
    reduce_scatter_coalesced,
)
from deepspeed.utils import groups


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


def packed(loco: bool) -> tuple[list[list[int]], float, float, str]:
    before, os.environ["LOCAL_WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"], "2"
    pair = groups._get_local_all_to_all_group()
    os.environ["LOCAL_WORLD_SIZE"] = before
    rank = dist.get_rank()
    matrices = [torch.randn(12, 40, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    right = (torch.stack(matrices).mean(0)).view(-1).chunk(4)[rank]
    tensors = [matrices[rank], torch.full((7,), float(rank)), torch.full((3, 3), float(rank))]
    if not loco:
        pieces = all_to_all_quant_reduce(tensors, pair)
    else:
        params = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
        for param, tensor in zip(params, tensors, strict=True):
            param.grad = tensor
        rounds = [all_to_all_loco_quant_reduce(params, pair, {"err_beta": 0.5, "reset_T": 100}) for _ in range(30)]
        pieces = [sum(one[i] for one in rounds) / len(rounds) for i in range(3)]
        with pytest.raises(ValueError, match=r"parameter 0 of shape \(2,\) has no grad"):
            all_to_all_loco_quant_reduce([torch.nn.Parameter(torch.zeros(2))], pair)
    with pytest.raises(ValueError, match=r"named local_\*, found 0") as caught:
        all_to_all_quant_reduce([], {"global_0": dist.group.WORLD})
    shapes = [list(piece.shape) for piece in pieces]
    exact = max((piece - 1.5).abs().max().item() for piece in pieces[1:] if piece.numel())
    return shapes, (pieces[0] - right).abs().max().item(), exact, str(caught.value)


@pytest.mark.parametrize(("loco", "bound"), ((False, 0.5), (True, 0.05)))
def test_packed_averages_keep_each_ranks_piece(pool: Any, loco: bool, bound: float) -> None:
    for rank, (shapes, error, exact, text) in enumerate(pool.run(4, packed, loco)):
        assert shapes == [[120], [2 if rank < 3 else 1], [3 if rank < 3 else 0]]
        assert 0 < error < bound
        assert exact < 1e-6
        assert "_get_local_all_to_all_group" in text
