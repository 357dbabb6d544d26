"""``Piece``: one fragment under ZenFlow: how it is cut, and how far each of its two parts has come.

The elements of a fragment are updated in two ways: the important ones in packed copies on the device
(``important.py``), the others by the base optimizer in host memory (``deferred.py``). Masters and moments of both have
a place in the fragment's leaf and states in host memory; those of important elements are out of date there, until they
are stored.

[Note: two counts of steps] Important elements take part in every step, the others in one of several, so Adam's
correction of biased moments needs two counts. An element that changes sides brings moments that are sums of another
number of gradients: they are multiplied by (1 - beta^new) / (1 - beta^old), which leaves its corrected moments
m / (1 - beta1^t) and v / (1 - beta2^t) (Kingma and Ba, "Adam", ICLR 2015, section 3) what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.ops.adam.adam_update import AdamRule
from deepspeed.runtime.zero.shard_group import BoundFragment
from deepspeed.runtime.zero.stepper import Unit
from deepspeed.runtime.zero.zenflow.columns import ColumnCut, column_count


class Piece:
    """``bound`` of ``unit``. ``number`` and ``position``: of its group and of its parameter in the group."""

    def __init__(self, unit: Unit, bound: BoundFragment) -> None:
        self.unit, self.bound, self.group = unit, bound, unit.group
        self.columns = column_count(unit.group.shapes[bound.position])
        self.cut: ColumnCut | None = None  # None before the first choice
        self.count = 0  # steps of the important elements
        self.waiting = False  # a gradient of this window waits for its update
        self.landed = -1  # version of the gradient in host memory whose important elements are on the device

    @property
    def whole(self) -> bool:
        """All elements are important."""
        return self.cut is not None and self.cut.chosen is None

    def choose(self, chosen: Sequence[int] | None) -> None:
        """Take these columns (ascending) from now on; None: all."""
        fragment = self.bound.fragment
        self.cut = ColumnCut(fragment.param_start, fragment.numel, self.columns, chosen)
        self.landed = -1

    def only(self, columns: Sequence[int]) -> ColumnCut:
        """A cut of other columns of the same fragment."""
        fragment = self.bound.fragment
        return ColumnCut(fragment.param_start, fragment.numel, self.columns, columns)


def rule_of(base: torch.optim.Optimizer, piece: Piece) -> AdamRule:
    """The Adam rule of the piece's parameter group as it is now."""
    group = base.param_groups[piece.group.group_index]
    return AdamRule.of_group(group, decoupled=getattr(base, "adam_w_mode", True))


def state_of(base: Any, piece: Piece) -> dict[str, Any]:
    """The states of the piece's leaf, made as the optimizer would make them."""
    leaf = piece.bound.leaf
    state: dict[str, Any] = base.state[leaf]
    if not state:
        base.check_param(leaf)
        state["step"] = 0
        state.update({key: base.new_state(leaf) for key in rule_of(base, piece).state_keys})
    return state


def correction(rule: AdamRule, key: str, old: int, new: int) -> float:
    """What moments ``key`` of ``old`` steps are multiplied by to count as moments of ``new`` steps.

    1 where nothing has been summed up, so that zeros stay zeros.
    """
    if old == new or not old or not new or not rule.bias_correction:
        return 1.0
    beta = rule.beta1 if key == "exp_avg" else rule.beta2
    return float((1 - beta**new) / (1 - beta**old))


@torch.no_grad()
def correct_moments(rule: AdamRule, state: dict[str, Any], cut: ColumnCut, old: int, new: int) -> None:
    """The chosen elements of ``state`` have changed sides; see the note above."""
    for key in rule.state_keys:
        factor = correction(rule, key, old, new)
        if factor != 1.0 and cut.numel:
            packed = torch.empty(cut.packed_numel, dtype=state[key].dtype, device=state[key].device)
            cut.gather(state[key], packed)
            cut.scatter(packed.mul_(factor), state[key])
