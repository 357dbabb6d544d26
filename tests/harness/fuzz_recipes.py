"""Random training programs as plain data: what a recipe is, how one is drawn from a seed, how one gets simpler.

Owns: `Recipe` and its parts, the model of a recipe, `draw`, `shrink`. Running a recipe is `fuzz.py`.
Invariant: a recipe is frozen data; `eval(repr(recipe)) == recipe`.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Net:
    """Shape of a model. `extras`: parameters added into the output by their mean; `idle`: never used."""

    dims: tuple[int, ...] = (5, 7, 3)
    bias: bool = True
    repeat_first: int = 0  # a square layer shared by this many uses in front
    extras: tuple[tuple[int, ...], ...] = ()
    idle: tuple[tuple[int, ...], ...] = ()
    frozen: tuple[int, ...] = ()  # positions in named_parameters order that start frozen
    checkpoint: str = ""  # the layers under activation checkpointing: "reentrant", "not" (reentrant), "nested"
    borrow: bool = False  # the first layer's weight is used once more, by nobody's forward


@dataclass(frozen=True)
class Part:
    """One backward: the mean loss of `forwards` forwards. `skip[rank]`: layers that this rank leaves out."""

    forwards: int = 1
    skip: tuple[tuple[int, ...], ...] = ()
    raw: bool = False  # loss.backward() instead of engine.backward(loss)


@dataclass(frozen=True)
class Op:
    """One call or group of calls. `kind`:

    micro      the parts, then engine.step()
    no_sync    the parts inside engine.no_sync()
    zero_grad  engine.zero_grad()
    evaluate   a forward in eval mode without gradients
    freeze, unfreeze   requires_grad of parameter `index`
    edit       weights of parameter `index` multiplied in place by `factor`
    rate       learning rate of every group multiplied by `factor`
    reload     save a checkpoint, build a new engine over another model, load it
    """

    kind: str
    parts: tuple[Part, ...] = ()
    index: int = 0
    factor: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """A whole training program."""

    seed: int = 0
    world_size: int = 2
    net: Net = Net()
    stage: int = 0
    precision: str = "fp32"
    accum: str = ""  # data_types.grad_accum_dtype
    accumulation: int = 1
    manual_boundary: bool = False
    clip: float = 0.0
    optimizer: str = "adamw"
    client_optimizer: bool = False
    num_groups: int = 1
    zero: tuple[tuple[str, Any], ...] = ()
    offload: str = ""  # a kind of `offload.offload_sections`
    ops: tuple[Op, ...] = field(default=(Op("micro", (Part(),)),))

    @property
    def has_late_gradients(self) -> bool:
        """A gradient may come after its bucket has gone and travel alone, so its sum is taken in another order.

        Happens where buckets leave during backward and a layer is used in one backward and not in another, or gets its
        gradient in parts (re-entrant checkpointing in several forwards). Such a recipe has one right answer only up to
        rounding, so it is drawn in fp32 and with SGD, which does not magnify it.
        """
        early = self.stage > 0 or dict(self.zero).get("overlap_comm", False)
        varied = any(part.skip for op in self.ops for part in op.parts) or any(op.kind == "unfreeze" for op in self.ops)
        several = any(part.forwards > 1 for op in self.ops for part in op.parts)
        in_parts = self.net.checkpoint == "reentrant" and several  # each part is rounded by itself on one rank, too
        buckets = self.world_size > 1 or self.offload.endswith(("param", "all"))
        return in_parts or (buckets and early and varied)


class FuzzNet(nn.Module):
    """The model of a `Net`."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.shared = nn.Linear(net.dims[0], net.dims[0]) if net.repeat_first else None
        self.repeat = net.repeat_first
        self.checkpoint, self.borrow = net.checkpoint, net.borrow
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=net.bias) for a, b in itertools.pairwise(net.dims))
        self.extras = nn.ParameterList(torch.randn(shape) for shape in net.extras)
        self.idle = nn.ParameterList(torch.randn(shape) for shape in net.idle)
        for index, param in enumerate(self.parameters()):
            param.requires_grad_(index not in net.frozen)

    def forward(self, x: Tensor, skip: tuple[int, ...] = ()) -> Tensor:
        """`skip`: layers replaced by cutting or zero-padding to their width.  # (rows, dims[0]) -> (rows, dims[-1])"""
        for _ in range(self.repeat):
            assert self.shared is not None
            x = torch.tanh(self.shared(x))
        x = self._layers(x, skip)
        if self.borrow:
            x = x + self.layers[0].get_parameter("weight").sum()
        for extra in self.extras:
            x = x + (extra.mean() if extra.numel() else extra.sum())
        return x


    def _layers(self, x: Tensor, skip: tuple[int, ...]) -> Tensor:
        def run(x: Tensor, first: int) -> Tensor:
            for index, layer in enumerate(self.layers[first:], first):
                width = layer.out_features
                if index in skip:
                    x = F.pad(x, (0, width - x.shape[1]))
                elif self.checkpoint and index:
                    x = checkpoint(lambda h, layer=layer: torch.tanh(layer(h)), x, use_reentrant=reentrant)
                else:
                    x = torch.tanh(layer(x))
            return x

        reentrant = self.checkpoint == "reentrant"
        if self.checkpoint != "nested":
            return run(x, 0)
        return checkpoint(run, x, 0, use_reentrant=False)


def build(net: Net, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FuzzNet(net)


# -- drawing -------------------------------------------------------------------------------------------------------


def draw(seed: int) -> Recipe:
    """The recipe of `seed`."""
    rng = random.Random(seed)
    world_size = rng.choice((1, 2, 2, 3, 4))
    net = _draw_net(rng)
    accumulation = rng.choice((1, 1, 2, 3, 4))
    precision = rng.choice(("fp32", "fp32", "bf16", "bf16", "fp16", "fp16_dynamic"))
    recipe = Recipe(
        seed=seed,
        world_size=world_size,
        net=net,
        stage=rng.choice((0, 1, 2)),
        precision=precision,
        accum=rng.choice(("", "fp32")) if precision == "bf16" else "",
        accumulation=accumulation,
        manual_boundary=rng.random() < 0.2,
        clip=rng.choice((0.0, 0.0, 0.3)),
        optimizer=rng.choice(("adamw", "sgd")),
        client_optimizer=rng.random() < 0.3,
        num_groups=rng.choice((1, 1, 2, 3)),
        zero=_draw_zero(rng),
        ops=_draw_ops(rng, net, world_size, accumulation),
    )
    if recipe.has_late_gradients:
        recipe = replace(recipe, precision="fp32", accum="", optimizer="sgd")
    if recipe.precision == "fp16_dynamic" and any(part.raw for op in recipe.ops for part in op.parts):
        # Gradients that are divided late are larger until then and overflow at another scale.
        recipe = replace(recipe, precision="fp16")
    return recipe


def draw_stage_3(seed: int) -> Recipe:
    """The recipe of `seed` at stage 3, with the settings and the control flow that matter there.

    A layer that one rank leaves out is left out by all, unless everything is one block: else ranks would gather
    different parameters, which is an error at this stage.
    """
    recipe = draw(seed)
    rng = random.Random(-1 - seed)
    choices: dict[str, tuple[Any, ...]] = {
        "reduce_bucket_size": (None, 8, 50, 200),
        "overlap_comm": (None, True, False),
        "stage3_max_live_parameters": (None, 0, 0, 100, 400),
        "stage3_max_reuse_distance": (None, 0, 60, 300),
        "stage3_param_persistence_threshold": (None, 0, 0, 5, 30),
        "stage3_prefetch_bucket_size": (None, 0, 30, 200),
        "stage3_module_granularity_threshold": (None, None, 40),
    }
    drawn = {key: rng.choice(values) for key, values in choices.items()}
    zero = tuple((key, value) for key, value in drawn.items() if value is not None)
    net = replace(recipe.net, checkpoint=rng.choice(("", "", "reentrant", "not", "nested")), borrow=rng.random() < 0.3)
    if net.checkpoint == "reentrant":
        net = replace(net, frozen=())  # a checkpointed part without a trainable input has no graph
        recipe = replace(recipe, ops=tuple(op for op in recipe.ops if op.kind != "evaluate"))  # torch warns there
    ops = recipe.ops if not zero else tuple(_alike(op, recipe.world_size) for op in recipe.ops)
    recipe = replace(recipe, stage=3, zero=zero, net=net, ops=ops)
    if any(op.kind == "no_sync" for op in ops):
        recipe = replace(recipe, accum="")  # held back in fp32, sent in bf16: rounded once more than the reference does
    if recipe.has_late_gradients:
        recipe = replace(recipe, precision="fp32", accum="", optimizer="sgd")
    return recipe


def draw_offload(seed: int) -> Recipe:
    """The recipe of `seed` at stages 1 to 3 with its states in host memory."""
    rng = random.Random(~seed * 3)
    recipe = draw_stage_3(seed) if rng.random() < 0.6 else draw(seed)
    recipe = replace(recipe, stage=max(recipe.stage, 1))
    zero = (*recipe.zero, ("sub_group_size", rng.choice((10, 40, 1000))))
    kinds = ("cpu", "half", "super", "param", "all", "disk", "disk_param", "disk_all")
    offload = rng.choice(kinds if recipe.stage == 3 else ("cpu", "super"))
    if recipe.world_size == 1 and any(op.kind == "no_sync" for op in recipe.ops):
        offload = "cpu"  # one rank that releases weights reduces in every backward, and adds up in that order
    recipe = replace(recipe, zero=zero, offload=offload)
    if recipe.has_late_gradients:
        recipe = replace(recipe, precision="fp32", accum="", optimizer="sgd")
    return recipe


def _alike(op: Op, world_size: int) -> Op:
    """The same with every rank leaving out what the first one does."""
    parts = tuple(replace(part, skip=part.skip[:1] * world_size) for part in op.parts)
    return replace(op, parts=parts)


def _draw_net(rng: random.Random) -> Net:
    dims = tuple(rng.randint(1, 12) for _ in range(rng.randint(2, 5)))
    shapes = ((), (0,), (1,), (3,), (2, 5), (0, 4))
    net = Net(
        dims=dims,
        bias=rng.random() < 0.7,
        repeat_first=rng.choice((0, 0, 1, 2)),
        extras=tuple(rng.choice(shapes) for _ in range(rng.choice((0, 0, 1, 2)))),
        idle=tuple(rng.choice(shapes) for _ in range(rng.choice((0, 0, 1, 2)))),
    )
    count = len(list(FuzzNet(net).parameters()))
    # The first parameter is used in every forward and never frozen, so that every loss has a graph.
    frozen = tuple(sorted(rng.sample(range(1, count), min(count - 1, rng.choice((0, 0, 0, 1, 2))))))
    return replace(net, frozen=frozen)


def _draw_zero(rng: random.Random) -> tuple[tuple[str, Any], ...]:
    choices: dict[str, tuple[Any, ...]] = {
        "reduce_bucket_size": (None, 8, 50, 200),
        "allgather_bucket_size": (None, 16, 100),
        "overlap_comm": (None, True, False),
        "contiguous_gradients": (None, True, False),
        "round_robin_gradients": (None, None, True),
    }
    drawn = {key: rng.choice(values) for key, values in choices.items()}
    return tuple((key, value) for key, value in drawn.items() if value is not None)


def _draw_part(rng: random.Random, net: Net, world_size: int, allow_raw: bool) -> Part:
    layers = len(net.dims) - 1
    skip: tuple[tuple[int, ...], ...] = ()
    if rng.random() < 0.3:
        skip = tuple(
            tuple(layer for layer in range(1, layers) if rng.random() < 0.4) for _ in range(world_size)
        )
    return Part(forwards=rng.choice((1, 1, 1, 2)), skip=skip, raw=allow_raw and rng.random() < 0.3)


def _draw_ops(rng: random.Random, net: Net, world_size: int, accumulation: int) -> tuple[Op, ...]:
    # A plain loss.backward() is divided by the accumulation steps at the boundary, not before: the same bits only for
    # powers of two.
    allow_raw = accumulation != 3 and rng.random() < 0.4
    count = len(list(FuzzNet(net).parameters()))
    ops: list[Op] = []
    for _ in range(rng.randint(1, 4)):  # windows
        for _ in range(accumulation):
            if rng.random() < 0.1:
                ops.append(Op("evaluate"))
            if rng.random() < 0.1:
                ops.append(Op("no_sync", (_draw_part(rng, net, world_size, allow_raw),)))
            if rng.random() < 0.05:
                ops.append(Op("zero_grad"))
            parts = tuple(_draw_part(rng, net, world_size, allow_raw) for _ in range(rng.choice((1, 1, 1, 2))))
            ops.append(Op("micro", parts))
        kind = rng.choice(("", "", "", "freeze", "unfreeze", "edit", "rate", "reload"))
        if kind:
            index = rng.randrange(1, count) if count > 1 and kind == "freeze" else rng.randrange(count)
            ops.append(Op("edit" if kind == "freeze" and index == 0 else kind, index=index, factor=0.5))
    return tuple(ops)


# -- shrinking -----------------------------------------------------------------------------------------------------


def _simpler(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes one step simpler, the boldest first."""
    for index in range(len(recipe.ops)):
        yield replace(recipe, ops=recipe.ops[:index] + recipe.ops[index + 1 :])
    plain = Recipe()
    fields = ("zero", "offload", "clip", "manual_boundary", "client_optimizer", "num_groups", "accum", "precision")
    for name in (*fields, "optimizer"):
        if getattr(recipe, name) != getattr(plain, name):
            yield replace(recipe, **{name: getattr(plain, name)})
    for index in range(len(recipe.zero)):
        yield replace(recipe, zero=recipe.zero[:index] + recipe.zero[index + 1 :])
    if recipe.world_size > 1:
        yield replace(recipe, world_size=recipe.world_size - 1)
    if recipe.stage > 0 and recipe.offload in ("", "cpu", "super"):
        yield replace(recipe, stage=recipe.stage - 1)
    if recipe.accumulation > 1:
        yield replace(recipe, accumulation=1)
    for net in _simpler_nets(recipe.net):
        yield replace(recipe, net=net)
    for index, op in enumerate(recipe.ops):
        for simpler in _simpler_ops(op):
            yield replace(recipe, ops=(*recipe.ops[:index], simpler, *recipe.ops[index + 1 :]))


def _simpler_nets(net: Net) -> Iterator[Net]:
    plain = Net()
    for name in ("extras", "idle", "frozen", "repeat_first", "bias", "checkpoint", "borrow"):
        value = getattr(plain, name)
        if getattr(net, name) != value:
            yield replace(net, **{name: value})
    if len(net.dims) > 2:
        yield replace(net, dims=net.dims[:-1])


def _simpler_ops(op: Op) -> Iterator[Op]:
    if len(op.parts) > 1:
        yield replace(op, parts=op.parts[:1])
    for index, part in enumerate(op.parts):
        for change in ({"forwards": 1}, {"skip": ()}, {"raw": False}):
            simpler = replace(part, **change)
            if simpler != part:
                yield replace(op, parts=(*op.parts[:index], simpler, *op.parts[index + 1 :]))


def shrink(recipe: Recipe, fails: Callable[[Recipe], str], budget_s: float = 30.0) -> Recipe:
    """The simplest recipe found within `budget_s` seconds that still fails (in whatever way)."""
    deadline = time.monotonic() + budget_s
    progress = True
    while progress:
        progress = False
        for candidate in _simpler(recipe):
            if time.monotonic() > deadline:
                return recipe
            if fails(candidate):
                recipe, progress = candidate, True
                break
    return recipe
