"""Parameters of several dtypes in one model: each is updated once per step, whatever path its gradient takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.runtime.precision import PrecisionPolicy
from deepspeed.runtime.zero.optimizer import ZeroOptimizer
from deepspeed.runtime.zero.options import ZeroOptions
from deepspeed.runtime.zero.placement import Placement
from tests.harness.pool import WorkerPool


class _Mixed(nn.Module):
    """Two matrices, the one at `low` in bf16."""

    def __init__(self, low: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(48, 48, bias=False) for _ in range(2))
        self.layers[low].bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = layer(x.to(layer.weight.dtype))
        return x.float()


def _updates(stage: int, world: int, low: int, bucket: int) -> list[float]:
    """Of each matrix: the largest difference of its update from minus its gradient (SGD, rate 1), over two steps."""
    model = _Mixed(low)
    twin = _Mixed(low)
    base = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    optimizer = ZeroOptimizer(
        base,
        names={id(param): name for name, param in model.named_parameters()},
        placement=Placement.for_stage(stage, world),
        precision=PrecisionPolicy(model=torch.bfloat16),
        rank=torch.distributed.get_rank() if world > 1 else 0,
        world=world,
        options=ZeroOptions(bucket_numel=bucket),
    )
    masters = [param.detach().float() for param in twin.parameters()]
    momenta = [torch.zeros_like(master) for master in masters]
    worst = [0.0, 0.0]
    for step in range(3):
        x = torch.randn(4, 48, generator=torch.Generator().manual_seed(step))
        optimizer.backward(model(x).pow(2).mean())
        optimizer.step()
        twin(x).pow(2).mean().backward()
        for i, param in enumerate(twin.parameters()):
            assert param.grad is not None
            momenta[i].mul_(0.5).add_(param.grad.float())
            masters[i] = masters[i] - momenta[i]
            param.data.copy_(masters[i])
            param.grad = None
        for i, (ours, theirs) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
            worst[i] = max(worst[i], (ours.float() - theirs.float()).abs().max().item())
    return worst


@pytest.mark.parametrize("bucket", (64, 100_000))
@pytest.mark.parametrize("low", (0, 1))
@pytest.mark.parametrize(("stage", "world"), ((0, 1), (0, 2), (1, 2), (2, 2)))
def test_every_parameter_is_updated_once(pool: WorkerPool, stage: int, world: int, low: int, bucket: int) -> None:
    for worst in pool.run(world, _updates, stage, world, low, bucket):
        assert worst == [0.0, 0.0]
