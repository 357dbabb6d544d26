"""Tiles of a sequence against the function of the whole sequence: values, gradients, ragged tails, memory, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.runtime.sequence_parallel import ulysses_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.0)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(x.shape))
        return self.down(self.drop(torch.tanh(self.up(x))))


def grads(module: nn.Module, *tensors: torch.Tensor) -> list[torch.Tensor]:
    found = [tensor.grad for tensor in (*tensors, *module.parameters())]
    assert all(grad is not None for grad in found)
    return found  # type: ignore[return-value]


def both(
    module: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], tiled: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
) -> None:  # fmt: skip
    """``tiled`` gives what ``run`` gives, and so do its gradients."""
    results = []
    module.double()  # so that another order of sums is told from a wrong sum
    x = x.double()
    for function in (run, tiled):
        module.zero_grad()
        given = x.clone().requires_grad_()
        out = function(given)
        (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum().backward()
        results.append([out.detach(), *grads(module, given)])
    for whole, part in zip(*results, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", ((2, 8, 4), (8, 4), (2, 7, 4), (1, 3, 5, 4), (2, 1, 4)), ids=str)
@pytest.mark.parametrize("shards", (1, 3, 100))
def test_mlp(shape: tuple[int, ...], shards: int) -> None:
    mlp = MLP()
    both(mlp, mlp, lambda x: TiledMLP.apply(MLP.forward, mlp, x, shards, list(mlp.parameters())), torch.randn(shape))
    assert mlp.seen[1][-2] == max(1, -(-shape[-2] // shards))


def test_dropout_is_the_same_in_backward() -> None:
    mlp = MLP()
    mlp.drop.p = 0.5
    x = torch.randn(2, 8, 4, requires_grad=True)
    torch.manual_seed(7)
    out = TiledMLP.apply(MLP.forward, mlp, x, 2)
    out.sum().backward()
    torch.manual_seed(7)
    again = x.detach().clone().requires_grad_()
    parts = torch.cat([mlp(tile) for tile in again.split(4, dim=1)], dim=1)
    parts.sum().backward()
    assert torch.equal(out, parts)
    assert again.grad is not None
    assert torch.equal(x.grad, again.grad)  # type: ignore[arg-type]


def test_a_hook_of_a_weight_runs_once() -> None:
    """Engines reduce a gradient when it is whole: once a backward, not once a tile."""
    mlp, fired = MLP(), []
    mlp.up.weight.register_post_accumulate_grad_hook(lambda param: fired.append(param.grad.clone()))
    TiledMLP.apply(MLP.forward, mlp, torch.randn(2, 9, 4), 3).sum().backward()
    assert len(fired) == 1


def test_nothing_of_a_tile_is_kept_between_forward_and_backward() -> None:
    mlp, kept = MLP(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        TiledMLP.apply(MLP.forward, mlp, torch.randn(1, 64, 4), 8)
    assert sum(kept) <= 64 * 4  # the tiles of the input; the block itself would keep five times as much
    with torch.no_grad():
        assert not TiledMLP.apply(MLP.forward, mlp, torch.randn(1, 64, 4), 8).requires_grad


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.lm_head = nn.Linear(4, 5)

    def loss(self, x: torch.Tensor, y: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        return F.cross_entropy(self.lm_head(x).view(-1, 5), y.view(-1), reduction=reduction)

    def masked(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.lm_head(x)[mask], y[mask])


def labels(ignored: int = 0) -> torch.Tensor:
    y = torch.randint(0, 5, (2, 7), generator=torch.Generator().manual_seed(4))
    y.view(-1)[:ignored] = -100
    return y


@pytest.mark.parametrize("ignored", (0, 3, 9))  # 9: the first tile of five counts nothing, the second but one
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_loss(reduction: str, ignored: int) -> None:
    head, y = Head(), labels(ignored)

    def tile(self: Head, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(x, y, reduction)

    both(
        head,
        lambda x: head.loss(x, y, reduction),
        lambda x: TiledFusedLogitsLoss.apply(tile, head, x, y, None, 3, [head.lm_head.weight], reduction),
        torch.randn(2, 7, 4),
    )


def test_loss_with_a_mask() -> None:
    head, y = Head(), labels()
    mask = torch.arange(14).view(2, 7) % 3 != 0
    both(
        head,
        lambda x: head.masked(x, y, mask),
        lambda x: TiledFusedLogitsLoss.apply(Head.masked, head, x, y, mask, 4),
        torch.randn(2, 7, 4),
    )


def test_any_function_of_keywords() -> None:
    mlp, k = MLP(), torch.randn(2, 9, 4, dtype=torch.float64)

    def scaled(x: torch.Tensor, k: torch.Tensor, none: None, factor: float) -> torch.Tensor:
        assert none is None
        return mlp(x) * k * factor

    names = (["x", "k", "none"], ["factor"], "x", [])
    x = torch.randn(2, 9, 4)
    both(
        mlp,
        lambda x: scaled(x, k, None, 3.0),
        lambda x: SequenceTiledCompute.apply(scaled, 9, 4, *names, 1, None, x, k, None, 3.0),
        x,
    )
    both(
        mlp,
        lambda x: scaled(x, k, None, 3.0).mean(),
        lambda x: SequenceTiledCompute.apply(
            lambda **kw: scaled(**kw).mean(), 9, 4, *names, None, "mean", x, k, None, 3.0
        ),
        x,
    )


@pytest.mark.parametrize(
    ("call", "words"),
    (
        (lambda: TiledMLP.apply(MLP.forward, MLP(), torch.ones(2, 4), 0), "found 0, expected the number of tiles"),
        (lambda: TiledMLP.apply(MLP.forward, MLP(), torch.ones(4), 2), r"\(4,\), expected \(..., sequence, hidden\)"),
        (
            lambda: TiledFusedLogitsLoss.apply(Head.loss, Head(), torch.ones(2, 7, 4), labels(), None, 2, [], "max"),
            'found \'max\', expected "mean" or "sum"',
        ),
        (
            lambda: TiledFusedLogitsLoss.apply(Head.loss, Head(), torch.ones(2, 6, 4), labels(), None, 2),
            r"y of shape \(2, 7\), expected \(2, 6\)",
        ),
        (lambda: SequenceTiledCompute.apply(len, 4, 2, ["x"], [], "x", [], 1, None), "found 0 values"),
        (lambda: SequenceTiledCompute.apply(len, 4, 2, ["x"], [], "x", [], 1, "sum", torch.ones(1, 4)), "one of them"),
        (
            lambda: SequenceTiledCompute.apply(len, 4, 2, ["x"], [], "x", [], 1, None, torch.ones(1, 5)),
            r"x of shape \(1, 5\), expected 4 in dim 1",
        ),
    ),
)
def test_errors(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_the_rest_of_the_module_is_named() -> None:
    with pytest.raises(AttributeError, match="belongs to sequence parallelism"):
        ulysses_sp.UlyssesSPAttentionHF  # noqa: B018
