"""What people do with modules and parameters at stage 3, each against stage 0 on the same ranks, bit for bit.

Every block is released as soon as it may be, so that each use meets sharded parameters.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

DIM = 12
FORCED = {
    "reduce_bucket_size": 40,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 150,
}


def start(model: nn.Module, stage: int, **top: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, **(FORCED if stage == 3 else {})},
        **top,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def batch(step: int) -> Tensor:
    return torch.randn(2, DIM, generator=torch.Generator().manual_seed(17 * step + dist.get_rank()))


def weights(engine: Any) -> dict[str, Tensor]:
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: param.detach().clone() for name, param in named.items()}


Loss = Callable[[Any, Tensor], Tensor]


def run(make: Callable[[], nn.Module], loss: Loss, stage: int, **top: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = start(make(), stage, **top)
    for step in range(3):
        engine.backward(loss(engine, batch(step)))
        engine.step()
    found = weights(engine)
    engine.destroy()
    return found


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), f"{name}: {(first[name] - second[name]).abs().max()}"


def mean_square(engine: Any, x: Tensor) -> Tensor:
    return engine(x).pow(2).mean()


class Borrow(nn.Module):
    """Uses a parameter that another module holds, in a plain function call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.other = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        return F.linear(torch.tanh(self.other(x)), self.inner.weight)


class KeepsOnContext(torch.autograd.Function):
    """Keeps the parameter itself, not a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight, ctx.x = weight, x
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.weight, grad.t() @ ctx.x


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(KeepsOnContext.apply(torch.tanh(x), self.a.weight)))


def gathered_if_needed(weight: Tensor) -> Any:
    """As fused losses of clients have it: the parameter is gathered unless its status says that it is here."""
    if weight.ds_status is ZeroParamStatus.AVAILABLE:
        return contextlib.nullcontext()
    return deepspeed.zero.GatheredParameters([weight])


class AsksForTheStatus(torch.autograd.Function):
    """Saves the parameter, and asks the saved tensor for its status in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.sharded = hasattr(weight, "ds_status")
        ctx.save_for_backward(x, weight)
        with gathered_if_needed(weight) if ctx.sharded else contextlib.nullcontext():
            return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        assert not hasattr(x, "ds_status")
        with gathered_if_needed(weight) if ctx.sharded else contextlib.nullcontext():
            return grad @ weight, grad.t() @ x


class FusedHead(Borrow):
    def forward(self, x: Tensor) -> Tensor:
        return AsksForTheStatus.apply(torch.tanh(self.inner(x)) + 1.0, self.other.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIM, 7, num_layers=2, batch_first=True)
        self.gru = nn.GRUCell(7, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x.unsqueeze(1).repeat(1, 4, 1))
        return self.out(self.gru(hidden[:, -1]))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).unsqueeze(1).repeat(1, 3, 1)
        return self.attention(h, h, h, need_weights=False)[0]


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)  # saves its weight itself, where a Linear saves a view of it
        self.base.requires_grad_(False)
        self.norm.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(DIM, 2) / 4), nn.Parameter(torch.randn(2, DIM) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.tanh(self.base(x) + x @ self.down @ self.up)


class Checkpointed(nn.Module):
    """A frozen base with adapters under activation checkpointing of the given kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Lora() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.kind == "plain":
                x = block(x)
            elif self.kind == "ours":
                x = deepspeed.checkpointing.checkpoint(block, x)
            else:
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return x


@dataclass
class Bundle:
    value: Tensor
    note: str = "kept"


class Shapes(nn.Module):
    """Nested, keyword, non-tensor, dataclass and None arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def step(self, bundle: Bundle, *, flag: bool, nothing: None = None) -> Any:
        return {"deep": [(self.b(bundle.value), bundle.note)], "flag": flag, "nothing": nothing}

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.step(Bundle(torch.tanh(self.a(x))), **kwargs)


class Streams(nn.Module):
    """A forward that is a generator of layers' outputs, consumed outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        def produce() -> Any:
            h = x
            for layer in self.layers:
                h = torch.tanh(layer(h))
                yield h

        return produce()


def normalised() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(DIM, DIM)), nn.Tanh(), nn.Linear(DIM, 3))


def raw_sum(engine: Any, x: Tensor) -> Tensor:
    penalty = sum(param.pow(2).sum() for param in engine.module.parameters())
    return engine(x).pow(2).mean() + 0.01 * penalty


def outside_head(engine: Any, x: Tensor) -> Tensor:
    return F.linear(engine(x), engine.module.inner.weight).pow(2).mean()


def gradient_penalty(engine: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    out = engine(x).pow(2).mean()
    (inner,) = torch.autograd.grad(out, x, create_graph=True)
    return out + inner.pow(2).sum()


def functional(engine: Any, x: Tensor) -> Tensor:
    module = engine.module
    params = dict(module.named_parameters())
    return torch.func.functional_call(module, params, (x,)).pow(2).mean() + engine(x).mean()


def offloaded(engine: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return engine(x).pow(2).mean()


def kept_as_they_are(engine: Any, x: Tensor) -> Tensor:
    module = engine.module
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        outside = engine(x).pow(2).mean()

    def inside(module: nn.Module, args: Any) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        hooks.__enter__()
        module.kept = hooks

    def leave(module: nn.Module, args: Any, output: Tensor) -> None:
        module.kept.__exit__()

    handles = [module.register_forward_pre_hook(inside), module.register_forward_hook(leave)]
    loss = outside + engine(x).pow(2).mean()
    for handle in handles:
        handle.remove()
    return loss


def parts(engine: Any, x: Tensor) -> Tensor:
    return engine.module.other(torch.tanh(engine.module.inner(x))).pow(2).mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "borrowed parameter": (Borrow, mean_square),
    "function keeps the parameter": (OwnFunction, mean_square),
    "function asks for the status": (FusedHead, mean_square),
    "recurrent": (Recurrent, mean_square),
    "attention": (Attention, mean_square),
    "weight norm": (normalised, mean_square),
    "penalty over all parameters": (Borrow, raw_sum),
    "head used in the loss": (Borrow, outside_head),
    "double backward": (Borrow, gradient_penalty),
    "functional call": (Borrow, functional),
    "saved tensors on the host": (Borrow, offloaded),
    "hooks that keep what they get": (lambda: Checkpointed("plain"), kept_as_they_are),
    "parts called by themselves": (Borrow, parts),
    "nested results": (Shapes, lambda engine, x: engine(x, flag=True)["deep"][0][0].pow(2).mean()),
    "generator": (Streams, lambda engine, x: sum(h.pow(2).mean() for h in engine(x))),
    **{f"checkpointing {kind}": (lambda kind=kind: Checkpointed(kind), mean_square)
       for kind in ("plain", "reentrant", "not reentrant", "ours")},
}  # fmt: skip


def both_stages(name: str, **top: Any) -> None:
    make, loss = CASES[name]
    same(run(make, loss, 3, **top), run(make, loss, 0, **top))


@pytest.mark.parametrize("name", tuple(CASES))
def test_same_as_whole_parameters(ranks, name: str) -> None:
    ranks(both_stages, name)


def raw_backwards(name: str) -> None:
    make, loss = CASES[name]
    found = []
    for stage in (3, 2):  # several backwards: both reduce in each of them
        torch.manual_seed(0)
        engine = start(make(), stage)
        for step in range(2):
            for part in range(2):
                loss(engine, batch(2 * step + part)).backward()
            engine.step()
        found.append(weights(engine))
        engine.destroy()
    same(*found)


@pytest.mark.parametrize("name", ("borrowed parameter", "checkpointing reentrant", "penalty over all parameters"))
def test_backward_called_by_the_user(ranks, name: str) -> None:
    ranks(raw_backwards, name)


def exception_then_training() -> None:
    class Fails(Borrow):
        fail = False

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            if self.fail:
                raise ValueError("on purpose")
            return self.other(h)

    found = []
    for stage in (3, 0):
        torch.manual_seed(0)
        engine = start(Fails(), stage)
        for step in range(3):
            engine.module.fail = True
            with pytest.raises(ValueError, match="on purpose"):
                engine(batch(step))
            engine.module.fail = False
            engine.backward(mean_square(engine, batch(step)))
            engine.step()
        found.append(weights(engine))
        engine.destroy()
    same(*found)


def test_exception_in_forward_leaves_the_engine_usable(ranks) -> None:
    ranks(exception_then_training)


def two_engines() -> None:
    found = []
    for stage in (3, 0):
        torch.manual_seed(0)
        inner = start(Borrow(), stage)

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.head = nn.Linear(DIM, DIM)

            def forward(self, x: Tensor, other: Any) -> Tensor:
                return self.head(other(x))

        outer = start(Outer(), stage)
        for step in range(3):
            loss = outer(batch(step), inner).pow(2).mean()
            outer.backward(loss)
            inner.step()
            outer.step()
        found.append({**weights(inner), **weights(outer)})
        inner.destroy()
        outer.destroy()
    same(*found)


def test_one_engine_inside_another(ranks) -> None:
    ranks(two_engines)


def looks(tmp: str) -> None:
    torch.manual_seed(0)
    engine = start(Borrow(), 3)
    param = engine.module.inner.weight
    engine.backward(mean_square(engine, batch(0)))
    engine.step()
    assert param.shape == (DIM, DIM)
    assert param.numel() == DIM * DIM
    assert sum(p.numel() for p in engine.module.parameters()) == 2 * (DIM * DIM + DIM)
    assert isinstance(param, nn.Parameter)
    assert param.dtype is torch.float32
    assert param.is_contiguous()
    assert param.data.shape == (DIM, DIM)
    assert "inner.weight" in repr(param)
    with torch.no_grad():
        reads = (param.norm, lambda: param.data.sum(), lambda: param.detach() + 1, lambda: float(param[0, 0]))
        for read in reads:
            with pytest.raises(RuntimeError, match=r"'inner.weight'.*GatheredParameters"):
                read()
    for convert in (engine.module.half, lambda: engine.module.to(torch.float64), engine.module.bfloat16):
        with pytest.raises(RuntimeError, match=r"Borrow was to be converted from torch\.float32 .* stopped at"):
            convert()
        assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(engine.module)
    with pytest.raises(RuntimeError, match="save_16bit_model"):
        torch.save(engine.module.state_dict(), f"{tmp}/weights.pt")
    assert engine.module.to("cpu") is engine.module
    engine.destroy()
    assert type(param) is nn.Parameter
    assert torch.isfinite(param).all()
    copy.deepcopy(engine.module)


def test_what_a_sharded_parameter_tells(ranks, tmp_path) -> None:
    ranks(looks, str(tmp_path))


def writes() -> None:
    torch.manual_seed(0)
    engine = start(Borrow(), 3, bf16={"enabled": True})
    plain = Borrow().bfloat16()
    engine.module.load_state_dict(plain.state_dict())
    with torch.no_grad():
        engine.module.other.bias.fill_(0.25)
        engine.module.other.weight.data.zero_()
        engine.module.inner.bias.data = torch.full((DIM,), 3.0, dtype=torch.bfloat16)
    with deepspeed.zero.GatheredParameters(engine.module.inner.weight, modifier_rank=0):
        engine.module.inner.weight.data.add_(dist.get_rank() + 1)
    with deepspeed.zero.GatheredParameters([engine.module.other.weight.data]):  # stands for the parameter
        assert (engine.module.other.weight == 0).all()
    with deepspeed.zero.GatheredParameters(engine.module.inner.weight.data, modifier_rank=0):
        assert torch.equal(engine.module.inner.weight, plain.inner.weight + 1)
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        assert (engine.module.other.bias == 0.25).all()
        assert (engine.module.other.weight == 0).all()
        assert (engine.module.inner.bias == 3.0).all()
        assert torch.equal(engine.module.inner.weight, plain.inner.weight + 1)
    from deepspeed.utils import safe_get_full_fp32_param

    master = safe_get_full_fp32_param(engine.module.inner.weight)
    assert torch.equal(master, (plain.inner.weight + 1).float())
    assert (safe_get_full_fp32_param(engine.module.other.bias) == 0.25).all()
    engine.destroy()


def test_writes_reach_shards_and_masters(ranks) -> None:
    ranks(writes)


def most_gathered() -> tuple[int, int]:
    """The most elements gathered at once, in flight included, and the two largest blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(6)])
    # A layer is a block, and the prefetch is what it is by default.
    limits = {**FORCED, "reduce_bucket_size": DIM * (DIM + 1), "stage3_prefetch_bucket_size": 50_000_000}
    engine = start(model, 3, zero_optimization={"stage": 3, **limits})
    gatherer, most = engine.sharded_module.gatherer, 0
    launch = gatherer._launch

    def watched(*args: Any, **kwargs: Any) -> None:
        nonlocal most
        launch(*args, **kwargs)
        most = max(most, gatherer.live_numel)

    gatherer._launch = watched
    for step in range(3):
        engine.backward(mean_square(engine, batch(step)))
        engine.step()
    sizes = sorted(block.numel for block in gatherer.blocks)
    del gatherer._launch
    engine.destroy()
    return most, sum(sizes[-2:])


def test_two_blocks_are_gathered_at_most_when_none_is_kept(ranks) -> None:
    for most, two in ranks(most_gathered):
        assert 0 < most <= two


def stale_graph() -> None:
    torch.manual_seed(0)
    engine = start(Borrow(), 3)
    loss = mean_square(engine, batch(0))
    engine.backward(mean_square(engine, batch(1)))
    engine.step()
    with pytest.raises(RuntimeError, match="values they had in forward"):
        engine.backward(loss)
    engine.destroy()


def test_backward_of_a_graph_older_than_the_step_is_an_error(ranks) -> None:
    ranks(stale_graph)


def skipped_without_a_scale() -> None:
    engine = start(Borrow(), 3, bf16={"enabled": True})
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(handler)
    try:
        engine.backward(engine(batch(0).bfloat16()).float().pow(2).mean() * float("nan"))
        engine.step()
    finally:
        logger.removeHandler(handler)
    assert engine.skipped_steps == 1
    assert any(line.levelno == logging.WARNING and "step skipped" in line.getMessage() for line in lines)
    engine.destroy()


def test_a_step_skipped_without_a_loss_scale_is_a_warning(ranks) -> None:
    ranks(skipped_without_a_scale)
