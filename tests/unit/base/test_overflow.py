"""Overflow is known to all ranks that step together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.runtime.utils import CheckOverflow
from tests.unit.base.test_norms import Unit


def param(*grad: float) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(len(grad)))
    made.grad = torch.tensor(grad) if grad else None
    return made


@pytest.mark.parametrize(
    ("bad", "expected"), ((float("inf"), True), (float("-inf"), True), (float("nan"), True), (1.0, False))
)
def test_serial(bad: float, expected: bool) -> None:
    groups = [[param(1.0), param()], [param(2.0, bad)]]
    check = CheckOverflow(param_groups=groups)
    assert check.check() is expected
    assert check.has_overflow(groups[1]) is expected
    assert check.check([{"params": groups[0]}]) is False
    assert CheckOverflow.has_overflow_serial(groups[1]) is expected
    assert CheckOverflow.has_overflow_serial([param()]) is False


def test_norms_with_the_marker() -> None:
    check = CheckOverflow()
    assert check.check_using_norm([1.0, torch.tensor(-1.0)])
    assert not check.check_using_norm([1.0, 0.0])
    with pytest.raises(ValueError, match="no `param_groups`"):
        check.check()


def agreed() -> dict[str, bool]:
    mine = [param(float("inf") if dist.get_rank() == 1 else 1.0)]
    norm = [-1.0 if dist.get_rank() == 1 else 1.0]
    pipeline = SimpleNamespace(enable_backward_allreduce=False)
    expert = param(1.0)
    expert.allreduce = False  # type: ignore[attr-defined]
    return {
        "alone": CheckOverflow().has_overflow(mine),
        "model parallel": CheckOverflow(mpu=Unit()).has_overflow(mine),
        "sharded": CheckOverflow(zero_reduce_scatter=True).has_overflow(mine),
        "experts": CheckOverflow().has_overflow(mine, has_moe_params=True),
        "marked experts": CheckOverflow(param_groups=[[*mine, expert]]).check(),
        "pipeline": CheckOverflow(deepspeed=pipeline).has_overflow(mine),
        "norms": CheckOverflow(mpu=Unit()).check_using_norm(norm),
        "norms alone": CheckOverflow(mpu=Unit()).check_using_norm(norm, reduce_overflow=False),
    }


def test_agreement_between_ranks(ranks: Any) -> None:
    zero, one = ranks(agreed)
    assert {name for name, overflow in zero.items() if not overflow} == {"alone", "norms alone"}
    assert all(one.values())
