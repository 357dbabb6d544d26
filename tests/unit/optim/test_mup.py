"""muP optimizers: rates by shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from deepspeed.ops.mup import MuAdam, MuAdamW, MuSGD


@dataclass(frozen=True)
class Shape:
    """A stand-in for the object of the mup package."""

    growing: int
    mult: float = 4.0
    ratio: float = 2.0

    def ninf(self) -> int:
        return self.growing

    def width_mult(self) -> float:
        return self.mult

    def fanin_fanout_mult_ratio(self) -> float:
        return self.ratio


def params() -> list[Any]:
    made = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(4)]
    for p, shape in zip(made, (Shape(0), Shape(1), Shape(2), Shape(2, mult=8.0, ratio=0.5)), strict=True):
        p.infshape = shape  # type: ignore[attr-defined]
    return made


def rates(optimizer: torch.optim.Optimizer, members: list[Any]) -> list[tuple[float, float]]:
    found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    return [found[id(p)] for p in members]


@pytest.mark.parametrize("make", (MuAdam, MuAdamW))
def test_adam_divides_the_rate_of_matrices_by_their_growth(make: Any) -> None:
    members = params()
    # The same numbers as mup 1.0.0 gives for a lr of 0.1 and a decay of 0.2.
    assert rates(make(members, lr=0.1, weight_decay=0.2), members) == [
        (0.1, 0.2),
        (0.1, 0.2),
        (0.025, 0.8),
        (0.0125, 1.6),
    ]


def test_sgd_multiplies_vectors_and_divides_matrices_by_the_ratio() -> None:
    members = params()
    assert rates(MuSGD(members, lr=0.1, weight_decay=0.2, momentum=0.9), members) == [
        (0.1, 0.2),
        (0.4, 0.05),
        (0.05, 0.4),
        (0.2, 0.1),
    ]


def test_decoupled_decay_is_left_alone_and_missing_decay_is_zero() -> None:
    members = params()
    assert {d for _, d in rates(MuAdam(members, lr=0.1, weight_decay=0.2, decoupled_wd=True), members)} == {0.2}
    assert {d for _, d in rates(MuAdamW(members, lr=0.1), members)} == {0.0}


def test_groups_keep_their_own_rate_and_order() -> None:
    a, b, c, d = params()
    optimizer = MuAdam([{"params": [c, a], "lr": 1.0, "name": "x"}, {"params": [b, d]}], lr=0.1)
    assert rates(optimizer, [a, b, c, d]) == [(1.0, 0.0), (0.1, 0.0), (0.25, 0.0), (0.0125, 0.0)]
    assert [g.get("name") for g in optimizer.param_groups] == ["x", "x", None, None]


def test_missing_and_impossible_shapes_name_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"MuAdam.*shape \(3,\).*set_base_shapes"):
        MuAdam([torch.nn.Parameter(torch.ones(3))])
    p = torch.nn.Parameter(torch.ones(2, 2, 2))
    p.infshape = Shape(3)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="3 dims that grow"):
        MuSGD([p])
