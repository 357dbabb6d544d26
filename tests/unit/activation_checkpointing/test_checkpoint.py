"""A checkpointed function gives the bits of the plain one, for any arguments and results."""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import deepspeed.checkpointing as alias
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint, non_reentrant_checkpoint


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def training_bits(model: nn.Module, body: Callable[[Callable[..., Any], torch.Tensor], Any], via: Any) -> list[bytes]:
    """Bits of result, input gradient, parameter gradients and the next random number, through ``via``."""
    torch.manual_seed(11)
    model.zero_grad()
    x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
    out = body(via, x * 1.5)
    tensors = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, torch.Tensor)]
    sum(t.float().square().sum() for t in tensors if t.requires_grad).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert x.grad is not None
    found = [*(t.detach() for t in tensors), x.grad, *grads, torch.rand(3)]
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in found]


def assert_same_bits(model: nn.Module, body: Callable[[Callable[..., Any], torch.Tensor], Any]) -> None:
    plain = training_bits(model, body, call)
    assert training_bits(model, body, checkpoint) == plain
    assert len(plain) > 3


def block(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.4), nn.Linear(6, 6), nn.Dropout(0.2))


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


def test_same_bits_with_dropout_over_several_layers() -> None:
    model = nn.Sequential(block(0), block(1), block(2))

    def body(via: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = via(layer, x)
        return x

    assert_same_bits(model, body)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_same_bits_under_autocast(dtype: torch.dtype) -> None:
    model = block()

    def body(via: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return via(model, x)

    assert_same_bits(model, body)


def test_same_bits_when_checkpoints_are_nested() -> None:
    model = nn.Sequential(block(0), block(1))

    def body(via: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        def outer(y: torch.Tensor) -> torch.Tensor:
            return via(model[1], via(model[0], y)) + torch.rand(4, 6)

        return via(outer, x)

    assert_same_bits(model, body)


def test_any_arguments_and_results_pass_through() -> None:
    model = block()

    def function(
        none: None, number: int, x: torch.Tensor, nested: dict[str, Any], pair: Pair, *, scale: float, flags: Any
    ) -> dict[str, Any]:
        assert none is None
        assert pair.right is None
        assert flags == ["a", (True, 2.5)]
        y = model(x + nested["list"][0]) * scale + number
        return {"y": y, "list": [y * 2, None, "text"], "pair": Pair(pair.left + y, None), "mask": nested["mask"]}

    def body(via: Callable[..., Any], x: torch.Tensor) -> dict[str, Any]:
        nested = collections.OrderedDict(list=[x.sin()], mask=torch.tensor([True, False]), empty=torch.zeros(0))
        out = via(function, None, 3, x, nested, Pair(x.cos(), None), scale=0.5, flags=["a", (True, 2.5)])
        assert list(out) == ["y", "list", "pair", "mask"]
        assert out["list"][1:] == [None, "text"]
        assert isinstance(out["pair"], Pair)
        assert out["pair"].right is None
        return out

    assert_same_bits(model, body)


def test_function_without_tensor_arguments_trains_its_parameters() -> None:
    model = block()

    def body(via: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        return via(lambda: model(torch.ones(4, 6))) + x

    assert_same_bits(model, body)


def test_embedding_of_integers_gets_its_gradient() -> None:
    model = nn.Sequential(nn.Embedding(5, 6), block())

    def body(via: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        return via(model, torch.tensor([[0, 1], [4, 4]])).sum() + x

    assert_same_bits(model, body)


def test_tensor_given_twice_gets_both_gradients() -> None:
    model = block()

    def body(via: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        return via(lambda a, b: model(a) * b, x, x)

    assert_same_bits(model, body)


def test_several_backwards_through_a_retained_graph() -> None:
    model = block()
    x = torch.ones(2, 6)
    torch.manual_seed(3)
    out = checkpoint(model, x).sum()
    out.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    out.backward()
    for p, once in zip(model.parameters(), first, strict=True):
        assert torch.equal(p.grad, 2 * once)


def test_gradient_through_autograd_grad() -> None:
    model = block().eval()
    x = torch.ones(2, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(checkpoint(model, x).sum(), x)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(grad, expected)


def test_without_gradients_the_function_is_simply_called() -> None:
    with torch.no_grad():
        out = checkpoint(lambda a, flag=None: (a + 1, flag), torch.ones(2), flag="x")
    assert out[1] == "x"
    assert out[0].tolist() == [2.0, 2.0]
    assert checkpointing.checkpoint_statistics().num_checkpoints == 0


def test_random_state_is_not_repeated_when_asked() -> None:
    drawn: list[float] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        drawn.append(float(torch.rand(())))
        return x.sin()

    for preserve in (True, False):
        drawn.clear()
        checkpoint(function, torch.ones(2, requires_grad=True), preserve_rng_state=preserve).sum().backward()
        assert len(drawn) == 2
        assert (drawn[0] == drawn[1]) is preserve


@pytest.mark.parametrize("use_reentrant", (True, False))
def test_use_reentrant_makes_no_difference(use_reentrant: bool) -> None:
    model = block()

    def body(via: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        return via(model, x)

    plain = training_bits(model, body, call)

    def via(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, x, use_reentrant=use_reentrant)

    assert training_bits(model, body, via) == plain


def test_hooks_around_modules_stay_paired() -> None:
    model = block()
    calls: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, i, name=name: calls.append(f"in {name}"))
        module.register_forward_hook(lambda m, i, o, name=name: calls.append(f"out {name}"))
    checkpoint(model, torch.ones(1, 6, requires_grad=True)).sum().backward()
    assert len(calls) == 2 * 2 * len(list(model.modules()))
    for name, _ in model.named_modules():
        assert calls.count(f"in {name}") == calls.count(f"out {name}") == 2


def test_inner_activations_are_dropped_until_backward() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x.sin()
            alive.append(weakref.ref(x))
        return x.sum()

    out = checkpoint(function, torch.ones(8, requires_grad=True))
    gc.collect()
    assert [ref() is not None for ref in alive] == [False] * 3
    out.backward()


def test_graph_is_freed_with_the_result() -> None:
    kept = torch.ones(8)
    watched = weakref.ref(kept)
    out = checkpoint(block(), kept.view(1, 8)[:, :6])
    del kept, out
    gc.collect()
    assert watched() is None


def test_error_of_the_function_reaches_the_caller() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        checkpoint(function, torch.ones(1, requires_grad=True))


def test_random_state_is_restored_when_recomputation_fails() -> None:
    calls = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyError("second")
        return x.sin()

    out = checkpoint(function, torch.ones(1, requires_grad=True)).sum()
    torch.manual_seed(99)
    with pytest.raises(KeyError, match="second"):
        out.backward()
    assert torch.initial_seed() == 99
    after = torch.rand(1)
    torch.manual_seed(99)
    assert torch.equal(after, torch.rand(1))


def test_compiled_function_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tracer wraps the constructor of modules for the rest of the process; undone at the end of the test.
    monkeypatch.setattr(nn.Module, "__init__", nn.Module.__init__)
    model = block().eval()

    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x).sum()

    x = torch.ones(2, 6, requires_grad=True)
    torch.compile(step, backend="eager", fullgraph=True)(x).backward()
    y = torch.ones(2, 6, requires_grad=True)
    step(y).backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_alias_is_the_same_module() -> None:
    assert alias is checkpointing
    assert non_reentrant_checkpoint(lambda x: x + 1, torch.ones(1)).item() == 2.0
