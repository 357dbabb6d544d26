"""What ZenFlow adds to an optimizer's states while somebody reads or saves them, and takes back.

    zenflow            plain: {"columns", "count", "rounds", "window", "later"}; the same on all fragments of a weight
    zenflow_pending    the sum of this window's scaled gradients, in the leaf's shape, fp32; absent if there is none
    zenflow_weight     while an update has not landed: the weights in the model, which masters are ahead of

Without ``overlap`` nothing is under way between two steps: what a saved update has made lands when it is read.

They are states like others, so a checkpoint holds them by fragment and gives them to any number of ranks. ``columns``
is None where all are important. Between two steps, from ``hold_still`` on, they are there; during a step they are not.

Owns: writing, reading and forgetting these keys. Does not own: anything they describe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.comm import collectives
from deepspeed.runtime.zero.stepper import Unit
from deepspeed.runtime.zero.zenflow.pieces import Piece
from deepspeed.runtime.zero.zenflow.selection import make_plain
from deepspeed.utils.logging import warning_once

if TYPE_CHECKING:
    from deepspeed.runtime.zero.shard_group import BoundFragment, ShardGroup
    from deepspeed.runtime.zero.zenflow.executor import ZenFlow

FACTS, (PENDING, WEIGHT) = keys.ZENFLOW_KEY, keys.ZENFLOW_TENSORS


def write(flow: ZenFlow) -> None:
    """Put what ZenFlow knows beside the optimizer's states."""
    later = {id(piece) for piece in flow.deferred.lands_later}
    for piece in flow.pieces:
        state = flow.base.state.get(piece.bound.leaf)
        if not state:
            continue
        state[FACTS] = {
            "columns": piece.cut.chosen if piece.cut is not None else None,
            "chosen": piece.cut is not None,
            "count": piece.count,
            "rounds": flow.rounds,
            "window": flow.deferred.steps,
            "later": id(piece) in later,
        }
        pending = flow.deferred.pending(piece)
        if pending is not None:
            state[PENDING] = pending
        if id(piece) in later:
            state[WEIGHT] = piece.bound.model.detach().to("cpu", copy=True)


def forget(flow: ZenFlow) -> None:
    """Take it away again: the optimizer's states are the optimizer's alone."""
    for piece in flow.pieces:
        state = flow.base.state.get(piece.bound.leaf, {})
        for name in (FACTS, PENDING, WEIGHT):
            state.pop(name, None)


@torch.no_grad()
def read(flow: ZenFlow, *, with_states: bool) -> None:
    """Go on from what :func:`write` left in states that were loaded. Collective where states are sharded."""
    if not with_states:
        flow.deferred.take_over(0, {}, [])
        return
    sums: dict[int, torch.Tensor | None] = {}
    later: list[Piece] = []
    chosen, outdated, rounds, window, changed = 0, 0, 0, 0, 0
    for piece in flow.pieces:
        state = flow.base.state.get(piece.bound.leaf, {})
        facts: dict[str, Any] = state.get(FACTS, {})
        rounds, window = max(rounds, facts.get("rounds", 0)), max(window, facts.get("window", 0))
        sums[id(piece)] = state.get(PENDING)
        piece.cut, piece.count = None, int(state.get("step", 0))
        if facts.get("chosen"):
            chosen, piece.count = 1, int(facts["count"])
            piece.choose(facts["columns"])
            outdated |= flow.chosen_of(piece.columns) != len(facts["columns"] or range(piece.columns))
        else:
            outdated = 1
        if facts.get("later"):
            changed = 1
            weight = state.get(WEIGHT)
            if flow.options.overlap:
                later.append(piece)
            else:  # nothing would land it later: masters are what it has made, important elements included
                weight = piece.bound.leaf.detach()
                state[FACTS] = {**facts, "later": False}
                state.pop(WEIGHT, None)
            if weight is not None:
                piece.bound.model.copy_(weight)
    facts_of_all = [chosen, outdated, rounds, window, changed]
    if flow.shares():
        agreed = torch.tensor(facts_of_all, dtype=torch.float64, device=flow.groups[0].device)
        collectives.all_reduce(agreed, flow.shards.group, op="max", what="where ZenFlow goes on").wait()
        facts_of_all = list(map(int, agreed.tolist()))
    chosen, outdated, flow.rounds, window, changed = facts_of_all
    flow.selected, flow.outdated = bool(chosen), bool(chosen and outdated)
    for piece in flow.pieces if flow.selected else ():
        if piece.cut is None:  # it has joined since: all of it is important until the next choice
            piece.choose(None)
    flow.deferred.take_over(window, sums, later)
    if changed:
        for group in {id(unit.group): unit.group for unit in flow.units}.values():
            for segment in group.layout.segments if group.sharded else ():
                flow.publish(group, segment)


def drop(base: torch.optim.Optimizer, groups: Sequence[ShardGroup], bounds: Sequence[BoundFragment]) -> None:
    """States that ZenFlow saved are taken up without it: all elements count as many steps, what waited is given up."""
    for bound in bounds:
        state = base.state.get(bound.leaf)
        if not state or FACTS not in state:
            continue
        facts = state.pop(FACTS)
        state.pop(WEIGHT, None)
        if state.pop(PENDING, None) is not None:
            warning_once(
                f"the checkpoint holds gradients of {facts['window']} steps that ZenFlow had not applied: without "
                "zero_optimization.zenflow they are given up"
            )
        if facts["chosen"]:
            group = next(group for group in groups if any(held is bound for held in group.fragments))
            piece = Piece(Unit(group, 0, [bound], [], bound.fragment.shard_start, bound.fragment.numel), bound)
            piece.choose(facts["columns"])
            piece.count = int(facts["count"])
            make_plain(base, piece)
