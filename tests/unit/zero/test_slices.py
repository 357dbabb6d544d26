"""A leaf updated slice by slice gets the bits of one update; the norm has the same bits with or without a workspace."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from deepspeed.ops.adam.fused_adam import FusedAdam
from deepspeed.runtime.zero import norm
from deepspeed.runtime.zero.bucket import Workspace
from deepspeed.runtime.zero.norm import sum_of_squares
from deepspeed.runtime.zero.slices import can_slice, step_in_slices

SHAPE = (37, 29)
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True),
    "ours": lambda params: FusedAdam(params, lr=0.1),
}


@pytest.mark.parametrize("name", tuple(OPTIMIZERS))
def test_slices_have_the_bits_of_one_update(name: str) -> None:
    torch.manual_seed(0)
    start, other = torch.randn(SHAPE), torch.randn(3)
    grads = [torch.randn(SHAPE).bfloat16() for _ in range(4)]
    results = []
    for sliced in (False, True):
        leaf, idle = nn.Parameter(start.clone()), nn.Parameter(other.clone())
        base = OPTIMIZERS[name]([{"params": [idle]}, {"params": [idle.detach().clone(), leaf], "weight_decay": 0.01}])
        for step, grad in enumerate(grads):
            assert can_slice(base, leaf) == (step > 0)
            if sliced and step:
                leaf.grad = None
                step_in_slices(base, leaf, grad, torch.empty(96), 0.5)
            else:
                leaf.grad = grad.float().mul_(0.5)
                base.step()
        assert base.param_groups[1]["params"][1] is leaf
        assert set(base.state) == {leaf}
        assert torch.equal(idle, other)
        results.append({"leaf": leaf.detach(), **base.state[leaf]})
    once, by_slices = results
    assert once.keys() == by_slices.keys()
    for key, value in once.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(by_slices[key])), key


def test_a_failing_step_leaves_the_optimizer_whole() -> None:
    leaf = nn.Parameter(torch.ones(8))
    base = torch.optim.SGD([leaf], lr=0.1, momentum=0.9)
    leaf.grad = torch.ones(8)
    base.step()
    state = base.state[leaf]
    base.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(ArithmeticError("stop")))
    with pytest.raises(ArithmeticError, match="stop"):
        step_in_slices(base, leaf, torch.ones(8), torch.empty(3), 1.0)
    assert base.param_groups[0]["params"] == [leaf]
    assert base.state[leaf] is state


class _Shard:
    """What the norm asks of a group that is sharded."""

    sharded = True

    def __init__(self, grads: list[torch.Tensor]) -> None:
        self.grads = grads


@pytest.mark.parametrize("nbytes", (64, 1 << 17, 1 << 20, 1 << 23))
def test_the_norm_has_the_same_bits_in_any_workspace(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "_native_sum", lambda grads: None)  # where there is no kernel
    torch.manual_seed(0)
    grads = [torch.randn(numel).bfloat16() for numel in (5, 20_000, 150_000, 9_000, 400_000)]
    found = sum_of_squares([_Shard(grads)], Workspace(nbytes, 1, torch.device("cpu")))  # type: ignore[list-item]
    parts = [part for grad in grads for part in grad.split(1 << 17)]
    norms = torch.stack([torch.linalg.vector_norm(part.float()) for part in parts])
    assert found is not None
    assert found.item() == torch.linalg.vector_norm(norms).double().square().item()
    assert found.item() == pytest.approx(sum(grad.double().square().sum().item() for grad in grads), rel=1e-5)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("bad", (None, float("inf"), float("nan")))
def test_the_kernel_sums_what_torch_sums(dtype: torch.dtype, bad: float | None) -> None:
    torch.manual_seed(0)
    grads = [torch.randn(numel).to(dtype) for numel in (5, 0, 20_001)]
    if bad is not None:
        grads[2][7] = bad
    found = norm.sum_of_squares([_Shard(grads)], Workspace(64, 1, torch.device("cpu")))  # type: ignore[list-item]
    assert found is not None
    right = sum(grad.double().square().sum().item() for grad in grads)
    assert math.isnan(found.item()) if bad is not None and math.isnan(bad) else found.item() == pytest.approx(right)
