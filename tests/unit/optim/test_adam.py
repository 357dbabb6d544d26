"""FusedAdam and DeepSpeedCPUAdam: torch's numbers, any dtype, any layout."""

from __future__ import annotations

import copy
from typing import Any

import numpy
import pytest
import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from tests.unit.optim.optim_cases import assert_same_bits, parameters, train

OURS = {
    "fused": lambda p, decoupled, **kw: FusedAdam(p, lr=0.02, adam_w_mode=decoupled, **kw),
    "cpu": lambda p, decoupled, **kw: DeepSpeedCPUAdam(p, lr=0.02, adamw_mode=decoupled, **kw),
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("decoupled", (True, False))
@pytest.mark.parametrize("weight_decay", (0.0, 0.1))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_equal_to_the_fused_torch_optimizer_bit_by_bit(
    name: str, decoupled: bool, weight_decay: float, dtype: torch.dtype
) -> None:
    torch_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    ours, theirs = parameters(dtype), parameters(dtype)

    # Leaving out gradients makes the parameters differ in their step counts.
    def skip(step: int, index: int) -> bool:
        return (step + index) % 4 == 0

    train(lambda p: OURS[name](p, decoupled, weight_decay=weight_decay), ours, skip=skip)
    train(lambda p: torch_class(p, lr=0.02, weight_decay=weight_decay, fused=True), theirs, skip=skip)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_states_in_the_dtype_of_the_parameter_equal_torch(dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = train(lambda p: DeepSpeedCPUAdam(p, lr=0.02, fp32_optimizer_states=False), ours)
    train(lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0, fused=True), theirs)
    assert_same_bits(ours, theirs)
    assert {v.dtype for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)} == {dtype}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", OURS)
def test_fp32_states_of_low_precision_parameters(name: str, dtype: torch.dtype) -> None:
    """Each step is the fp32 step from the rounded parameter, rounded once."""
    ours = parameters(dtype)
    optimizer = OURS[name](ours, True, fp32_optimizer_states=True)
    mirror = [torch.nn.Parameter(p.detach().float()) for p in ours]
    reference = torch.optim.AdamW(mirror, lr=0.02, weight_decay=0, fused=True)
    for step in range(4):
        with torch.no_grad():
            for m, p in zip(mirror, ours, strict=True):
                m.copy_(p)
        train(OURS, ours, steps=1, optimizer=optimizer, first=step)  # type: ignore[arg-type]
        for m, p in zip(mirror, ours, strict=True):
            assert p.grad is not None
            m.grad = p.grad.float()
        reference.step()
        assert_same_bits(ours, [torch.nn.Parameter(m.detach().to(dtype)) for m in mirror])
    assert optimizer.state[ours[0]]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("decoupled", (True, False))
def test_without_bias_correction(decoupled: bool) -> None:
    lr, b1, b2, eps, decay = 0.02, 0.9, 0.99, 1e-6, 0.1
    ours = parameters()
    expected = [p.detach().double() for p in parameters()]
    m, v = [torch.zeros_like(p) for p in expected], [torch.zeros_like(p) for p in expected]
    optimizer = FusedAdam(
        ours, lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, bias_correction=False, adam_w_mode=decoupled
    )
    for step in range(4):
        train(lambda p: optimizer, ours, steps=1, optimizer=optimizer, first=step)
        for i, p in enumerate(ours):
            assert p.grad is not None
            g = p.grad.double() + (0 if decoupled else decay * expected[i])
            if decoupled:
                expected[i] *= 1 - lr * decay
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g * g
            expected[i] -= lr * m[i] / (v[i].sqrt() + eps)
    for p, e in zip(ours, expected, strict=True):
        # fp32 against fp64 over four steps: a few units of the last place.
        torch.testing.assert_close(p.detach().double(), e, rtol=2e-6, atol=2e-7)


def test_amsgrad_of_the_cpu_class_equals_torch() -> None:
    ours, theirs = parameters(), parameters()
    train(lambda p: DeepSpeedCPUAdam(p, lr=0.02, amsgrad=True), ours)
    train(lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0, amsgrad=True, fused=True), theirs)
    assert_same_bits(ours, theirs)


def test_amsgrad_of_the_fused_class_is_refused_with_the_way_out() -> None:
    with pytest.raises(RuntimeError, match="torch_adam"):
        FusedAdam(parameters(), amsgrad=True)


@pytest.mark.parametrize("name", OURS)
def test_fragments_of_a_parameter_get_the_update_of_the_whole(name: str) -> None:
    whole = parameters(shapes=((6, 10),))
    pieces = [torch.nn.Parameter(t.clone()) for t in whole[0].detach().view(-1).split([23, 1, 36])]
    build = lambda p: OURS[name](p, True, weight_decay=0.1)  # noqa: E731
    one, many = build(whole), build(pieces)
    for step in range(3):
        grad = torch.randn(6, 10, generator=torch.Generator().manual_seed(step))
        whole[0].grad = grad
        for piece, g in zip(pieces, grad.view(-1).split([23, 1, 36]), strict=True):
            piece.grad = g.clone()
        one.step()
        many.step()
    # The vector and the tail loop of the kernel may round differently, so an element may move by one unit.
    torch.testing.assert_close(torch.cat([p.detach() for p in pieces]), whole[0].detach().view(-1), rtol=2e-7, atol=0)


LAYOUTS = {
    "transposed": lambda t: t.t(),
    "view with gaps": lambda t: t[:, ::2],
    "channels last": lambda t: t.view(3, 2, 2, 2).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OURS)
def test_layout_of_a_parameter_does_not_change_the_numbers(layout: str, name: str) -> None:
    base = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    strided = torch.nn.Parameter(LAYOUTS[layout](base.clone()))
    plain = torch.nn.Parameter(strided.detach().contiguous().clone())
    for p in (strided, plain):
        optimizer = OURS[name]([p], True, weight_decay=0.1)
        for step in range(3):
            p.grad = torch.sin(torch.arange(p.numel()).float() + step).view(p.shape)
            optimizer.step()
    assert not strided.is_contiguous()
    # The staged path may meet other vector and tail boundaries: one unit in the last place.
    torch.testing.assert_close(strided.detach(), plain.detach(), rtol=2e-7, atol=0)


def test_gradient_of_another_dtype_than_the_parameter() -> None:
    p = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch ties the dtype of a gradient to its parameter")
    p.grad_dtype = torch.float32  # type: ignore[attr-defined]
    p.grad = torch.full((5,), 0.3)
    FusedAdam([p], lr=0.5).step()
    assert p.tolist() == [0.5] * 5


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("via", ("state_dict", "deepcopy"))
def test_interrupted_run_continues_to_the_last_bit(name: str, via: str) -> None:
    def build(params: list[torch.nn.Parameter]) -> Any:
        return OURS[name](params, False, weight_decay=0.1, fp32_optimizer_states=True)

    unbroken, first = parameters(torch.bfloat16), parameters(torch.bfloat16)
    train(build, unbroken, steps=6)
    optimizer = train(build, first, steps=3)
    if via == "deepcopy":
        second, resumed = copy.deepcopy((first, optimizer))
        assert resumed.adam_w_mode is False
    else:
        second = [torch.nn.Parameter(p.detach().clone()) for p in first]
        resumed = build(second)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert resumed.state[second[0]]["exp_avg"].dtype == torch.float32
    train(build, second, steps=3, optimizer=resumed, first=3)
    assert_same_bits(unbroken, second)


@pytest.mark.parametrize("name", OURS)
def test_state_of_a_torch_optimizer_loads(name: str) -> None:
    theirs = parameters()
    reference = train(lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, fused=True), theirs, steps=3)
    ours = [torch.nn.Parameter(p.detach().clone()) for p in theirs]
    optimizer = OURS[name](ours, True)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert optimizer.state[ours[0]]["step"] == 3
    train(lambda p: optimizer, ours, steps=2, optimizer=optimizer, first=3)
    train(lambda p: reference, theirs, steps=2, optimizer=reference, first=3)
    assert_same_bits(ours, theirs)


def test_state_names_and_group_keys() -> None:
    params = parameters()
    cpu = train(lambda p: DeepSpeedCPUAdam(p), params, steps=1)
    assert set(cpu.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert type(cpu.state[params[0]]["step"]) is int
    assert set(cpu.param_groups[0]) == {
        "params",
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "bias_correction",
        "amsgrad",
    }


def test_positional_arguments_are_in_the_historical_order() -> None:
    cpu = DeepSpeedCPUAdam(parameters(), 1e-4, True, (0.8, 0.9), 1e-5, 0.1, True, False, False)
    assert (cpu.defaults["betas"], cpu.defaults["amsgrad"], cpu.adam_w_mode) == ((0.8, 0.9), True, False)
    assert cpu.fp32_optimizer_states is False
    fused = FusedAdam(parameters(), 1e-4, False, (0.8, 0.9), 1e-5, False, 0.1, False, False)
    assert (fused.defaults["bias_correction"], fused.defaults["weight_decay"]) == (False, 0.1)
    assert (fused.adam_w_mode, fused.set_grad_none) == (False, False)


def test_zero_grad_sets_none_or_zero_as_told() -> None:
    for set_none in (True, False):
        params = parameters(shapes=((2,),))
        optimizer = FusedAdam(params, set_grad_none=set_none)
        params[0].grad = torch.ones(2)
        optimizer.zero_grad()
        assert (params[0].grad is None) == set_none


def test_closure_runs_with_gradients() -> None:
    params = parameters(shapes=((2,),))
    optimizer = FusedAdam(params)

    def closure() -> torch.Tensor:
        loss = params[0].sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None
    assert params[0].grad is not None


def test_legacy_step_arguments_are_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"\['scale'\]"):
        FusedAdam(parameters()).step(scale=2.0)


def test_wrong_values_and_tensors_are_named() -> None:
    with pytest.raises(ValueError, match=r"FusedAdam: lr = -1"):
        FusedAdam(parameters(), lr=-1)
    with pytest.raises(ValueError, match=r"betas = \(0.9, 1.0\)"):
        FusedAdam(parameters(), betas=(0.9, 1.0))
    for name, value in (("lr", "1e-3"), ("lr", None), ("eps", "1e-8"), ("weight_decay", [0.1]), ("lr", True)):
        for make in (DeepSpeedCPUAdam, FusedAdam, FusedLamb):
            with pytest.raises(TypeError, match=rf"{name} = .*; expected a number"):
                make(parameters(), **{name: value})
        groups = [{"params": parameters()}, {"params": parameters(), name: value}]
        with pytest.raises(TypeError, match=f"FusedAdam, group 1: {name} = "):
            FusedAdam(groups)
    for betas in ((0.9,), (0.9, "0.99"), 0.9, "ab", (0.9, 0.99, 0.999)):
        with pytest.raises(TypeError, match=r"betas = .*; expected two numbers"):
            DeepSpeedCPUAdam(parameters(), betas=betas)
    DeepSpeedCPUAdam(parameters(), lr=numpy.float32(1e-3), betas=[numpy.float64(0.9), 0.99])
    meta = torch.nn.Parameter(torch.empty(2, device="meta"))
    meta.grad = torch.empty(2, device="meta")
    with pytest.raises(RuntimeError, match=r"shape \(2,\) is on meta.*offload_optimizer"):
        DeepSpeedCPUAdam([meta]).step()
    sparse = torch.nn.Parameter(torch.ones(4, 2))
    sparse.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match="sparse gradient"):
        FusedAdam([sparse]).step()
    weird = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    weird.grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="complex64"):
        FusedAdam([weird]).step()


def test_classes_are_reached_from_the_root_package() -> None:
    import deepspeed

    assert deepspeed.ops.adam.FusedAdam is FusedAdam
    assert deepspeed.ops.lion.FusedLion.__module__ == "deepspeed.ops.lion.fused_lion"
