"""Hooks on the outputs of a forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.runtime.utils import (
    check_internal_apis_for_count_used_parameters,
    count_used_parameters_in_backward,
    maybe_loss_for_backward,
    register_output_backward_hooks,
)


def outputs(layer: nn.Linear) -> dict[str, Any]:
    x = torch.ones(1, 2)
    return {"a": layer(x), "b": [layer(x).sum(), None, 3], "c": (torch.ones(1),), "d": layer.weight}


def test_called_once_then_for_each_gradient_which_it_may_change() -> None:
    layer = nn.Linear(2, 2)
    calls: list[str] = []

    def per_tensor(grad: torch.Tensor) -> torch.Tensor:
        calls.append(f"tensor {list(grad.shape)}")
        return grad * 2

    out = outputs(layer)
    manager = register_output_backward_hooks(out, lambda: calls.append("once"), per_tensor)
    assert len(manager.hook_handles) == 2  # leaves and tensors without a graph get none
    out["a"].sum().backward()
    out["b"][0].backward()
    assert calls == ["once", "tensor [1, 2]", "tensor []"]
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [4.0, 4.0]


def test_once_comes_before_any_gradient_of_the_model() -> None:
    layer = nn.Linear(2, 2)
    order: list[str] = []
    layer.weight.register_hook(lambda grad: order.append("parameter"))
    out = layer(torch.ones(1, 2))
    register_output_backward_hooks((out,), lambda: order.append("once"))
    out.sum().backward()
    assert order == ["once", "parameter"]


def test_reset_and_remove() -> None:
    layer = nn.Linear(2, 2)
    calls: list[str] = []
    out = layer(torch.ones(1, 2)).sum()
    manager = register_output_backward_hooks(out, lambda: calls.append("once"))
    out.backward(retain_graph=True)
    out.backward(retain_graph=True)
    assert calls == ["once"]
    manager.reset()
    out.backward(retain_graph=True)
    assert calls == ["once", "once"]
    manager.remove_hooks()
    manager.reset()
    out.backward()
    assert calls == ["once", "once"]
    assert manager.hook_handles == []


def test_what_may_be_a_loss() -> None:
    value = torch.ones((), requires_grad=True)
    assert maybe_loss_for_backward(value * 2)
    assert maybe_loss_for_backward((value * 2).view(1))
    assert not maybe_loss_for_backward(value)
    assert not maybe_loss_for_backward(torch.ones(()))
    assert not maybe_loss_for_backward(value * torch.ones(2))
    assert not maybe_loss_for_backward(3.0)


def test_count_of_parameters_that_get_a_gradient() -> None:
    assert check_internal_apis_for_count_used_parameters()
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    params = [*used.parameters(), *unused.parameters(), frozen]
    with pytest.raises(RuntimeError, match="no backward pass is under way"):
        count_used_parameters_in_backward(params)
    counts: list[int] = []
    loss = used(torch.ones(1, 2)).sum()
    loss.register_hook(lambda grad: counts.append(count_used_parameters_in_backward(params)))
    loss.backward()
    assert counts == [2]
