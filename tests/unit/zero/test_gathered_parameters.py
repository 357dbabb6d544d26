"""What ``GatheredParameters`` is given: parameters, or an error that says what else it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed

LINEAR = nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize(
    ("given", "named"),
    (
        ("weight", "found str"),
        (LINEAR, "found Linear"),
        (nn.ModuleList([LINEAR]), "found among them Linear"),
        (list(LINEAR.named_parameters()), "found among them tuple"),
        (LINEAR.state_dict(), "found among them str"),
        (3, "found int"),
    ),
)
def test_what_is_no_parameter_is_named(given: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        deepspeed.zero.GatheredParameters(given)


@pytest.mark.parametrize(
    "given",
    (LINEAR.weight, [LINEAR.weight, LINEAR.bias], LINEAR.parameters(), nn.ParameterList(LINEAR.parameters()), []),
)
def test_parameters_in_every_form(given: Any) -> None:
    with deepspeed.zero.GatheredParameters(given, modifier_rank=0), torch.no_grad():
        LINEAR.weight.fill_(1.0)
