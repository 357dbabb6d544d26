"""Packing chosen columns of a fragment, against plain indexing; sums of squares of columns; counts of steps."""

from __future__ import annotations

import pytest
import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.adam.adam_update import AdamRule
from deepspeed.runtime.zero.zenflow.columns import ColumnCut, add_squares, column_count
from deepspeed.runtime.zero.zenflow.pieces import correction
from deepspeed.runtime.zero.zenflow.selection import chosen_count, largest

SHAPE = (7, 10)


def fragments() -> list[tuple[int, int]]:
    """Every place a run of a weight may begin and end."""
    total = SHAPE[0] * SHAPE[1]
    return [(start, end - start) for start in range(0, total, 3) for end in range(start + 1, total + 1, 4)]


@pytest.mark.parametrize("chosen", ([0], [9], [2, 3, 7], list(range(10))))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gather_and_scatter_are_indexing(chosen: list[int], dtype: torch.dtype) -> None:
    weight = torch.arange(70, dtype=torch.float32)
    for start, numel in fragments():
        held = [i for i in range(numel) if (start + i) % SHAPE[1] in chosen]
        cut = ColumnCut(start, numel, SHAPE[1], chosen)
        assert cut.numel == len(held)
        fragment = weight[start : start + numel].clone()
        packed = torch.full((cut.packed_numel,), -1.0, dtype=dtype)
        cut.gather(fragment, packed)
        assert packed[: cut.numel].tolist() == fragment[held].tolist()
        assert packed[cut.numel :].tolist() == [-1.0] * (cut.packed_numel - cut.numel)
        target = torch.zeros_like(fragment)
        cut.scatter(packed, target)
        expected = torch.zeros_like(fragment)
        expected[held] = fragment[held]
        assert torch.equal(target, expected)


def test_all_columns_are_packed_as_they_lie() -> None:
    cut = ColumnCut(3, 7, 10, None)
    values, packed, back = torch.arange(7.0), torch.zeros(7), torch.zeros(7)
    cut.gather(values, packed)
    cut.scatter(packed, back)
    assert cut.packed_numel == cut.numel == 7
    assert torch.equal(packed, values)
    assert torch.equal(back, values)


def test_sums_of_columns_add_up_over_fragments() -> None:
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    total, at = torch.zeros(10, dtype=torch.float64), 0
    for numel in (4, 13, 1, 20, 32):
        add_squares(total, weight.view(-1)[at : at + numel], at)
        at += numel
    assert torch.allclose(total, weight.double().square().sum(0), rtol=1e-14)


def test_what_counts_as_columns() -> None:
    assert [column_count(shape) for shape in ((4, 6), (4, 3, 2), (5,), (), (0, 5), (3, 0))] == [6, 6, 1, 1, 5, 1]
    assert [chosen_count(10, ratio) for ratio in (0.01, 0.25, 0.5, 0.99)] == [1, 2, 5, 10]
    assert largest(torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0]), 2) == [1, 2]  # equal sums: the lower number


def test_corrected_moments_stay_what_they_were() -> None:
    """A moment of `old` steps, rescaled, gives the same corrected moment at `new` steps."""
    rule = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.0, True, True)
    for key, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.999)):
        factor = correction(rule, key, 3, 12)
        assert factor * (1 / (1 - beta**12)) == pytest.approx(1 / (1 - beta**3), rel=1e-12)
        assert correction(rule, key, 5, 5) == correction(rule, key, 0, 5) == correction(rule, key, 5, 0) == 1.0
    plain = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.0, True, bias_correction=False)
    assert correction(plain, "exp_avg", 3, 12) == 1.0


def test_packed_columns_have_the_bits_of_the_weight() -> None:
    """An element's update does not depend on where it is packed, in weights of whole cache lines."""
    weight, cut = torch.randn(16, 24), ColumnCut(0, 16 * 24, 24, [1, 5, 6, 20])
    whole, part = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(torch.zeros(cut.packed_numel))
    cut.gather(weight, part.detach())
    one, two = DeepSpeedCPUAdam([whole], weight_decay=0.1), FusedAdam([part], weight_decay=0.1)
    for _ in range(4):
        grad, packed = torch.randn(16, 24), torch.zeros(cut.packed_numel)
        cut.gather(grad, packed)
        one.update_from([(whole, grad, None)], 0.3)
        two.update_from([(part, packed, None)], 0.3)
    expected = torch.zeros(cut.packed_numel)
    cut.gather(whole.detach(), expected)
    assert torch.equal(part.detach(), expected)
