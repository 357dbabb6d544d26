"""The native optimizer library: instruction sets, sanitizers, threads, fork, odd memory, infinities."""

from __future__ import annotations

import math
import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from deepspeed.native import build, isa
from deepspeed.native.build import NativeUnavailable, find_compiler
from deepspeed.ops import columns, native_kernels
from deepspeed.ops.adam import DeepSpeedCPUAdam

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
RUNNABLE = [variant.name for variant in isa.ISAS if isa.runnable(variant)]


@needs_compiler
@pytest.mark.parametrize("variant", RUNNABLE)
def test_every_instruction_set_this_cpu_has(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ISA", variant)
    best = variant == RUNNABLE[0]
    ours, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (1, 33, 5000)] for _ in range(2))
    optimizer = DeepSpeedCPUAdam(ours, lr=0.01, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, fused=True)
    for step in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.sin(torch.arange(mine.numel()) + step)
            other.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    assert optimizer._native is not False
    for mine, other in zip(ours, theirs, strict=True):
        if best:
            assert torch.equal(mine, other)
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    halves = torch.randn(1003).half()
    back = torch.empty(1003)
    native_kernels.cast([halves], [back])
    assert torch.equal(back, halves.float())
    native_kernels.cast([back * 1.37], [halves])
    assert torch.equal(halves, (back * 1.37).half())


@needs_compiler
@pytest.mark.parametrize("amsgrad", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_every_size_around_a_vector(dtype: torch.dtype, amsgrad: bool) -> None:
    """What does not fill a vector of torch's is rounded in another order, however wide our own vectors are."""
    random = torch.Generator().manual_seed(1)
    start = [torch.randn(n, generator=random).to(dtype) for n in (*range(1, 72), 4104, 32_792)]
    ours, theirs = ([torch.nn.Parameter(values.clone()) for values in start] for _ in range(2))
    optimizer = DeepSpeedCPUAdam(ours, lr=0.01, weight_decay=0.1, amsgrad=amsgrad, fp32_optimizer_states=False)
    reference = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, amsgrad=amsgrad, fused=True)
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = (30 * torch.randn(mine.numel(), generator=random)).to(dtype)
            other.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other), mine.numel()
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[mine][key], reference.state[other][key]), (key, mine.numel())


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        build.load("optimizers")
    except NativeUnavailable as problem:
        pytest.skip(str(problem))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.mark.usefixtures("three_threads")
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(200_001,), (3,), (40, 1000)] + [(777,)] * 50
    results = []
    for threads in (3, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        optimizer = DeepSpeedCPUAdam(params, lr=0.1)
        for _ in range(5):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        results.append([*params, torch.tensor(native_kernels.sumsq(params)[0], dtype=torch.float64)])
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("three_threads")
def test_idle_threads_use_no_time() -> None:
    values = torch.ones(1 << 20)
    assert native_kernels.sumsq([values]) == (float(1 << 20), False)
    began = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - began < 0.05


@pytest.mark.usefixtures("three_threads")
def test_a_forked_child_computes_on() -> None:
    values = torch.ones(1 << 20)
    assert native_kernels.sumsq([values])[0] == 1 << 20  # the threads exist now
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads
        child = os.fork()
    if child == 0:
        good = native_kernels.sumsq([values])[0] == 1 << 20 and native_kernels.sumsq([values])[0] == 1 << 20
        os._exit(0 if good else 1)
    deadline = time.monotonic() + 20
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert native_kernels.sumsq([values])[0] == 1 << 20


@pytest.mark.usefixtures("three_threads")
def test_callers_on_several_threads_do_not_meet() -> None:
    values = [torch.full((200_000 + k,), float(k)) for k in range(4)]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(10):
            found = list(callers.map(lambda tensor: native_kernels.sumsq([tensor])[0], values))
            assert found == [k * k * (200_000.0 + k) for k in range(4)]


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("amsgrad", (False, True))
def test_what_is_not_finite_spreads_as_in_torch(amsgrad: bool) -> None:
    odd = [math.inf, -math.inf, math.nan, 3e38, 1e-45, -0.0, 1e-30, 1.0]
    ours, theirs = (torch.nn.Parameter(torch.tensor((odd[3:] + odd[:3]) * 5 + [1.0, math.nan])) for _ in range(2))
    optimizer = DeepSpeedCPUAdam([ours], lr=0.1, amsgrad=amsgrad)
    reference = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0, amsgrad=amsgrad, fused=True)
    for step in range(4):
        grad = torch.tensor((odd[step:] + odd[:step]) * 5 + [math.nan, 1.0])
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
        for mine, other in (
            (ours, theirs),
            *((optimizer.state[ours][k], reference.state[theirs][k]) for k in ("exp_avg", "exp_avg_sq")),
        ):
            assert torch.equal(mine.isnan(), other.isnan())
            assert torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_what_is_not_finite_in_low_precision_spreads_as_in_torch(dtype: torch.dtype) -> None:
    odd = [math.inf, -math.inf, math.nan, torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4, -0.0, 1.0]
    start = torch.randn(16 * 50 + 7)
    start[100:107], start[-7:] = torch.tensor(odd), torch.tensor(odd)
    ours, theirs = (torch.nn.Parameter(start.to(dtype)) for _ in range(2))
    optimizer = DeepSpeedCPUAdam([ours], lr=0.1, fp32_optimizer_states=False)
    reference = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0, fused=True)
    for step in range(3):
        grad = torch.randn(start.numel())
        grad[300 + step], grad[500 + step], grad[102] = math.inf, math.nan, 1e-40
        ours.grad, theirs.grad = grad.to(dtype), grad.to(dtype)
        optimizer.step()
        reference.step()
        for mine, other in (
            (ours, theirs),
            *((optimizer.state[ours][k], reference.state[theirs][k]) for k in ("exp_avg", "exp_avg_sq")),
        ):
            assert torch.equal(mine.isnan(), other.isnan())
            assert torch.equal(mine.float().nan_to_num(7.0), other.float().nan_to_num(7.0))


@pytest.mark.usefixtures("three_threads")
def test_tensors_at_odd_addresses() -> None:
    memory = bytearray(4 * 1001 + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd = torch.frombuffer(memory, dtype=torch.float32, offset=1, count=1000)
    odd.copy_(torch.linspace(-1, 1, 1000))
    assert odd.data_ptr() % 4
    ours, theirs = torch.nn.Parameter(odd), torch.nn.Parameter(odd.clone())
    for param in (ours, theirs):
        optimizer = DeepSpeedCPUAdam([param])
        param.grad = torch.arange(1000.0)
        optimizer.step()
    assert torch.equal(ours, theirs)


TURNS = [32 * k + tail for k in range(8) for tail in (0, 3, 16)][1:]  # whole turns of a loop and what is left


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("decay", (0.0, 0.1))
def test_runs_of_a_few_turns(dtype: torch.dtype, decay: float) -> None:
    """The parts of a rule are done some turns apart, which takes a beginning and an end."""
    ours, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, n).to(dtype)) for n in TURNS] for _ in range(2))
    optimizer = DeepSpeedCPUAdam(ours, lr=0.01, weight_decay=decay, fp32_optimizer_states=False)
    reference = torch.optim.AdamW(theirs, lr=0.01, weight_decay=decay, fused=True)
    for step in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.sin(torch.arange(mine.numel()) + step).to(dtype)
            other.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other), mine.numel()
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[mine][key], reference.state[other][key]), (mine.numel(), key)


@pytest.mark.usefixtures("three_threads")
def test_the_boundary_in_runs_of_a_few_turns() -> None:
    ours, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in TURNS] for _ in range(2))
    optimizer, reference = (DeepSpeedCPUAdam(params, lr=0.01, weight_decay=0.1) for params in (ours, theirs))
    outs = [torch.empty(n, dtype=torch.bfloat16) for n in TURNS]
    for step in range(2):
        grads = [torch.sin(torch.arange(n) + step).bfloat16() for n in TURNS]
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.float() * 0.3
        reference.step()
        optimizer.update_from(list(zip(ours, grads, outs, strict=True)), 0.3)
    assert all(map(torch.equal, ours, theirs))
    assert all(torch.equal(out, param.bfloat16()) for out, param in zip(outs, theirs, strict=True))


# ---- columns


def _lists() -> list[list[Any]]:
    plain = [torch.randn(3, 4), torch.nn.Parameter(torch.randn(5)), torch.randn(()), torch.randn(8)[2:5]]
    odd = [torch.randn(3, 4).t(), torch.randn(4).double(), torch.randn(4).to_sparse(), torch.empty(4, device="meta")]
    halves = [torch.randn(6).bfloat16(), torch.randn(6).half()]
    wide = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    class_of_its_own: torch.Tensor = torch.randn(4).as_subclass(type("Own", (torch.Tensor,), {}))
    return [
        plain, plain[:1], halves[:1], plain + halves, [torch.randn(2, 0, 3), torch.randn(0)], [torch.randn(3, 1, 1, 1)],
        *([*plain, one] for one in [*odd, wide, torch.randn(4, dtype=torch.complex64).conj(), class_of_its_own]), [],
    ]  # fmt: skip


@pytest.mark.usefixtures("three_threads")
def test_a_column_is_what_the_tensors_say_one_by_one() -> None:
    if columns._Reader.made() is None:
        pytest.skip("torch has no exchange interface of DLPack")
    for tensors in _lists():
        fast, slow = columns.read(tensors), None
        if columns._PLAIN.issuperset(map(type, tensors)):
            slow = columns._read_each(tensors)
        assert fast == slow, tensors
    several = _lists()[0]
    assert columns.read(tuple(several)) == columns.read(several)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("key", ("exp_avg", "exp_avg_sq"))
def test_a_state_of_another_size_is_an_error_and_changes_nothing(key: str) -> None:
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    for param in params:
        param.grad = torch.ones(5)
    optimizer = DeepSpeedCPUAdam(params, lr=0.1)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    optimizer.state[params[1]][key] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"optimizer state \d of shape \(4,\), 4 elements, .*expected 5 elements"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    assert [optimizer.state[param]["step"] for param in params] == [1, 1, 1]
