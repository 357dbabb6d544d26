"""`update_from`: the same numbers as scaling the gradients, `step()` and a copy; `sumsq` and `cast` of the kernels."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed.native.build import NativeUnavailable, load
from deepspeed.ops import native_kernels
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.row_optimizer import Row, RowOptimizer

LOW = (torch.bfloat16, torch.float16)
MAKE: dict[str, Callable[[Any], RowOptimizer]] = {
    "adamw": lambda p: DeepSpeedCPUAdam(p, lr=0.02, weight_decay=0.1),
    "adam": lambda p: DeepSpeedCPUAdam(p, lr=0.02, weight_decay=0.1, adamw_mode=False),
    "amsgrad": lambda p: DeepSpeedCPUAdam(p, lr=0.02, amsgrad=True),
    "fused adam": lambda p: FusedAdam(p, lr=0.02),
    "lion": lambda p: DeepSpeedCPULion(p, lr=0.01, weight_decay=0.1),
    "fused lion": lambda p: FusedLion(p, lr=0.01),
    "adagrad": lambda p: DeepSpeedCPUAdagrad(p, lr=0.02, weight_decay=0.1),
}
SHAPES = ((0,), (1,), (7,), (3, 5), (64,), (1031,), (4096 + 9,), (3 * 4096 * 8 + 5,))


def native() -> bool:
    try:
        load(native_kernels.LIBRARY)
    except NativeUnavailable:
        return False
    return True


pytestmark = pytest.mark.skipif(not native(), reason="there is no native library here")


def leaves(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(5)
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in SHAPES]


def gradients_of(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    return [(30 * torch.randn(shape, generator=random)).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("grad_dtype", (torch.float32, *LOW))
@pytest.mark.parametrize("path", ("native", "torch"))
def test_equals_scaling_then_step_then_copy(
    name: str, grad_dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = leaves(), leaves()
    optimizer, reference = MAKE[name](ours), MAKE[name](theirs)
    monkeypatch.setattr(reference, "_native", False)  # torch's kernels
    if path == "torch":
        monkeypatch.setattr(optimizer, "_native", False)
    outs = [torch.full(shape, math.nan, dtype=dtype) for shape, dtype in zip(SHAPES, (*LOW, torch.float32) * 3)]  # noqa: B905
    for step, scale in enumerate((1.0, 0.37, 1 / 1024)):
        grads = gradients_of(step, grad_dtype)
        rows: list[Row] = [
            (leaf, grad.view(-1), out if index % 4 else None)
            for index, (leaf, grad, out) in enumerate(zip(ours, grads, outs, strict=True))
            if (index + step) % 5
        ]
        assert optimizer.takes_rows(rows) is (path == "native")
        optimizer.update_from(rows, scale)
        for index, (leaf, grad) in enumerate(zip(theirs, grads, strict=True)):
            leaf.grad = grad.float().mul_(scale) if (index + step) % 5 else None
        reference.step()
        for index, (mine, other, out) in enumerate(zip(ours, theirs, outs, strict=True)):
            assert torch.equal(mine, other), (index, step)
            if index % 4 and (index + step) % 5:
                assert torch.equal(out, other.to(out.dtype)), (index, step)
            assert optimizer.state.get(mine, {}).keys() == reference.state.get(other, {}).keys()
            for key, value in reference.state.get(other, {}).items():
                found = optimizer.state[mine][key]
                assert torch.equal(found, value) if torch.is_tensor(value) else found == value
    assert all(leaf.grad is None for leaf in ours)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("fp32_states", (True, False))
@pytest.mark.parametrize("name", ("adam", "lion", "adagrad"))
def test_low_precision_leaves_equal_the_torch_path(name: str, dtype: torch.dtype, fp32_states: bool) -> None:
    kinds = {"adam": DeepSpeedCPUAdam, "lion": DeepSpeedCPULion, "adagrad": DeepSpeedCPUAdagrad}
    ours, theirs = leaves(dtype), leaves(dtype)
    optimizer = kinds[name](ours, lr=0.02, fp32_optimizer_states=fp32_states)
    reference = kinds[name](theirs, lr=0.02, fp32_optimizer_states=fp32_states)
    reference._native = False
    for step in range(3):
        for leaf, other, grad in zip(ours, theirs, gradients_of(step, dtype), strict=True):
            leaf.grad, other.grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
    for leaf, other in zip(ours, theirs, strict=True):
        assert torch.equal(leaf, other)
        for key, value in reference.state[other].items():
            assert torch.equal(torch.as_tensor(optimizer.state[leaf][key]), torch.as_tensor(value)), key


def test_a_leaf_of_no_group_is_named() -> None:
    optimizer = DeepSpeedCPUAdam(leaves())
    stranger = torch.nn.Parameter(torch.ones(3, 2))
    with pytest.raises(KeyError, match=r"shape \(3, 2\) is in no parameter group"):
        optimizer.update_from([(stranger, torch.ones(6), None)], 1.0)


def test_what_the_kernel_cannot_take_is_declined_and_done_by_torch() -> None:
    plain = torch.nn.Parameter(torch.ones(4, 6))
    strided = torch.nn.Parameter(torch.ones(6, 4).t())
    double = torch.nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
    optimizer = DeepSpeedCPUAdam([plain, strided, double], lr=0.5)
    grad, wide = torch.ones(4, 6), torch.ones(6, 8).t()[::2]
    assert optimizer.takes_rows([(plain, grad, None)])
    for leaf, given, out in (
        (strided, grad, None),
        (double, grad, None),
        (plain, wide, None),
        (plain, grad.double(), None),
        (plain, torch.ones(5), None),
        (plain, grad, wide),
        (plain, grad.to_sparse(), None),
    ):
        assert not optimizer.takes_rows([(plain, grad, None), (leaf, given, out)])
    optimizer.update_from([(plain, grad, None), (strided, grad, None), (double, grad, None)], 2.0)
    for leaf in (plain, strided, double):
        assert torch.allclose(leaf, torch.tensor(0.5, dtype=leaf.dtype), rtol=1e-6)


def test_a_graph_that_needs_the_old_value_is_refused_as_after_a_torch_step() -> None:
    leaf = torch.nn.Parameter(torch.ones(3))
    optimizer = DeepSpeedCPUAdam([leaf])
    loss = (leaf * leaf).sum()
    optimizer.update_from([(leaf, torch.ones(3), None)], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_state_follows_a_deep_copy() -> None:
    leaf = torch.nn.Parameter(torch.ones(3))
    optimizer = DeepSpeedCPUAdam([leaf])
    optimizer.update_from([(leaf, torch.ones(3), None)], 1.0)
    second, other = copy.deepcopy((leaf, optimizer))
    for one, many in ((leaf, optimizer), (second, other)):
        many.update_from([(one, torch.full((3,), 0.5), None)], 1.0)
    assert torch.equal(leaf, second)
    assert other.state[second]["step"] == 2


@pytest.mark.parametrize("dtype", (torch.float32, *LOW))
def test_sum_of_squares_and_what_is_not_finite(dtype: torch.dtype) -> None:
    tensors = gradients_of(0, dtype)
    total, broken = native_kernels.sumsq(tensors)
    expected = sum(float(t.double().square().sum()) for t in tensors)
    assert total == pytest.approx(expected, rel=1e-12)
    assert not broken
    for value in (math.inf, -math.inf, math.nan):
        tensors[-1][-1] = value
        assert native_kernels.sumsq(tensors)[1]
    assert native_kernels.sumsq([]) == (0.0, False)
    big = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    assert native_kernels.sumsq([big])[1] is False


@pytest.mark.parametrize("source", (torch.float32, *LOW))
@pytest.mark.parametrize("target", (torch.float32, *LOW))
def test_cast_rounds_as_torch(source: torch.dtype, target: torch.dtype) -> None:
    values = [*gradients_of(0, source), torch.tensor([math.inf, -math.inf, math.nan, -0.0, 65520.0, 6e-8]).to(source)]
    outs = [torch.empty(t.shape, dtype=target) for t in values]
    native_kernels.cast(values, outs, 0.3)
    for value, out in zip(values, outs, strict=True):
        expected = (value.float() * 0.3).to(target)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(1.0), expected.nan_to_num(1.0))
