"""Habits of people who know stage 3's rules little: each against stage 0 on the same ranks, kept and released.

What floats may differ by is the order of additions; a lost edit is orders of magnitude larger.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed

DIM = 12
RELEASED = {
    "reduce_bucket_size": 50,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
}
WAYS: dict[str, dict[str, Any]] = {"whole": {"stage": 0}, "kept": {"stage": 3}, "released": {"stage": 3, **RELEASED}}


def start(model: nn.Module, way: str, **top: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": WAYS[way],
        **top,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def batch(step: int) -> Tensor:
    return torch.randn(2, DIM, generator=torch.Generator().manual_seed(17 * step + dist.get_rank()))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 3))


def weights(engine: Any) -> dict[str, Tensor]:
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: param.detach().clone() for name, param in named.items()}


class Momentum(nn.Module):
    """A slow copy of a layer follows it in forward, written twice through one ``.data``, as momentum encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.slow.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return torch.tanh(self.fast(x)) + self.slow(x)


def follows(way: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = start(Momentum(), way)
    for step in range(4):
        engine.backward(engine(batch(step)).pow(2).mean())
        engine.step()
    found = weights(engine)
    engine.destroy()
    return found


def momentum() -> None:
    whole = follows("whole")
    for way in ("kept", "released"):
        found = follows(way)
        for name, value in whole.items():
            assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), f"{way} {name}"


def test_two_writes_through_one_alias(ranks) -> None:
    ranks(momentum)


class StartsInForward(nn.Module):
    """Sets a parameter from its first batch, as ActNorm and quantisers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.scale = nn.Linear(DIM, DIM), nn.Linear(DIM, 3), nn.Parameter(torch.zeros(DIM))
        self.started = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if not self.started:
            self.scale.data.copy_(torch.arange(DIM) * 0.1)
            self.started = True
        return self.head(x * self.scale)


def shrunk_by_hook() -> nn.Module:
    def shrink(module: Any, args: Any) -> None:
        module.weight.data.mul_(0.9)

    model = layers()
    model[2].register_forward_pre_hook(shrink)
    return model


def clamped_by_hook() -> nn.Module:
    def clamp(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)

    model = layers()
    model[2].register_forward_pre_hook(clamp)
    return model


def nothing(engine: Any, x: Tensor) -> None:
    """No habit before the step."""


def clip_all(engine: Any, x: Tensor) -> None:
    for param in engine.module.parameters():
        param.data.clamp_(-0.05, 0.05)


def infer(engine: Any, x: Tensor) -> None:
    with torch.inference_mode():
        engine(x)


def per_sample_gradients(engine: Any, x: Tensor) -> None:
    module = engine.module

    def loss(params: dict[str, Tensor], one: Tensor) -> Any:
        return torch.func.functional_call(module, params, (one.unsqueeze(0),)).pow(2).mean()

    params = dict(module.named_parameters())
    take = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    found = take(params, x)
    assert all(torch.isfinite(grads).all() for grads in found.values())
    for alike in ({k: p.detach() for k, p in params.items()}, {k: p.data for k, p in params.items()}):
        again = take(alike, x)
        assert all(torch.equal(again[name], grads) for name, grads in found.items())


class Tangents(nn.Module):
    """Forward-mode derivatives inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        pair: Any = torch.func.jvp(self.layers, (x,), (torch.ones_like(x),))
        return pair[0] + pair[1]


class Derivatives(nn.Module):
    """Reverse-mode derivatives inside of forward, with respect to the input and to weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = layers(), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        out, pull = torch.func.vjp(self.layers, x)
        slope = torch.func.jacrev(lambda y: self.scale(y).tanh().sum())(x)
        by_weight = torch.func.grad(lambda weight: (x @ weight.t()).pow(2).mean())(self.scale.weight)
        return out + pull(torch.ones_like(out))[0][:, :3] + slope[:, :3] + by_weight[:, :3]


HABITS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], None]]] = {
    "data written in forward": (StartsInForward, nothing),
    "data scaled by a hook": (shrunk_by_hook, nothing),
    "weight clamped by a hook": (clamped_by_hook, nothing),
    "data clipped between steps": (layers, clip_all),
    "inference mode between steps": (layers, infer),
    "gradients per sample": (layers, per_sample_gradients),
    "tangents": (Tangents, nothing),
    "derivatives": (Derivatives, nothing),
}


def trained(name: str, way: str) -> dict[str, Tensor]:
    make, before = HABITS[name]
    torch.manual_seed(0)
    engine = start(make(), way)
    for step in range(3):
        before(engine, batch(step + 100))
        engine.backward(engine(batch(step)).pow(2).mean())
        engine.step()
    found = weights(engine)
    engine.destroy()
    return found


def all_ways(name: str) -> None:
    expected = trained(name, "whole")
    for way in ("kept", "released"):
        torch.testing.assert_close(trained(name, way), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", tuple(HABITS))
def test_same_as_whole_parameters(ranks: Any, name: str) -> None:
    ranks(all_ways, name)


def copies() -> None:
    for way in ("kept", "released"):
        torch.manual_seed(0)
        engine = start(layers(), way)
        engine.backward(engine(batch(0)).pow(2).mean())
        engine.step()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            copied, unpickled = copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))
        if dist.get_rank() == 0:  # a copy is this rank's own: nothing in it may wait for the other
            assert torch.equal(copied(batch(1)), unpickled(batch(1)))
        with torch.no_grad():
            torch.testing.assert_close(engine(batch(1)), copied(batch(1)))
        engine.destroy()


def test_copies_of_gathered_modules_stand_alone(ranks: Any) -> None:
    ranks(copies)
