"""Models without values: built on the meta device, sharded without ever being whole, filled afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from tests.distributed.test_stage3_use import DIM, Borrow, batch, mean_square, same, start, weights


def filled_afterwards() -> None:
    with torch.device("meta"):
        module = Borrow()
    held = list(module.parameters())
    engine = start(module, 3)
    assert all(a is b for a, b in zip(held, module.parameters(), strict=True))
    with deepspeed.zero.GatheredParameters(module.inner.weight):
        assert module.inner.weight.isnan().all()
    torch.manual_seed(0)
    values = Borrow()
    module.load_state_dict(values.state_dict())
    torch.manual_seed(0)
    other = start(Borrow(), 0)
    for step in range(2):
        for each in (engine, other):
            each.backward(mean_square(each, batch(step)))
            each.step()
    same(weights(engine), weights(other))
    engine.destroy()
    other.destroy()


def test_a_meta_model_trains_once_it_is_loaded(ranks) -> None:
    ranks(filled_afterwards)


def refused() -> None:
    with torch.device("meta"):
        module = Borrow()
    with pytest.raises(ValueError, match=r"'inner.weight' is on the meta device.*use stage 3"):
        start(module, 2)

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(DIM, DIM, device="meta")
            self.register_buffer("table", torch.empty(3, device="meta"))

    with pytest.raises(ValueError, match=r"buffer 'table' is on the meta device"):
        start(Table(), 3)


def test_what_cannot_be_filled_is_refused_by_name(ranks) -> None:
    ranks(refused)
