"""Small models with the shapes and habits that break distributed training, and their data.

Owns: deterministic models (same weights for the same seed), their batches (a function of step and rank alone, so that
any world size can be replayed in one process) and their losses.
Invariant: nothing here draws from the global random state after `build`, and no model has buffers that training
changes, so a run on several ranks has one right answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelSpec:
    """A model, its data and its loss. `loss(model, batch, step, rank)` may depend on step and rank (branches)."""

    name: str
    build_module: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator, int], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...], int, int], Tensor]

    def build(self, seed: int = 0) -> nn.Module:
        """A new module with the weights of `seed`; the global random state is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build_module()

    def batch(self, step: int, rank: int, rows: int = 2) -> tuple[Tensor, ...]:
        """The micro-batch number `step` of `rank`.  # each tensor: (rows, ...)"""
        generator = torch.Generator().manual_seed(100_003 * step + 101 * rank + 7)
        return self.make_batch(generator, rows)


def _dtype(model: nn.Module) -> torch.dtype:
    """Dtype the inputs must have: that of the first floating parameter."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def _regression(in_dim: int, out_dim: int) -> Callable[[torch.Generator, int], tuple[Tensor, ...]]:
    def make(generator: torch.Generator, rows: int) -> tuple[Tensor, ...]:
        return torch.randn(rows, in_dim, generator=generator), torch.randn(rows, out_dim, generator=generator)

    return make


def _mse(model: nn.Module, batch: tuple[Tensor, ...], step: int, rank: int) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x.to(_dtype(model))).float(), y)


def _mse_with_place(model: nn.Module, batch: tuple[Tensor, ...], step: int, rank: int) -> Tensor:
    """For models whose forward takes `(x, step, rank)`."""
    x, y = batch
    return F.mse_loss(model(x.to(_dtype(model)), step, rank).float(), y)


def _tokens(vocabulary: int, length: int) -> Callable[[torch.Generator, int], tuple[Tensor, ...]]:
    def make(generator: torch.Generator, rows: int) -> tuple[Tensor, ...]:
        return (torch.randint(0, vocabulary, (rows, length + 1), generator=generator),)

    return make


def _next_token(model: nn.Module, batch: tuple[Tensor, ...], step: int, rank: int) -> Tensor:
    (tokens,) = batch
    logits = model(tokens[:, :-1])  # (rows, length, vocabulary)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Tied(nn.Module):
    """Token model whose output head is the embedding itself."""

    def __init__(self, vocabulary: int = 23, dim: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.mix = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


class Shared(nn.Module):
    """One submodule used three times in a forward, so its gradient arrives in three parts."""

    def __init__(self, dim: int = 9) -> None:
        super().__init__()
        self.block = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.block(x))
        return self.out(x)


class Unused(nn.Module):
    """Layers that no forward ever touches, in front of, between and behind the used ones."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.idle_first = nn.Linear(dim, dim)
        self.used = nn.Linear(dim, dim)
        self.idle_middle = nn.Parameter(torch.randn(11))
        self.out = nn.Linear(dim, 3)
        self.idle_last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.used(x)))


class Branches(nn.Module):
    """Which layers run depends on the step (all ranks alike) and on the rank (each its own)."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.trunk = nn.Linear(dim, dim)
        self.even = nn.Linear(dim, dim)
        self.odd = nn.Linear(dim, dim)
        self.only_rank_0 = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, 4)

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        x = torch.tanh(self.trunk(x))
        x = x + (self.even(x) if step % 2 == 0 else self.odd(x))
        if rank == 0:
            x = x + self.only_rank_0(x)
        return self.out(x)


class Lora(nn.Module):
    """A frozen base with a trainable low-rank pair."""

    def __init__(self, dim: int = 10, low: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(dim, low) / math.sqrt(dim))
        self.up = nn.Parameter(torch.zeros(low, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down @ self.up


class Degenerate(nn.Module):
    """Zero-size parameters (one used, one not), a 0-dim parameter and fewer elements than ranks in some."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 5))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.never = nn.Parameter(torch.zeros(0))
        self.line = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) * self.gain + self.nothing.sum()


class LlamaBlock(nn.Module):
    """Pre-norm attention with rotary positions, then a gated MLP."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, dim = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (_rotate(part, cos, sin) for part in (q, k))  # (rows, heads, length, head_dim)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, length, dim))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class TinyLlama(nn.Module):
    """A decoder of the Llama shape, small enough for thousands of steps in a test session."""

    def __init__(self, vocabulary: int = 29, dim: int = 12, heads: int = 2, hidden: int = 20, layers: int = 2) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        half = self.head_dim // 2
        angles = torch.outer(torch.arange(tokens.shape[1]), 10_000.0 ** (-torch.arange(half) / half))
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)  # (length, head_dim / 2)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class Embeddings(nn.Module):
    """Two embeddings, one with sparse gradients when asked, and a small head."""

    def __init__(self, sparse: bool = False, vocabulary: int = 37, dim: int = 5) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, dim, sparse=sparse)
        self.places = nn.Embedding(6, dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(tokens) + self.places(torch.arange(tokens.shape[1]))))


def mlp(*dims: int) -> nn.Module:
    """Linear layers of the given widths with tanh between them."""
    layers: list[nn.Module] = []
    for into, out in itertools.pairwise(dims):
        layers += [nn.Linear(into, out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


SPECS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec("mlp", lambda: mlp(16, 16, 16, 16), _regression(16, 16), _mse),
        ModelSpec("odd", lambda: mlp(17, 13, 7), _regression(17, 7), _mse),
        ModelSpec("tied", Tied, _tokens(23, 5), _next_token),
        ModelSpec("shared", Shared, _regression(9, 5), _mse),
        ModelSpec("unused", Unused, _regression(7, 3), _mse),
        ModelSpec("branches", Branches, _regression(8, 4), _mse_with_place),
        ModelSpec("lora", Lora, _regression(10, 10), _mse),
        ModelSpec("degenerate", Degenerate, _regression(3, 2), _mse),
        ModelSpec("llama", TinyLlama, _tokens(29, 6), _next_token),
        ModelSpec("embeddings", Embeddings, _tokens(37, 6), _next_token),
        ModelSpec("sparse", lambda: Embeddings(sparse=True), _tokens(37, 6), _next_token),
    )
}
