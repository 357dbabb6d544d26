"""Lion, Adagrad and LAMB against their formulas and against torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from deepspeed.ops import elementwise
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from tests.unit.optim.optim_cases import assert_same_bits, parameters, train

LION = {"fused": FusedLion, "cpu": DeepSpeedCPULion}


@pytest.mark.parametrize("name", LION)
@pytest.mark.parametrize("weight_decay", (0.0, 0.1))
def test_lion_follows_its_formula(name: str, weight_decay: float) -> None:
    lr, b1, b2 = 0.02, 0.9, 0.99
    ours = parameters()
    expected = [p.detach().double() for p in ours]
    momentum = [torch.zeros_like(p) for p in expected]
    optimizer = LION[name](ours, lr=lr, betas=(b1, b2), weight_decay=weight_decay)
    for step in range(5):
        train(lambda p: optimizer, ours, steps=1, optimizer=optimizer, first=step)
        for i, p in enumerate(ours):
            assert p.grad is not None
            g = p.grad.double()
            direction = torch.sign(b1 * momentum[i] + (1 - b1) * g)
            expected[i] = expected[i] * (1 - lr * weight_decay) - lr * direction
            momentum[i] = b2 * momentum[i] + (1 - b2) * g
    for p, e, m in zip(ours, expected, momentum, strict=True):
        # fp32 against fp64 over five steps.
        torch.testing.assert_close(p.detach().double(), e, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), m, rtol=1e-6, atol=1e-7)
    assert set(optimizer.state[ours[0]]) == {"step", "exp_avg"}


def test_lion_in_bounded_memory_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = parameters(), parameters()
    train(lambda p: FusedLion(p, lr=0.02, weight_decay=0.1), whole)
    monkeypatch.setattr(elementwise.slices, "__defaults__", (4,))
    train(lambda p: FusedLion(p, lr=0.02, weight_decay=0.1), cut)
    # Scaling and adding are correctly rounded per element whatever the cut; lerp too, it has no vector-only form.
    assert_same_bits(whole, cut)


@pytest.mark.parametrize(
    ("dtype", "fp32_states"), ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True))
)
def test_lion_low_precision_step_is_the_fp32_step_rounded_once(dtype: torch.dtype, fp32_states: bool) -> None:
    ours = parameters(dtype)
    optimizer = DeepSpeedCPULion(ours, lr=0.01, weight_decay=0.1, fp32_optimizer_states=fp32_states)
    mirror = [torch.nn.Parameter(p.detach().float()) for p in ours]
    reference = DeepSpeedCPULion(mirror, lr=0.01, weight_decay=0.1)
    for step in range(3):
        with torch.no_grad():
            for m, p in zip(mirror, ours, strict=True):
                m.copy_(p)
                if step:
                    reference.state[m]["exp_avg"].copy_(optimizer.state[p]["exp_avg"])
        train(lambda p: optimizer, ours, steps=1, optimizer=optimizer, first=step)
        for m, p in zip(mirror, ours, strict=True):
            assert p.grad is not None
            m.grad = p.grad.float()
        reference.step()
        assert_same_bits(ours, [torch.nn.Parameter(m.detach().to(dtype)) for m in mirror])
    assert optimizer.state[ours[0]]["exp_avg"].dtype == (torch.float32 if fp32_states else dtype)


@pytest.mark.parametrize("weight_decay", (0.0, 0.1))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_adagrad_equals_the_fused_torch_optimizer_bit_by_bit(weight_decay: float, dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = train(lambda p: DeepSpeedCPUAdagrad(p, lr=0.1, weight_decay=weight_decay), ours)
    train(lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=weight_decay, fused=True), theirs)
    assert_same_bits(ours, theirs)
    assert set(optimizer.state[ours[0]]) == {"step", "exp_avg_sq"}


def test_adagrad_sparse_gradient_touches_its_rows_only_and_equals_torch() -> None:
    def embedding_run(build: Any) -> tuple[torch.Tensor, Any]:
        layer = torch.nn.Embedding(10, 3, sparse=True)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(30).view(10, 3) / 10)
        optimizer = build([layer.weight])
        for ids in ([1, 4, 4], [4, 7, 0]):
            optimizer.zero_grad()
            layer(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
        return layer.weight.detach(), optimizer

    ours, optimizer = embedding_run(lambda p: DeepSpeedCPUAdagrad(p, lr=0.1))
    with torch.sparse.check_sparse_tensor_invariants(True):
        theirs, _ = embedding_run(lambda p: torch.optim.Adagrad(p, lr=0.1))
    # Another order of operations than torch's sparse path: the last place of values of about 1.
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    squares = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg_sq"]
    assert squares.sum(1).nonzero().flatten().tolist() == [0, 1, 4, 7]


def test_adagrad_refuses_what_it_cannot_do_by_name() -> None:
    with pytest.raises(ValueError, match="amsgrad"):
        DeepSpeedCPUAdagrad(parameters(), amsgrad=True)
    p = torch.nn.Parameter(torch.ones(4, 2))
    p.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match=r"weight_decay = 0.1 with a sparse gradient"):
        DeepSpeedCPUAdagrad([p], weight_decay=0.1).step()


def lamb_reference(params: list[Any], steps: int, kw: dict[str, Any], scale: float = 1.0) -> list[torch.Tensor]:
    """Algorithm 2 of the paper in fp64, with clamped ratios."""
    p64 = [p.detach().double() for p in params]
    m, v = [torch.zeros_like(p) for p in p64], [torch.zeros_like(p) for p in p64]
    b1, b2 = 0.9, 0.99
    for step in range(steps):
        gen = torch.Generator().manual_seed(100 + step)
        grads = [torch.randn(p.shape, generator=gen).double() / scale for p in p64]
        limit = kw.get("max_grad_norm", 0)
        norm = torch.sqrt(sum((g**2).sum() for g in grads))  # type: ignore[arg-type]
        if limit and norm > limit:
            grads = [g * limit / norm for g in grads]
        for i, g in enumerate(grads):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g * g
            c1, c2 = (1 - b1 ** (step + 1), 1 - b2 ** (step + 1)) if kw.get("bias_correction", True) else (1, 1)
            v_hat = v[i] / c2
            root = (v_hat + 1e-6).sqrt() if kw.get("eps_inside_sqrt") else v_hat.sqrt() + 1e-6
            u = m[i] / c1 / root + kw.get("weight_decay", 0) * p64[i]
            ratio = 1.0
            if p64[i].norm() > 0 and u.norm() > 0:
                ratio = float((p64[i].norm() / u.norm()).clamp(kw.get("min_coeff", 0.01), kw.get("max_coeff", 10.0)))
            p64[i] -= 0.05 * ratio * u
    return p64


LAMB_CASES: tuple[dict[str, Any], ...] = (
    {},
    {"weight_decay": 0.1},
    {"bias_correction": False},
    {"eps_inside_sqrt": True},
    {"min_coeff": 0.3, "max_coeff": 0.5},
    {"max_grad_norm": 0.5},
)


@pytest.mark.parametrize("kw", LAMB_CASES, ids=str)
def test_lamb_follows_the_paper(kw: dict[str, Any]) -> None:
    params = parameters()
    with torch.no_grad():
        params[3].zero_()  # a norm of 0: ratio 1
    expected = lamb_reference(params, 4, kw)
    optimizer = train(lambda p: FusedLamb(p, lr=0.05, betas=(0.9, 0.99), eps=1e-6, **kw), params, steps=4)
    for p, e in zip(params, expected, strict=True):
        # fp32 norms and four steps against fp64.
        torch.testing.assert_close(p.detach().double(), e, rtol=5e-6, atol=1e-6)
    coeffs = optimizer.get_lamb_coeffs()  # type: ignore[attr-defined]
    assert len(coeffs) == len(params)
    assert all(kw.get("min_coeff", 0.01) <= c <= kw.get("max_coeff", 10.0) or c == 1 for c in coeffs)


def test_lamb_older_calling_form_scales_and_copies_out() -> None:
    params = parameters()
    expected = lamb_reference(params, 1, {}, scale=8.0)
    gen = torch.Generator().manual_seed(100)
    grads = [torch.randn(p.shape, generator=gen) for p in params]
    outputs = [torch.empty_like(p, dtype=torch.bfloat16) for p in params]
    FusedLamb(params, lr=0.05, betas=(0.9, 0.99), eps=1e-6).step(grads=grads, output_params=outputs, scale=8.0)
    for p, e, out in zip(params, expected, outputs, strict=True):
        torch.testing.assert_close(p.detach().double(), e, rtol=5e-6, atol=1e-6)  # fp32 against fp64
        assert torch.equal(out, p.detach().bfloat16())


def test_lamb_takes_a_known_norm_for_clipping() -> None:
    left, right = parameters(), parameters()
    for params in (left, right):
        for index, p in enumerate(params):
            p.grad = torch.full_like(p, index + 1.0)
    norm = torch.sqrt(sum((p.grad**2).sum() for p in left))  # type: ignore[arg-type]
    FusedLamb(left, max_grad_norm=0.5).step()
    FusedLamb(right, max_grad_norm=0.5).step(grad_norms=[norm])
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)  # the norm itself was summed in another order


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_interrupted_runs_continue_to_the_last_bit(dtype: torch.dtype) -> None:
    for build in (
        lambda p: FusedLamb(p, fp32_optimizer_states=True),
        lambda p: DeepSpeedCPULion(p),
        lambda p: DeepSpeedCPUAdagrad(p),
    ):
        unbroken, first = parameters(dtype), parameters(dtype)
        train(build, unbroken, steps=4)
        optimizer = train(build, first, steps=2)
        second = [torch.nn.Parameter(p.detach().clone()) for p in first]
        resumed = build(second)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(build, second, steps=2, optimizer=resumed, first=2)
        assert_same_bits(unbroken, second)


def test_lamb_refuses_wrong_settings() -> None:
    with pytest.raises(RuntimeError, match="amsgrad"):
        FusedLamb(parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="min_coeff = 2"):
        FusedLamb(parameters(), min_coeff=2, max_coeff=1)
    two = FusedLamb([{"params": [p]} for p in parameters(shapes=((2,), (3,)))])
    with pytest.raises(ValueError, match="one list per parameter group"):
        two.step(grads=[torch.ones(2), torch.ones(3)])
