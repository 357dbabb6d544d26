"""A linear layer in tiles is the layer, on one device and sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime.zero import TiledLinear, TiledLinearReturnBias
from tests.harness.pool import on_ranks


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize(("in_splits", "out_splits"), ((1, 1), (3, 2), (7, 5), (2, 5)))
def test_tiles_compute_what_the_layer_does(in_splits: int, out_splits: int, bias: bool) -> None:
    whole = nn.Linear(7, 5, bias=bias)
    tiled = TiledLinear(7, 5, bias=bias, in_splits=in_splits, out_splits=out_splits, init_linear=whole)
    x = torch.randn(2, 3, 7)
    torch.testing.assert_close(tiled(x), whole(x))
    assert sum(param.numel() for param in tiled.parameters()) == sum(param.numel() for param in whole.parameters())


def test_parts_in_and_out() -> None:
    whole = nn.Linear(7, 5)
    tiled = TiledLinear(
        7, 5, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False, init_linear=whole
    )
    x = torch.randn(2, 7)
    outputs = tiled(list(torch.split(x, [4, 3], dim=-1)))
    assert [tuple(part.shape) for part in outputs] == [(2, 3), (2, 2)]
    torch.testing.assert_close(torch.cat(outputs, dim=-1), whole(x))
    with pytest.raises(RuntimeError, match="1 parts of the input; expected in_splits=2"):
        tiled([x])


class _Apart(nn.Linear):
    """Gives its bias beside its output."""

    def forward(self, x: torch.Tensor):  # type: ignore[override]
        return nn.functional.linear(x, self.weight), self.bias


def test_bias_beside_the_output() -> None:
    whole = nn.Linear(6, 4)
    tiled = TiledLinearReturnBias(6, 4, in_splits=2, out_splits=2, linear_cls=_Apart, init_linear=whole)
    x = torch.randn(3, 6)
    output, bias = tiled(x)
    torch.testing.assert_close(output + bias, whole(x))


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(RuntimeError, match="in_splits is 8; expected 1 to 7"):
        TiledLinear(7, 5, in_splits=8)
    with pytest.raises(ValueError, match=r"weight of shape \(5, 6\); expected \(5, 7\)"):
        TiledLinear(7, 5, init_linear=nn.Linear(6, 5))
    with pytest.raises(ValueError, match="the layer has no bias, this one has one"):
        TiledLinear(7, 5, init_linear=nn.Linear(7, 5, bias=False))


@on_ranks(2)
def test_tiles_are_gathered_one_by_one() -> None:
    torch.manual_seed(0)
    whole = nn.Linear(64, 64)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "stage3_max_live_parameters": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
        },
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        tiled = TiledLinear(64, 64, in_splits=2, out_splits=4, init_linear=whole)
    engine, *_ = deepspeed.initialize(model=tiled, config=config)
    gatherer = engine.optimizer.sharding.gatherer
    seen: list[int] = []
    for tile in (tile for row in tiled.linears for tile in row):
        tile.register_forward_hook(lambda *_: seen.append(gatherer.live_numel))
    x = torch.randn(2, 64)
    torch.testing.assert_close(engine(x), whole(x))
    assert max(seen) < 64 * 64 / 2  # two tiles at most, of eight
    engine.destroy()
