"""Activations cut over model-parallel ranks: fewer bytes, the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint, checkpoint_statistics, configure
from deepspeed.runtime.activation_checkpointing.settings import Settings
from tests.unit.activation_checkpointing.test_options import Unit


@contextlib.contextmanager
def configured(**options: Any) -> Iterator[None]:
    configure(Unit(dist.get_rank(), dist.get_world_size(), dist.group.WORLD), **options)
    yield
    # The settings hold the unit, and with it the group.
    checkpointing._settings = Settings()


def gradients(via: Callable[..., Any], rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.3), nn.Tanh()).to(dtype) for _ in range(3)]
    leaf = torch.randn(rows, 7, dtype=dtype, requires_grad=True)
    x, mask = leaf * 1.0, torch.ones(rows, 1, dtype=dtype)
    for layer in layers:
        x = via(lambda t, m, layer=layer: layer(t) * m["mask"], x, {"mask": mask})
    x.float().square().sum().backward()
    return [leaf.grad, *(p.grad for layer in layers for p in layer.parameters())]


def call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


CASES = [
    (rows, dtype, contiguous)
    for rows, dtype in ((5, torch.float32), (8, torch.bfloat16))
    for contiguous in (False, True)
]


def same_bits_fewer_bytes() -> list[tuple[bool, int, int, int]]:
    found = []
    for rows, dtype, contiguous in CASES:
        with configured(partition_activations=True, contiguous_checkpointing=contiguous, num_checkpoints=3):
            checkpoint_statistics().clear()
            same = all(map(torch.equal, gradients(checkpoint, rows, dtype), gradients(call, rows, dtype)))
            statistics = checkpoint_statistics()
        found.append((same, statistics.input_nbytes, statistics.device_nbytes, statistics.num_blocks))
    return found


@pytest.mark.parametrize("world", (2, 3))
def test_same_bits_from_a_share_of_the_bytes(pool: Any, world: int) -> None:
    expected = []
    for rows, dtype, contiguous in CASES:
        share = -(-rows * 7 // world) + -(-rows // world)  # the activation and the mask, rounded up each
        full = 3 * (rows * 7 + rows) * dtype.itemsize
        expected.append((True, full, 3 * share * dtype.itemsize, 1 if contiguous else 0))
    assert pool.run(world, same_bits_fewer_bytes) == [expected] * world


def broadcastable(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.sum() * b


def small_and_large() -> tuple[int, int]:
    with configured(partition_activations=True):
        checkpoint(broadcastable, torch.ones(2, requires_grad=True) * 1.0, torch.ones(30) * 1.0).sum().backward()
        statistics = checkpoint_statistics()
    return statistics.input_nbytes, statistics.device_nbytes


@pytest.mark.world(3)
def test_tensors_with_fewer_elements_than_ranks_stay_whole(ranks: Any) -> None:
    assert ranks(small_and_large) == [(32 * 4, (2 + 10) * 4)] * 3


def different_inputs() -> str:
    x = torch.ones(4, 4)
    x[3, 1] += dist.get_rank()
    with configured(partition_activations=True):
        try:
            checkpoint(torch.sin, x.requires_grad_() * 1.0)
        except RuntimeError as error:
            text = str(error)
        else:
            text = "no error"
    return text


def test_inputs_that_differ_between_ranks_are_refused_on_all(ranks: Any) -> None:
    for rank, text in enumerate(ranks(different_inputs)):
        assert "partition_activations: tensor 0 (shape [4, 4], torch.float32)" in text
        assert f"rank {rank} of them" in text
        assert "switch partition_activations off" in text
