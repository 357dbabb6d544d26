"""FusedAdam, FusedLion and FusedLamb on one GPU: one launch for all tensors, against torch. Skipped without a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepspeed.ops import multi_tensor
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]

DEVICE = "cuda"
CLASSES: dict[str, Any] = {"adam": FusedAdam, "lion": FusedLion, "lamb": FusedLamb}
SIZES = (0, 1, 33, 2048, 100_003, 8192, 7)


def parameters(dtype: torch.dtype, shift: int, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for numel in sizes:
        memory = torch.empty(numel + shift, dtype=dtype, device=DEVICE)
        made.append(torch.nn.Parameter(memory[shift:].copy_(torch.randn(numel, generator=generator))))
    return made


def train(optimizer: Any, params: list[Any], steps: int, dtype: torch.dtype) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for index, param in enumerate(params):
            grad = torch.randn(param.numel(), generator=generator).to(dtype).to(param.device)
            param.grad = None if (step + index) % 4 == 3 else grad
        optimizer.step()


@contextlib.contextmanager
def never_waiting() -> Iterator[None]:
    """An error for whatever would make the host wait for the device."""
    if DEVICE == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CLASSES)
def test_the_kernels_are_what_this_device_uses(name: str) -> None:
    assert multi_tensor.problem(f"fused_{name}", DEVICE) == ""


@pytest.mark.parametrize("shift", (0, 1), ids=["aligned", "shifted"])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", CLASSES)
def test_steps_equal_torch_on_the_device(name: str, dtype: torch.dtype, shift: int) -> None:
    found = []
    for by_kernels in (False, True):
        params = parameters(dtype, shift)
        groups = [{"params": params[:4]}, {"params": params[4:], "lr": 0.03, "weight_decay": 0.0}]
        optimizer = CLASSES[name](groups, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, fp32_optimizer_states=True)
        optimizer._on_device, optimizer._native = by_kernels, False
        train(optimizer, params, 4, dtype)
        found.append([param.detach().float() for param in params])
    # torch's kernels fuse and order operations otherwise; in 16 bits one rounding may follow.
    worst = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype]
    for right, seen in zip(*found, strict=True):
        torch.testing.assert_close(seen, right, rtol=worst, atol=worst)


@pytest.mark.parametrize("name", ("adam", "lion"))
def test_steps_have_the_bits_of_the_cpu(name: str) -> None:
    """Updates here and in host memory are the same numbers, as offloading them promises."""
    there = parameters(torch.float32, 0, (64, 4096, 100_000))
    here = [torch.nn.Parameter(param.detach().cpu()) for param in there]
    for params in (there, here):
        optimizer = CLASSES[name](params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
        train(optimizer, params, 4, torch.float32)
    for seen, right in zip(there, here, strict=True):
        whole = right.numel() - right.numel() % 32  # the rest is rounded in another order on CPUs
        assert torch.equal(seen.detach().cpu()[:whole], right.detach()[:whole])


def test_the_boundary_in_one_launch() -> None:
    masters = parameters(torch.float32, 0)
    copies = [torch.nn.Parameter(param.detach().clone()) for param in masters]
    grads = [torch.randn(param.numel(), device=DEVICE).bfloat16() for param in masters]
    weights = [torch.empty(param.numel(), device=DEVICE, dtype=torch.bfloat16) for param in masters]
    rows = list(zip(masters, grads, weights, strict=True))
    optimizer, reference = FusedAdam(masters, lr=0.01), FusedAdam(copies, lr=0.01)
    scale = torch.tensor(0.25, device=DEVICE)
    optimizer.update_from(rows, scale)  # makes states, compiles
    assert optimizer.takes_rows(rows)
    with never_waiting():
        optimizer.update_from(rows, scale)
    for _ in range(2):
        for copy, grad in zip(copies, grads, strict=True):
            copy.grad = grad.float() * 0.25
        reference.step()
    for master, copy, weight in zip(masters, copies, weights, strict=True):
        assert torch.equal(master, copy)
        assert torch.equal(weight, master.detach().bfloat16())


def test_the_historical_function_takes_lists() -> None:
    from deepspeed.ops.op_builder import FusedAdamBuilder

    params, copies = parameters(torch.float32, 0), parameters(torch.float32, 0)
    for param, copy in zip(params, copies, strict=True):
        param.grad = torch.ones_like(param)
        copy.grad = torch.ones_like(copy)
    FusedAdam(copies, lr=0.1, weight_decay=0.01).step()
    lists = [[p.grad for p in params], [p.detach() for p in params]]
    lists += [[torch.zeros_like(p) for p in params] for _ in range(2)]
    update = FusedAdamBuilder().load().multi_tensor_adam
    update(2048, torch.zeros(1, dtype=torch.int32, device=DEVICE), lists, 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.01)
    for param, copy in zip(params, copies, strict=True):
        assert torch.equal(param, copy)


@pytest.mark.parametrize("name", CLASSES)
def test_steps_never_wait_for_the_device(name: str) -> None:
    """Also with a learning rate that lives on the device, and that changes."""
    params = parameters(torch.float32, 0)
    lr = torch.tensor(0.01, device=DEVICE)
    optimizer = CLASSES[name](params, lr=0.01)
    optimizer.param_groups[0]["lr"] = lr
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    with never_waiting():
        for _ in range(3):
            lr.mul_(0.5)
            optimizer.step()
        lr.zero_()
        after = [param.detach().clone() for param in params]
        optimizer.step()
    for old, new, param in zip(before, after, params, strict=True):
        assert not old.numel() or not torch.equal(old, new)
        assert torch.equal(new, param.detach())


def test_more_than_two_to_the_31_elements() -> None:
    numel = (1 << 31) + 12_345
    if torch.cuda.mem_get_info()[0] < 6 * 2 * numel:
        pytest.skip("needs 26 GB of free device memory")
    param = torch.nn.Parameter(torch.ones(numel, device=DEVICE, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = FusedLion([param], lr=0.5)
    optimizer.step()
    assert bool((param.detach()[-20_000:] == 0.5).all())
    assert bool((param.detach()[:20_000] == 0.5).all())
    assert param.detach()[:: 1 << 16].float().mean().item() == 0.5
