"""MiCS: shards over a few neighbours, replicas of them on the other ranks; against plain torch, bit for bit."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.comm.levels import Levels
from deepspeed.runtime.zero.mics import MiCS_Optimizer, has_hierarchical_all_gather_groups
from deepspeed.runtime.zero.mics_utils import create_mics_comm_groups
from deepspeed.runtime.zero.sharded_parameter import block_of
from deepspeed.utils import safe_get_full_grad
from tests.distributed.checkpoint import runs
from tests.distributed.checkpoint.test_layouts import load_run, same_full, save_run
from tests.distributed.checkpoint.test_resume import unbroken_and_resumed
from tests.harness.models import SPECS
from tests.harness.parity import OPTIMIZERS, Case, assert_same_training, steps_for
from tests.harness.width import product, wide

FORCED: dict[str, Any] = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "reduce_bucket_size": 50,
    "stage3_prefetch_bucket_size": 200,
}


# 2 ranks: one replica of 2 (plain stage 3), two of 1 (stage 0). 4 ranks: two of 2. 3 ranks: three of 1. In each half
# every precision meets every accumulation and setting, and these meet each other; clipping comes with the precision.
@pytest.mark.parametrize(
    ("size", "half"),
    product(
        ((2, 2), (2, 1), (3, 1), (4, 2)), (0, 1),
        daily=lambda size, half: size in ((2, 2), (4, 2)) and half == (size == (4, 2)),
    ),
)  # fmt: skip
def test_same_training_as_plain_torch(pool: Any, size: tuple[int, int], half: int) -> None:
    world_size, shard = size
    axes = itertools.product(enumerate(("fp32", "bf16", "fp16")), enumerate((1, 3)), enumerate(({}, FORCED)))
    cases = [
        Case(
            3, precision, accumulation, 0.0 if precision == "fp32" else 0.5, steps=steps_for(world_size, precision),
            zero={"mics_shard_size": shard, **zero},
        )
        for (one, precision), (two, accumulation), (three, zero) in axes
        if (one + two + three) % 2 == half
    ]  # fmt: skip
    assert_same_training(pool, world_size, cases)


@pytest.mark.parametrize(
    "model", ("tied", "lora", "embeddings", wide("shared"), wide("unused"), wide("degenerate"), wide("llama"))
)
def test_same_training_for_every_kind_of_model(pool: Any, model: str) -> None:
    cases = [
        Case(3, precision, 2, 0.5, model=model, steps=3, zero={"mics_shard_size": 2, "overlap_comm": overlap, **FORCED})
        for precision, overlap in (("fp32", True), ("bf16", False))
    ]
    assert_same_training(pool, 4, cases)


def test_secondary_copies_of_a_replica_change_no_bit(pool: Any) -> None:
    case = Case(3, "bf16", 2, 0.5, steps=3, zero={"mics_shard_size": 2, "zero_hpz_partition_size": 2, **FORCED})
    assert_same_training(pool, 4, [case])


def gathered_in_two_hops() -> tuple[bool, list[torch.Tensor]]:
    before, os.environ["LOCAL_WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"], "2"  # a host
    try:
        engine = start({"mics_shard_size": 4, "mics_hierarchical_params_gather": True, **FORCED})
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before
    for step in range(3):
        backward(engine, step)
        engine.step()
    two = isinstance(engine.sharded_module.gatherer.blocks[0].route.group, Levels)
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params):
        found = [param.detach().clone() for param in params]
    engine.destroy()
    return two, found


def gathered_in_one_hop() -> list[torch.Tensor]:
    engine = start(FORCED)
    for step in range(3):
        backward(engine, step)
        engine.step()
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params):
        found = [param.detach().clone() for param in params]
    engine.destroy()
    return found


def test_the_hierarchical_gather_changes_no_bit(pool: Any) -> None:
    plain = pool.run(4, gathered_in_one_hop)[0]
    for two, found in pool.run(4, gathered_in_two_hops):
        assert two
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def start(zero: dict[str, Any], **top: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": OPTIMIZERS["adamw"].block,
        "zero_optimization": {"stage": 3, **zero},
        **top,
    }
    return deepspeed.initialize(model=SPECS["odd"].build(), config=config)[0]


def backward(engine: Any, step: int) -> None:
    spec, rank = SPECS["odd"], dist.get_rank()
    engine.backward(spec.loss(engine, spec.batch(step, rank), step, rank))


def sharing() -> tuple[int, int, list[int]]:
    engine = start({"mics_shard_size": 2})
    params = list(engine.module.parameters())
    whole = sum(param.ds_numel for param in params)
    states = engine.optimizer.model_state_bytes()
    block: Any = block_of(params[0])
    group = torch.distributed.get_process_group_ranks(block.process_group)
    shards = states["parameter"]
    engine.destroy()
    return whole * 4, shards, group


def test_each_block_of_neighbours_holds_the_whole_model(pool: Any) -> None:
    for rank, (whole, shard, group) in enumerate(pool.run(4, sharing)):
        assert group == ([0, 1] if rank < 2 else [2, 3])
        assert whole / 2 <= shard <= whole / 2 + 4 * 16 * 20  # and the alignment of pieces


def looked_at_within_a_window() -> list[torch.Tensor | None]:
    found = []
    for look in (False, True):
        engine = start({"mics_shard_size": 2}, gradient_accumulation_steps=3)
        for micro in range(3):
            backward(engine, micro)
            if look:  # adds up the replicas now; what comes later is added to that
                safe_get_full_grad(next(engine.module.parameters()))
            if micro == 2:
                found.append(safe_get_full_grad(next(engine.module.parameters())))
            engine.step()
        engine.destroy()
    return found


def test_gradients_may_be_read_in_the_middle_of_a_window(pool: Any) -> None:
    results = pool.run(4, looked_at_within_a_window)
    for plain, looked in results:
        assert torch.allclose(plain, looked, rtol=1e-6, atol=1e-8)
        assert torch.equal(plain, results[0][0])
        assert torch.equal(looked, results[0][1])


def edited() -> list[float]:
    engine = start({"mics_shard_size": 2})
    first = next(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(first, modifier_rank=3):
        first.data.fill_(float(dist.get_rank()))
    with deepspeed.zero.GatheredParameters(first):
        seen = first.detach().unique().tolist()
    engine.destroy()
    return seen


def test_edits_of_one_rank_reach_every_replica(pool: Any) -> None:
    assert pool.run(4, edited) == [[3.0]] * 4


def refused(zero: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="does not divide") as caught:
        start(zero)
    return str(caught.value)


@pytest.mark.parametrize(
    ("zero", "text"),
    (
        ({"mics_shard_size": 3}, "zero_optimization.mics_shard_size=3 does not divide the 4 ranks ZeRO shards over "
         "(dp 4 x sp 1); 4 = 1 x 3 + 1; sizes that do: 1, 2, 4"),
        ({"mics_shard_size": 8}, "mics_shard_size=8 does not divide the 4 ranks ZeRO shards over (dp 4 x sp 1); "
         "4 = 0 x 8 + 4; sizes that do: 1, 2, 4"),
        ({"zero_hpz_partition_size": 3}, "zero_optimization.zero_hpz_partition_size=3 does not divide the 4 ranks"),
        ({"mics_shard_size": 2, "zero_hpz_partition_size": 4}, "zero_optimization.zero_hpz_partition_size=4 does not "
         "divide the 2 ranks of mics_shard_size; 2 = 0 x 4 + 2; sizes that do: 1, 2"),
    ),
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused(pool: Any, zero: dict[str, Any], text: str) -> None:
    for found in pool.run(4, refused, zero):
        assert text in found


class Untouched(torch.nn.Linear):
    def parameters(self, recurse: bool = True) -> Any:
        raise AssertionError("the model was touched")


def refused_early(key: str) -> None:
    zero = {"stage": 3, key: 3}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "optimizer": OPTIMIZERS["adamw"].block}
    with pytest.raises(ValueError, match=rf"zero_optimization\.{key}=3 does not divide the 2 ranks ZeRO shards over"):
        deepspeed.initialize(model=Untouched(2, 2), config=config)
    said = rf"zero_optimization\.{key}=3 does not divide the 2 ranks that build the model; .*; sizes that do: 1, 2"
    for context in (deepspeed.zero.Init, deepspeed.zero.MiCS_Init):
        with pytest.raises(ValueError, match=said):
            context(config_dict_or_path=config)


@pytest.mark.parametrize("key", ("mics_shard_size", "zero_hpz_partition_size"))
def test_they_are_refused_before_the_model_is_touched(pool: Any, key: str) -> None:
    pool.run(2, refused_early, key)


def built_in_shards() -> tuple[bool, str, bool]:
    zero = {"stage": 3, "mics_shard_size": 2}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "optimizer": OPTIMIZERS["adamw"].block}
    whole = SPECS["odd"].build()
    with deepspeed.zero.MiCS_Init(config_dict_or_path=config):
        model = SPECS["odd"].build(seed=dist.get_rank())  # rank 0's values count
    engine = deepspeed.initialize(model=model, config=config)[0]
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    ours = isinstance(engine.optimizer, MiCS_Optimizer)
    engine.destroy()
    with pytest.raises(ValueError, match="MiCS_Init needs config_dict_or_path") as caught:
        deepspeed.zero.MiCS_Init(config_dict_or_path={**config, "zero_optimization": {"stage": 3}})
    return same, str(caught.value), ours


def test_models_built_in_shards(pool: Any) -> None:
    for same, text, ours in pool.run(4, built_in_shards):
        assert same
        assert ours
        assert text.endswith("found -1. Without MiCS use zero.Init")


def groups() -> tuple[list[int], list[int], int, int, str]:
    made = create_mics_comm_groups(2, None)
    assert not has_hierarchical_all_gather_groups(made)
    hops = create_mics_comm_groups(4, None, True, node_size=2)
    assert has_hierarchical_all_gather_groups(hops)
    with pytest.raises(ValueError, match="does not divide") as caught:
        create_mics_comm_groups(3, None)
    ranks = torch.distributed.get_process_group_ranks
    shard, replicas = ranks(made.param_shard_group), ranks(made.param_repli_group)
    return shard, replicas, made.param_shard_rank, made.param_repli_rank, str(caught.value)


def test_groups_of_a_rank(pool: Any) -> None:
    for rank, (shard, replicas, place, replica, text) in enumerate(pool.run(4, groups)):
        assert shard == ([0, 1] if rank < 2 else [2, 3])
        assert replicas == [rank % 2, rank % 2 + 2]
        assert (place, replica) == (rank % 2, rank // 2)
        assert text.startswith("mics_shard_size=3 does not divide the 4 ranks")


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", (wide(1), 2))
def test_resume_is_exact(pool: Any, tmp_path: Path, shard: int) -> None:
    settings = runs.config(3, "bf16", zero={"mics_shard_size": shard, **FORCED})
    pool.run(4, unbroken_and_resumed, str(tmp_path), settings, 4, 2)


@pytest.mark.parametrize(
    ("old", "new"),
    (
        wide((4, 3, {"mics_shard_size": 2}), (2, 3, {})),
        ((4, 3, {"mics_shard_size": 2, **FORCED}), (3, 1, {})),
        wide((2, 3, {"mics_shard_size": 1}), (2, 2, {})),
        wide((3, 3, {}), (4, 3, {"mics_shard_size": 2, **FORCED})),
        ((2, 2, {}), (2, 3, {"zero_quantized_weights": True, **FORCED})),
    ),
)
def test_every_bit_survives_another_layout(
    pool: Any, tmp_path: Path, old: tuple[int, int, dict[str, Any]], new: tuple[int, int, dict[str, Any]]
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    saved = pool.run(old[0], save_run, first, runs.config(old[1], zero=old[2]))[0]
    for found in pool.run(new[0], load_run, first, runs.config(new[1], zero=new[2]), second):
        same_full(saved, found)
    same_full(saved, pool.run(old[0], load_run, second, runs.config(old[1], zero=old[2]))[0])
