"""ZeRO++: packed gathers (qwZ), packed gradients in two hops (qgZ, LoCo), secondary shards (hpZ), on emulated nodes.

A node is what LOCAL_WORLD_SIZE says, or zero_hpz_partition_size. Every block is released as soon as it may be unless a
test says otherwise, so that forward and backward both gather.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from benchmarks.slow_link import SlowLink
from deepspeed.comm.blockwise import INT4, INT8
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.harness.models import SPECS
from tests.harness.parity import Case, assert_same_training
from tests.harness.width import wide

FORCED: dict[str, Any] = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
}
SMALL = {**FORCED, "reduce_bucket_size": 50, "stage3_prefetch_bucket_size": 200}
ALL = {"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}


@contextlib.contextmanager
def node_size(size: int) -> Iterator[None]:
    before = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    try:
        yield
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before


class Counted(SlowLink):
    """Bytes by the link of one rank, on two nodes of two, without the agreement at the end of a step."""

    def __init__(self) -> None:
        super().__init__([0, 0, 1, 1], float("inf"))

    def _charge(self, call: Any) -> None:
        if call.describe_what() != "gradient norm":
            super()._charge(call)


def start(zero: dict[str, Any], model: nn.Module, **top: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, **zero},
        **top,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def layers(count: int = 4, dim: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(dim, dim, bias=False), nn.Tanh())))


def data(step: int, dim: int = 32) -> Tensor:
    return torch.randn(2, dim, generator=torch.Generator().manual_seed(31 * step + dist.get_rank()))


def train(engine: Any, steps: int = 3, accumulation: int = 1) -> list[float]:
    losses = []
    for step in range(steps * accumulation):
        x = data(step).to(next(engine.module.parameters()).dtype)
        loss = (engine(x).float() - 0.3 * data(step)).pow(2).mean()
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    return losses


def masters(engine: Any) -> list[Tensor]:
    found = (safe_get_full_fp32_param(param) for param in engine.module.parameters() if param.requires_grad)
    return [tensor for tensor in found if tensor is not None]


def weights(engine: Any) -> list[Tensor]:
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params):
        return [param.detach().clone() for param in params]


# ---- hpZ: the numbers of plain stage 3 -------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ("odd", wide("tied"), "lora", wide("unused"), wide("embeddings")))
def test_secondary_shards_change_no_bit(pool: Any, model: str) -> None:
    cases = [
        Case(3, precision, 2, 0.5, model=model, steps=3, zero={"zero_hpz_partition_size": 2, **zero})
        for precision, zero in (("fp32", SMALL), ("bf16", FORCED), ("bf16", {}))
    ]
    assert_same_training(pool, 4, cases)


def secondary_traffic() -> tuple[list[float], dict[str, int], dict[str, int]]:
    zero = {"zero_hpz_partition_size": 2, "overlap_comm": False, **FORCED}
    engine = start(zero, layers(), gradient_accumulation_steps=2)
    train(engine, 1, 2)
    crossed = []
    for micro in range(4):  # two windows of two micro-steps
        x = data(micro)
        with Counted() as link:
            loss = engine(x).pow(2).mean()
            crossed.append(link.crossed_bytes)
            engine.backward(loss)
            crossed.append(link.crossed_bytes - sum(crossed[-1:]))
            engine.step()
            crossed.append(link.crossed_bytes - sum(crossed[-2:]))
    held, expected = engine.optimizer.model_state_bytes(), engine.optimizer.expected_state_bytes()
    engine.destroy()
    return crossed, held, expected


def test_only_the_first_forward_after_a_step_leaves_the_node(pool: Any) -> None:
    whole = 4 * 32 * 32 * 4  # bytes of the model
    for crossed, held, expected in pool.run(4, secondary_traffic):
        gather = whole / 2 / 2  # half of it enters each node, by two links
        assert crossed[0::3] == [gather, 0.0] * 2  # forward
        assert crossed[1::3] == [gather] * 4  # backward: gradients alone
        assert crossed[2::3] == [0.0, 0.0] * 2  # step
        assert held["secondary"] == expected["secondary"] == whole / 2
        assert held["parameter"] == whole / 4


# ---- qwZ -------------------------------------------------------------------------------------------------------------


def gathered_values(dtype: str, frozen_only: bool, persistent: bool) -> tuple[list[float], list[bool], bool]:
    key = "zero_quantized_nontrainable_weights" if frozen_only else "zero_quantized_weights"
    model = layers()
    model[0].requires_grad_(False)
    exact = [param.detach().clone() for param in model.parameters()]
    top = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    zero = {key: True, **(FORCED if not persistent else {})}
    seen: list[Tensor] = []

    def look(module: Any, *_: Any) -> None:
        seen.append(module.weight.detach().float().clone())

    with node_size(2):
        engine = start(zero, model, **top)
    for layer in model[0::2]:
        layer.register_forward_hook(look)
    with torch.no_grad():
        engine(data(0).to(next(model.parameters()).dtype))
    if dtype == "bf16":
        exact = [tensor.bfloat16().float() for tensor in exact]
    steps = [tensor.abs().max() / 127 for tensor in exact]  # at least half a step of any block, and its rounding
    gaps = [float((one - other).abs().max() / step) for one, other, step in zip(seen, exact, steps, strict=True)]
    read = weights(engine)
    unharmed = [torch.equal(one.float(), other) for one, other in zip(read, exact, strict=True)]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, [tensor.sum().item() for tensor in seen])
    engine.destroy()
    whole = [torch.equal(param.detach().float(), other) for param, other in zip(model.parameters(), exact, strict=True)]
    return gaps, unharmed + whole, all(other == everywhere[0] for other in everywhere)


@pytest.mark.parametrize("persistent", (False, True))
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("frozen_only", (False, True))
def test_gathered_weights_are_close(pool: Any, dtype: str, frozen_only: bool, persistent: bool) -> None:
    for gaps, unharmed, alike in pool.run(4, gathered_values, dtype, frozen_only, persistent):
        assert all(unharmed)  # read by hand and after destroy: the very weights
        assert alike
        assert 0 < gaps[0] <= (1.0 if dtype == "bf16" else 0.51)
        assert all((gap == 0) == frozen_only for gap in gaps[1:])


def edited_while_packed() -> bool:
    """An edit of one parameter inside a forward leaves the others' masters as they were."""
    engine = start({"zero_quantized_weights": True, "stage3_param_persistence_threshold": 0}, layers())
    before = masters(engine)
    with torch.no_grad():
        engine(data(0))
        first = next(engine.module.parameters())
        first.mul_(2.0)
    after = masters(engine)
    engine.destroy()
    doubled = (after[0] - 2 * before[0]).abs().max() <= 2 * before[0].abs().max() / 254 + 1e-7
    return bool(doubled) and all(torch.equal(one, other) for one, other in zip(before[1:], after[1:], strict=True))


def test_masters_of_fp32_models_stay_exact_beside_edits(pool: Any) -> None:
    assert all(pool.run(2, edited_while_packed))


# ---- qgZ -------------------------------------------------------------------------------------------------------------


def gradients(hpz: int, loco: bool) -> tuple[list[float], list[float], list[bool]]:
    found: list[list[Any]] = []
    for packs in (False, True):
        zero = {**FORCED, "zero_quantized_gradients": packs, "zero_hpz_partition_size": hpz}
        if packs and loco:
            zero["zeropp_loco_param"] = {"err_beta": 0.8, "reset_T": 64}
        engine = start(zero, layers())
        for _ in range(6 if loco else 1):  # the same batch: what is lost once is sent later
            engine.backward((engine(data(0)) - 0.3).pow(2).mean())
            grads = [safe_get_full_grad(param) for param in engine.module.parameters()]
            found.append(grads)
            engine.optimizer.zero_grad()
        engine.destroy()
    exact = found[0]
    packed = found[len(found) // 2 :]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, [tensor.sum().item() for tensor in packed[-1]])
    largest = [float(tensor.abs().max()) for tensor in exact]
    first = [float((a - b).abs().max() / top) for a, b, top in zip(exact, packed[0], largest, strict=True)]
    mean = [torch.stack([grads[i] for grads in packed]).mean(0) for i in range(len(exact))]
    averaged = [float((a - b).abs().max() / top) for a, b, top in zip(exact, mean, largest, strict=True)]
    return first, averaged, [other == everywhere[0] for other in everywhere]


@pytest.mark.parametrize("hpz", (1, 2))
def test_packed_gradients_are_close_and_equal_on_all_ranks(pool: Any, hpz: int) -> None:
    for first, _, alike in pool.run(4, gradients, hpz, False):
        assert all(alike)
        # Half a step (1/14 of the largest of a block) per contribution and hop; one rank's may be larger than the mean.
        assert all(0 < gap < 0.5 for gap in first)


def test_error_feedback_sends_later_what_was_lost(pool: Any) -> None:
    for first, averaged, alike in pool.run(4, gradients, 2, True):
        assert all(alike)
        assert sum(averaged) < 0.6 * sum(first)


# ---- all together ----------------------------------------------------------------------------------------------------


def whole_step(zero: dict[str, Any]) -> tuple[float, float]:
    """Bytes that leave one node in one training step: (in forward and backward, in the update)."""
    engine = start({**FORCED, **zero}, layers(4, 64), bf16={"enabled": True})

    def step() -> None:
        engine.backward(engine(data(0, 64).bfloat16()).float().pow(2).mean())
        engine.optimizer.reduce_now()

    step()
    engine.step()
    with Counted() as link:
        step()
    moved = link.crossed_bytes
    with Counted() as link:
        engine.step()
    engine.destroy()
    return moved * 2, link.crossed_bytes * 2


def test_bytes_between_nodes_of_a_whole_step(pool: Any) -> None:
    layer = 64 * 64
    numel, blocks = 4 * layer, 4
    unit = numel * 2 / 2  # what one plain crossing costs a node, in bytes of 2 per element
    # The layer that ends the forward is still there for the backward, which does not need the weights of the first.
    plain = 3 * unit - 2 * layer * 2 / 2
    int8, int4 = (2 * blocks * packing.nbytes(layer // 4) for packing in (INT8, INT4))
    assert (int8, int4) == (0.5 * unit * (1 + 4 / 256), 0.25 * unit * (1 + 4 / 128))
    for zero, right in (
        ({"zero_quantized_weights": False}, plain),
        ({"zero_hpz_partition_size": 2}, 2 * unit),
        ({"zero_quantized_gradients": True, "zero_hpz_partition_size": 2}, unit + int4),
        (ALL, int8 + int4),
        ({**ALL, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}, int8 + int4),
        ({**ALL, "overlap_comm": False}, int8 + int4),
    ):
        for moved, refreshed in pool.run(4, whole_step, zero):
            assert (moved, refreshed) == (right, 0), zero


def test_kept_blocks_are_refreshed_packed(pool: Any) -> None:
    int8, int4 = (2 * 4 * packing.nbytes(64 * 64 // 4) for packing in (INT8, INT4))
    kept = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
    for moved, refreshed in pool.run(4, whole_step, {**ALL, **kept, "reduce_bucket_size": 64 * 64}):
        assert (moved, refreshed) == (int4, int8)


def losses_and_weights(zero: dict[str, Any], top: dict[str, Any], steps: int) -> tuple[list[float], list[float]]:
    with node_size(2):
        engine = start(zero, layers(), gradient_clipping=1.0, **top)
    losses = train(engine, steps)
    found = [float(tensor.double().sum()) for tensor in weights(engine)]
    engine.destroy()
    return losses, found


@pytest.mark.parametrize(
    "top", ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 18}})
)
def test_ranks_stay_equal_in_every_precision(pool: Any, top: dict[str, Any]) -> None:
    for zero in (
        {**ALL, **SMALL, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 2}},
        {"zero_quantized_weights": True, "zero_quantized_gradients": True},  # two hops, kept
        {**ALL, "overlap_comm": False, "mics_shard_size": 2},
    ):
        results = pool.run(4, losses_and_weights, zero, top, 6)
        assert all(found == results[0][1] for _, found in results), zero
        assert all(torch.tensor(losses).isfinite().all() for losses, _ in results)


def sentences(step: int, rows: int = 8, length: int = 16) -> Tensor:
    """A language of one rule, which holds two times of three.  # (rows, length), int64"""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(0, 29, (rows, length), generator=generator)
    follows = torch.rand(rows, length, generator=generator) < 2 / 3
    for place in range(1, length):
        tokens[:, place] = torch.where(follows[:, place], (3 * tokens[:, place - 1] + 1) % 29, tokens[:, place])
    return tokens


def converged(zero: dict[str, Any]) -> float:
    """Mean loss of all ranks over the last 20 of 60 steps, no batch seen twice."""
    engine = start(zero, SPECS["llama"].build(), bf16={"enabled": True})
    total = torch.zeros(1)
    for step in range(60):
        tokens = sentences(step)
        logits = engine(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        total += loss.detach() if step >= 40 else 0.0
        engine.backward(loss)
        engine.step()
    engine.destroy()
    dist.all_reduce(total)
    return float(total) / 20 / dist.get_world_size()


@pytest.mark.wide  # 200 steps; the same comparison is benchmarks/zeropp_convergence.py
def test_convergence_within_one_percent(pool: Any) -> None:
    plain, packed, fed_back = (
        pool.run(4, converged, zero)[0]
        for zero in ({}, ALL, {**ALL, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}})
    )
    assert 1.5 < plain < 3.2  # has learned (29 tokens at random: 3.4), and cannot know everything
    assert abs(packed / plain - 1) < 0.01, (plain, packed)
    assert abs(fed_back / plain - 1) < 0.01, (plain, fed_back)


# ---- configuration ---------------------------------------------------------------------------------------------------


def refused(loco: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="zeropp_loco_param") as caught:
        start({**ALL, "zeropp_loco_param": loco}, layers())
    return str(caught.value)


@pytest.mark.parametrize(
    ("loco", "text"),
    (
        ({"beta": 1}, "zero_optimization.zeropp_loco_param.beta: unknown key; the block has err_beta and reset_T"),
        ({"err_beta": 1.5}, "zero_optimization.zeropp_loco_param.err_beta: found 1.5; expected a number from 0 to"),
        ({"reset_T": 0}, "zero_optimization.zeropp_loco_param.reset_T: found 0; expected an integer of at least 1"),
    ),
)
def test_settings_of_the_error_feedback_are_checked(pool: Any, loco: dict[str, Any], text: str) -> None:
    for found in pool.run(2, refused, loco):
        assert text in found
