"""Which optimizers the boundary may drive by rows: ours, as long as nobody has changed or hooked their step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.zero.fused_update import rows_of


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize("kind", (DeepSpeedCPUAdam, FusedAdam, DeepSpeedCPULion, FusedLion, DeepSpeedCPUAdagrad))
def test_our_optimizers_take_rows(kind: type) -> None:
    assert rows_of(kind(params())) is not None  # torch has wrapped their step by now


def test_a_changed_step_is_respected() -> None:
    class Noisy(DeepSpeedCPUAdam):
        def step(self, closure=None):
            return super().step(closure)

    assert rows_of(Noisy(params())) is None
    assert rows_of(torch.optim.AdamW(params())) is None
    hooked = DeepSpeedCPUAdam(params())
    handle = hooked.register_step_post_hook(lambda *_: None)
    assert rows_of(hooked) is None
    handle.remove()
    assert rows_of(hooked) is not None
