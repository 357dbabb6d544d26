"""Which parameters the engine's precision casts: the model as it was given decides about frozen ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.runtime.precision import PrecisionPolicy, cast_module


def adapted(adapter: torch.dtype) -> nn.Module:
    """A frozen base in bf16 and an adapter that trains."""
    model = nn.ModuleDict({"base": nn.Linear(3, 3).bfloat16(), "adapter": nn.Linear(3, 3).to(adapter)})
    model["base"].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("adapter", "policy", "base", "trained"),
    (
        (torch.float32, torch.float32, torch.bfloat16, torch.float32),  # mixed on purpose: runs as given
        (torch.bfloat16, torch.float32, torch.float32, torch.float32),  # all small: fp32 is asked for all of it
        (torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ),
)
def test_frozen_parameters(adapter: torch.dtype, policy: torch.dtype, base: torch.dtype, trained: torch.dtype) -> None:
    model = adapted(adapter)
    cast_module(model, PrecisionPolicy(model=policy))
    assert {param.dtype for param in model["base"].parameters()} == {base}
    assert {param.dtype for param in model["adapter"].parameters()} == {trained}


def test_a_model_that_only_answers_is_cast() -> None:
    model = adapted(torch.float32).requires_grad_(False)
    cast_module(model, PrecisionPolicy())
    assert {param.dtype for param in model.parameters()} == {torch.float32}
