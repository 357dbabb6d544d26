"""Which columns are important: those with the largest squared gradients, the same on all ranks that share a weight.

Owns: the choice, and the move of moments between the two counts of steps when elements change sides. Does not own: when
a choice is made (``executor.py``).
Invariant: the choice depends on the reduced gradients of one step alone, summed over the ranks of the shards in fp64,
where the squares are exact and the order of a sum decides nothing but ties of the last bit; equal sums go to the
column of the lower number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.comm import collectives
from deepspeed.runtime.zero.shard_group import ShardGroup
from deepspeed.runtime.zero.zenflow.columns import add_squares, column_count
from deepspeed.runtime.zero.zenflow.pieces import Piece, correct_moments, rule_of, state_of

# (number of the group, position of the parameter in it)
Place = tuple[int, int]


def chosen_count(columns: int, ratio: float) -> int:
    """How many of ``columns`` are important: ``ratio`` of them, rounded to the nearest, at least one."""
    return max(1, min(columns, round(columns * ratio)))


def column_squares(groups: Sequence[ShardGroup], shard_group: Any) -> dict[Place, torch.Tensor]:
    """Sums of the squared gradients of every column of every weight, over all ranks.  # 1D fp64. Collective.

    Weights that have one column, or none, are left out.
    """
    places = [
        ((number, position), column_count(shape))
        for number, group in enumerate(groups)
        for position, shape in enumerate(group.shapes)
        if group.offloaded and column_count(shape) > 1
    ]
    if not places:
        return {}
    device = groups[0].device
    flat = torch.zeros(sum(columns for _, columns in places), dtype=torch.float64, device=device)
    sums = dict(zip([place for place, _ in places], flat.split([columns for _, columns in places]), strict=True))
    for number, group in enumerate(groups):
        for bound in group.fragments if group.offloaded else ():
            total, grad = sums.get((number, bound.position)), group.grad_of(bound)
            if total is not None and grad is not None and grad.numel():
                add_squares(total, grad.to(device), bound.fragment.param_start)
    if any(group.sharded for group in groups):
        collectives.all_reduce(flat, shard_group, op="sum", what="ZenFlow's column norms", deterministic=True).wait()
    return sums


def largest(sums: torch.Tensor, count: int) -> list[int]:
    """The numbers of the ``count`` largest of ``sums``, ascending."""
    order = torch.argsort(sums.cpu(), descending=True, stable=True)
    return sorted(order[:count].tolist())


def move(base: torch.optim.Optimizer, piece: Piece, chosen: Sequence[int] | None) -> None:
    """``piece`` takes other important columns; None: all. Leaf and states in host memory hold everything.

    What was important and is no longer, and the other way round, changes its count of steps (see ``pieces.py``).
    """
    state, rule = state_of(base, piece), rule_of(base, piece)
    before = piece.cut
    if before is None:
        piece.count = int(state["step"])
    else:
        every = range(piece.columns)
        then = set(every if before.chosen is None else before.chosen)
        now = set(every if chosen is None else chosen)
        steps = int(state["step"])  # the same number where all columns were important
        correct_moments(rule, state, piece.only(sorted(then - now)), piece.count, steps)
        correct_moments(rule, state, piece.only(sorted(now - then)), steps, piece.count)
    piece.choose(chosen)


def make_plain(base: torch.optim.Optimizer, piece: Piece) -> None:
    """``piece`` has no important columns any more: all its moments count as many steps."""
    state, rule = state_of(base, piece), rule_of(base, piece)
    if piece.cut is not None and not piece.whole:
        correct_moments(rule, state, piece.cut, piece.count, int(state["step"]))
    piece.cut = None
