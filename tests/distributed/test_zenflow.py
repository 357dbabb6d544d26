"""ZenFlow: the numbers of its definition in plain torch, whatever is read, saved, written or goes wrong in between."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.models import SPECS
from tests.harness.parity import PRECISIONS, Case, Tolerance, assert_same_training
from tests.harness.width import product, wide

STEP = {"topk_ratio": 0.25, "select_strategy": "step", "select_interval": 3, "update_interval": 2}
# Windows of three end between two choices; the last before a choice is cut short.
LATE = {**STEP, "select_interval": 5, "update_interval": 3, "overlap_step": True}
EACH = {**STEP, "select_interval": 4, "update_interval": 1, "overlap_step": True}
ALL = {**STEP, "topk_ratio": 0.999, "update_interval": 1}  # of so few columns: all
WARM = {**LATE, "full_warm_up_rounds": 2, "offload": True}
AUTO = {**STEP, "select_interval": 8, "update_interval": "auto", "auto_ratio": 0.7}
FLOWS = {"step": STEP, "late": LATE, "each": EACH, "warm": WARM, "auto": AUTO}
FLOWS["auto_late"] = {**AUTO, "overlap_step": True}

# Kernels round the elements of a weight beyond its last full vector in another way than the others, and packed columns
# are whole vectors. Weights of "mlp" are whole vectors, too.
LAST_ELEMENTS = Tolerance(atol=2e-6, reason="the last elements of a weight are no whole vector")


def zero(flow: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "offload_optimizer": {"device": "cpu"},
        "overlap_comm": True,
        "reduce_bucket_size": 300,
        "sub_group_size": 200,
        "zenflow": flow,
        **more,
    }


def _in_daily_run(world: int, stage: int, flow: str) -> bool:
    daily = ((1, 1, "late"), (2, 1, "each"), (2, 2, "late"), (1, 3, "auto"), (2, 3, "warm"), (2, 3, "auto_late"))
    return (world, stage, flow) in daily


@pytest.mark.parametrize(("world", "stage", "flow"), product((1, 2), (1, 2, 3), tuple(FLOWS), daily=_in_daily_run))
def test_the_numbers_of_the_definition(pool, world: int, stage: int, flow: str) -> None:
    section = zero(FLOWS[flow])
    rows = (("fp32", 1, 0.5), ("bf16", 2, 0.0), ("fp16", 2, 0.5), ("fp32", 2, 0.0), ("bf16", 1, 0.5))
    picked = rows[:3] if flow in ("late", "auto") else rows[3:]
    cases = [Case(stage, p, micros, clip, "adamw", "mlp", steps=9, zero=section) for p, micros, clip in picked]
    assert_same_training(pool, world, cases)


DAILY_MODELS = ("branches", "lora", "degenerate")


@pytest.mark.parametrize("model", (*DAILY_MODELS, *map(wide, ("odd", "tied", "unused", "embeddings", "llama"))))
def test_every_kind_of_model(pool, model: str) -> None:
    cases = [
        Case(stage, "fp32", 1, 0.5, "adamw", model, steps=6, zero=zero(flow), tolerance=LAST_ELEMENTS)
        for stage, flow in ((2, LATE), (3, STEP))
    ]
    assert_same_training(pool, 2, cases)


# ---- an engine by hand ---------------------------------------------------------------------------------------------


def start(stage: int, flow: dict[str, Any] | None, precision: str = "fp32", model: str = "mlp", **top: Any) -> Any:
    import deepspeed

    section = zero(flow or {})
    if flow is None:
        del section["zenflow"]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, **section},
        **copy.deepcopy(PRECISIONS[precision][0]),
        **top,
    }
    return deepspeed.initialize(model=SPECS[model].build(), config=config)[0]


def backward(engine: Any, index: int, model: str = "mlp") -> None:
    spec, rank = SPECS[model], dist.get_rank()
    engine.backward(spec.loss(engine, spec.batch(index, rank, 2), index, rank))


def train(engine: Any, first: int, last: int, model: str = "mlp") -> None:
    for index in range(first, last):
        backward(engine, index, model)
        engine.step()


def weights(engine: Any) -> list[torch.Tensor]:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    found = []
    for param in engine.module.parameters():
        with GatheredParameters(param):
            found.append(param.detach().clone())
    return found


def everything(engine: Any) -> list[torch.Tensor]:
    """Weights, masters, moments, and what waits."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = weights(engine)
    for param in engine.module.parameters():
        found.append(safe_get_full_fp32_param(param))
        for key in ("exp_avg", "exp_avg_sq", "zenflow_pending"):
            value = safe_get_full_optimizer_state(param, key)
            found += [value] if value is not None else []
    return found


def assert_same(one: list[torch.Tensor], two: list[torch.Tensor]) -> None:
    assert len(one) == len(two)
    for left, right in zip(one, two, strict=True):
        assert torch.equal(left, right)


# ---- plain offload -------------------------------------------------------------------------------------------------


def _as_plain(stage: int) -> None:
    at_once = EACH | {"overlap_step": False}
    rows = (("mlp", "fp32", at_once), ("mlp", "bf16", at_once), ("odd", "fp32", ALL), ("odd", "bf16", ALL))
    for model, precision, flow in rows:
        one, two = start(stage, flow, precision, model), start(stage, None, precision, model)
        for engine in (one, two):
            train(engine, 0, 6, model)
        assert_same(everything(one), everything(two))
        one.destroy()
        two.destroy()


@pytest.mark.parametrize(("world", "stage"), ((1, 1), (2, 3), wide(2, 2)))
def test_windows_of_one_step_are_plain_offload(pool, world: int, stage: int) -> None:
    pool.run(world, _as_plain, stage)


def _as_on_a_gpu(stage: int) -> None:
    """Packed columns updated by `step`, all at once, have the bits of one pass over rows."""
    from deepspeed.runtime.zero.zenflow import important

    rows, together = start(stage, LATE, "bf16"), start(stage, LATE, "bf16")
    train(rows, 0, 6)
    plain, important._goes_by_rows = important._goes_by_rows, lambda packed: False
    try:
        train(together, 0, 6)
    finally:
        important._goes_by_rows = plain
    assert_same(everything(rows), everything(together))
    rows.destroy()
    together.destroy()


def test_the_way_of_a_gpu_gives_the_same_bits(pool) -> None:
    pool.run(2, _as_on_a_gpu, 2)


# ---- looking and writing -------------------------------------------------------------------------------------------


def _looking(stage: int) -> None:
    one, two = start(stage, LATE, "bf16"), start(stage, LATE, "bf16")
    for index in range(8):
        backward(one, index)
        backward(two, index)
        everything(one)  # between backward and step, and after it
        one.step()
        everything(one)
        one.eval()
        with torch.no_grad():
            SPECS["mlp"].loss(one, SPECS["mlp"].batch(99, 0, 2), 99, 0)
        one.train()
        two.step()
    assert_same(everything(one), everything(two))
    for engine in (one, two):
        train(engine, 8, 10)
    assert_same(weights(one), weights(two))
    one.destroy()
    two.destroy()


@pytest.mark.parametrize("stage", (2, 3))
def test_looking_changes_nothing(pool, stage: int) -> None:
    pool.run(2, _looking, stage)


def _writing(stage: int) -> None:
    """What is written into masters, moments, weights and gradients is what training goes on with."""
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
    )

    engine, plain = start(stage, ALL), start(stage, None)
    flow = start(stage, LATE)
    for index in range(6):
        for one in (engine, plain, flow):
            backward(one, index)
            first, second, *_ = list(one.module.parameters())
            if index == 2:
                safe_set_full_grad(first, 2 * safe_get_full_grad(first))
            if index == 3:
                one.optimizer.rescale_grads(0.5)
            one.step()
            if index == 1:
                safe_set_full_fp32_param(first, torch.full_like(first, 0.25))
                assert torch.equal(safe_get_full_fp32_param(first), torch.full((16, 16), 0.25))
            if index == 4:
                moment = safe_get_full_optimizer_state(first, "exp_avg_sq")
                safe_set_full_optimizer_state(first, 3 * moment, "exp_avg_sq")
                assert torch.equal(safe_get_full_optimizer_state(first, "exp_avg_sq"), 3 * moment)
                safe_set_full_fp32_param(second, torch.full_like(second, 0.5))
    assert_same(everything(engine), everything(plain))
    for one in (engine, plain, flow):
        one.destroy()


@pytest.mark.parametrize("stage", (2, 3))
def test_what_is_written_counts(pool, stage: int) -> None:
    pool.run(2, _writing, stage)


def _replaced_weight(stage: int) -> None:
    """A weight written while an update waits to land is not overwritten by it."""
    from deepspeed.utils import safe_set_full_fp32_param

    engine = start(stage, {**LATE, "select_interval": 12}, "bf16")
    train(engine, 0, 4)  # the update of the third step lands with the sixth
    assert engine.optimizer.executors.zenflow.deferred.lands_later or dist.get_world_size() > 1
    param = next(engine.module.parameters())
    safe_set_full_fp32_param(param, torch.full((16, 16), 0.25))
    for index in (4, 5):
        backward(engine, index)
        engine.step()
    (held, *_), chosen = weights(engine), engine.optimizer.executors.zenflow.pieces
    columns = next(p.cut.chosen for p in chosen if p.bound.param is param and p.cut.chosen is not None)
    rest = [column for column in range(16) if column not in columns]
    assert torch.equal(held[:, rest], torch.full((16, len(rest)), 0.25).bfloat16())
    engine.destroy()


@pytest.mark.parametrize("stage", (1, 3))
def test_an_update_does_not_land_on_what_was_written(pool, stage: int) -> None:
    pool.run(1, _replaced_weight, stage)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def _resumed(folder: str, stage: int, flow: dict[str, Any], precision: str, background: bool) -> None:
    more = {"checkpoint": {"writer": {"type": "FAST", "decoupled": True}}} if background else {}
    engine = start(stage, flow, precision, **more)
    tags = (1, 3, 4, 5)  # in the first window; with an update that has not landed; before and after a new choice
    for step in range(8):
        if step in tags:
            engine.save_checkpoint(folder, tag=str(step))
        train(engine, step, step + 1)
    right = everything(engine)
    engine.destroy()
    for step in tags:
        resumed = start(stage, flow, precision)
        if step % 2:  # not only into a fresh engine
            train(resumed, 20, 23)
        resumed.load_checkpoint(folder, tag=str(step))
        train(resumed, step, 8)
        assert_same(everything(resumed), right)
        resumed.destroy()


@pytest.mark.parametrize(
    ("world", "stage", "flow", "precision"),
    (wide(1, 1, "auto", "bf16"), (2, 2, "late", "bf16"), (2, 3, "late", "fp32"), wide(2, 3, "warm", "bf16")),
)
def test_resumed_is_unbroken(pool, tmp_path: Path, world: int, stage: int, flow: str, precision: str) -> None:
    pool.run(world, _resumed, str(tmp_path), stage, FLOWS[flow], precision, flow == "late")


def _another_share(folder: str, stage: int) -> None:
    """A run that goes on with another `topk_ratio` chooses at once, and loses nothing of what waits."""
    for before, after in ((0.25, 0.5), (0.5, 0.999), (0.999, 0.25)):
        engine = start(stage, {**LATE, "topk_ratio": before}, "bf16")
        train(engine, 0, 5)
        engine.save_checkpoint(folder, tag="a")
        engine.optimizer.executors.zenflow.options = replace(engine.optimizer.executors.zenflow.options, topk=after)
        resumed = start(stage, {**LATE, "topk_ratio": after}, "bf16")
        resumed.load_checkpoint(folder, tag="a")
        for one in (engine, resumed):
            train(one, 5, 9)  # the first of them chooses anew in both
        assert_same(everything(engine), everything(resumed))
        engine.destroy()
        resumed.destroy()


def test_another_share_of_columns(pool, tmp_path: Path) -> None:
    pool.run(2, _another_share, str(tmp_path), 2)


# Changed between a save and its load, while an update is under way or not: the section before, and after.
CHANGES = {
    "overlap off": (LATE, {"overlap_step": False}),
    "overlap on": ({**LATE, "overlap_step": False}, {"overlap_step": True}),
    "shorter windows": (LATE, {"update_interval": 1}),
    "away": (LATE, {"overlap_step": False, "offload": True}),
}


def _change(engine: Any, flow: dict[str, Any]) -> None:
    """What a load does to an engine that saw the change, by hand."""
    zenflow, overlap = engine.optimizer.executors.zenflow, flow["overlap_step"]
    if not overlap:  # what is under way lands, and everybody hears of it
        zenflow._take_back()
        zenflow.important.publish(zenflow.deferred.land())
        for unit in zenflow.units:
            for segment in unit.segments if unit.group.sharded else ():
                zenflow.publish(unit.group, segment)
    zenflow.deferred.hold_still()
    zenflow.deferred.overlap = overlap
    zenflow.options = replace(zenflow.options, overlap=overlap, update_interval=flow["update_interval"])


def _changed(folder: str, stage: int, change: str) -> None:
    before, keys = CHANGES[change]
    before = {**before, "select_interval": 8}
    after = {**before, **keys}
    for saved in (4, 5):
        engine = start(stage, before, "bf16")
        train(engine, 0, saved)
        engine.save_checkpoint(folder, tag=str(saved))
        under_way = bool(engine.optimizer.executors.zenflow.deferred.lands_later)
        assert under_way is before["overlap_step"]
        _change(engine, after)
        resumed = start(stage, after, "bf16")
        resumed.load_checkpoint(folder, tag=str(saved))
        assert_same(everything(resumed), everything(engine))
        resumed.save_checkpoint(folder, tag="again")  # before any step
        again = start(stage, {**after, "overlap_step": True}, "bf16")
        again.load_checkpoint(folder, tag="again")
        assert_same(everything(again), everything(resumed))
        again.destroy()
        for one in (engine, resumed):
            train(one, saved, 10)
        assert_same(everything(resumed), everything(engine))
        engine.destroy()
        resumed.destroy()


@pytest.mark.parametrize(
    ("stage", "change"),
    ((2, "overlap off"), (3, "overlap off"), (3, "overlap on"), wide(2, "shorter windows"), wide(2, "away")),
)
def test_keys_changed_between_save_and_load(pool, tmp_path: Path, stage: int, change: str) -> None:
    pool.run(2, _changed, str(tmp_path), stage, change)


def _state_dict(stage: int) -> None:
    engine = start(stage, LATE, "bf16")
    train(engine, 0, 4)  # an update has not landed
    state = copy.deepcopy(engine.optimizer.state_dict())
    model = {key: value.clone() for key, value in engine.module.state_dict().items()}
    train(engine, 4, 8)
    resumed = start(stage, LATE, "bf16")
    resumed.module.load_state_dict(model)
    resumed.optimizer.load_state_dict(state)
    train(resumed, 4, 8)
    assert_same(everything(resumed), everything(engine))
    engine.destroy()
    resumed.destroy()


def test_the_optimizers_own_state_dict(pool) -> None:
    pool.run(2, _state_dict, 2)


def _save(folder: str, stage: int) -> list[torch.Tensor]:
    engine = start(stage, LATE, "bf16")
    train(engine, 0, 5)
    engine.save_checkpoint(folder, tag="a")
    found = everything(engine)
    engine.destroy()
    return found


def _load(folder: str, stage: int, flow: dict[str, Any] | None) -> list[torch.Tensor]:
    engine = start(stage, flow, "bf16")
    engine.load_checkpoint(folder, tag="a")
    found = everything(engine)
    train(engine, 5, 8)
    engine.destroy()
    return found


def test_other_numbers_of_ranks_take_up_what_waits(pool, tmp_path: Path) -> None:
    right = pool.run(2, _save, str(tmp_path), 2)[0]
    for world, stage in ((1, 1), (2, 3)):
        for found in pool.run(world, _load, str(tmp_path), stage, LATE):
            assert_same(found[6:], right[6:])  # weights of stage 3 are made from masters


def test_without_zenflow_a_checkpoint_is_plain(pool, tmp_path: Path) -> None:
    """Columns that were updated more often have moments of as many steps as the others."""
    right = pool.run(2, _save, str(tmp_path), 2)[0]
    found = pool.run(1, _load, str(tmp_path), 2, None)[0]
    masters = [tensor for tensor in right[6:] if tensor.dtype == torch.float32]
    assert sum(torch.equal(one, two) for one in masters for two in found[6:]) >= 6  # masters of all, at least
    assert len(found) == 6 + 3 * 6


# ---- with the rest of the library ----------------------------------------------------------------------------------


def _away_and_wired_anew(stage: int) -> None:
    """States that go away and come back, and an optimizer that is wired anew in a window, go on where they were."""
    engine, twin = start(stage, LATE, "bf16"), start(stage, LATE, "bf16")
    for index in range(9):
        backward(engine, index)
        backward(twin, index)
        for one in (engine, twin):
            one.step()
        if index in (1, 3):
            engine.offload_states(pin_memory=False)
            held = {kind for kind, _ in engine.optimizer.executors.zenflow.storages()}
            assert not held & {"master", "optimizer"}
            engine.reload_states()
        if index == 4:  # as where parameters are unfrozen
            engine.optimizer.watch.remove()
            engine.optimizer._wire()
            if engine.optimizer.sharding is not None:
                engine.optimizer.sharding.install_hooks()
    assert_same(everything(engine), everything(twin))
    engine.destroy()
    twin.destroy()


@pytest.mark.parametrize("stage", (wide(2), 3))
def test_states_away_and_back(pool, stage: int) -> None:
    pool.run(2, _away_and_wired_anew, stage)


def _unfreeze(stage: int) -> None:
    import deepspeed

    model = SPECS["mlp"].build()
    model[2].requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, **zero(LATE)},
    }
    twin = copy.deepcopy(model)
    engine, other = (deepspeed.initialize(model=one, config=config)[0] for one in (model, twin))
    for one in (engine, other):
        train(one, 0, 5)
    before = weights(engine)
    model[2].requires_grad_(True)
    for one in (engine, other):
        train(one, 5, 6)  # columns are chosen anew in both
    for number, (old, new, right) in enumerate(zip(before, weights(engine), weights(other), strict=True)):
        assert torch.equal(new, right) != (number in (2, 3))  # the new ones train, the old ones do not notice
        assert not torch.equal(old, new)
    train(engine, 6, 9)
    assert engine.optimizer.executors.zenflow.rounds == 9
    engine.destroy()
    other.destroy()


@pytest.mark.parametrize("stage", (wide(1), 3))
def test_unfrozen_parameters_join(pool, stage: int) -> None:
    pool.run(2, _unfreeze, stage)


def _near_and_far() -> None:
    """A part of the states on the device (twin-flow) is updated as always; weights in host memory are found there."""
    from tests.harness.offload import apart

    flow, spec = {**STEP, "update_interval": 1}, {"device": "cpu", "ratio": 0.4}
    with apart():
        engines = [
            start(3, None, "bf16", zero_optimization={"stage": 3, "reduce_bucket_size": 300}),
            start(3, None, "bf16", zero_optimization={"stage": 3, **zero(flow, offload_optimizer=spec)}),
            start(3, None, "bf16", zero_optimization={"stage": 3, **zero(flow, offload_param={"device": "cpu"})}),
        ]
    assert engines[1].optimizer.executors.zenflow.left
    for engine in engines:
        train(engine, 0, 5)
    plain = weights(engines[0])
    for engine in engines[1:]:
        assert_same(weights(engine), plain)
    for engine in engines:
        engine.destroy()


def test_twin_flow_and_weights_in_host_memory(pool) -> None:
    pool.run(2, _near_and_far)


def _held_bytes(stage: int) -> None:
    from tests.harness.offload import apart

    with apart():
        engine = start(stage, {**LATE, "select_interval": 6}, "bf16")
    train(engine, 0, 4)
    flow, world = engine.optimizer.executors.zenflow, dist.get_world_size()
    weight, bias, columns = 3 * 16 * 16, 3 * 16, 4
    important = sum(piece.cut.numel for piece in flow.pieces)
    everybody = torch.tensor(important)
    dist.all_reduce(everybody)
    assert int(everybody) == weight * columns // 16 + bias  # nobody holds what another rank owns
    assert abs(important - int(everybody) // world) <= 3 * 16
    held: dict[str, int] = {}
    for kind, tensor in flow.storages():
        held[kind] = held.get(kind, 0) + tensor.nbytes
    padding = 60 * len(flow.pieces)
    assert 0 <= held["master"] - 4 * important <= padding
    assert 0 <= held["optimizer"] - 8 * important <= 2 * padding
    assert 0 <= held["gradient"] - 2 * important <= padding
    total = engine.optimizer.model_state_bytes()
    expected = engine.optimizer.expected_state_bytes()
    assert total["master"] + total["optimizer"] == held["master"] + held["optimizer"]
    for kind in ("master", "optimizer", "gradient"):
        assert abs(total[kind] - expected[kind]) <= 2 * padding, kind
    assert expected["host"] <= total["host"]  # which comes in pages
    before, steps = flow.deferred.bytes_to_device, 6
    train(engine, 4, 4 + steps)
    landed = flow.deferred.bytes_to_device - before
    assert landed == 2 * steps // 3 * sum(piece.bound.fragment.numel for piece in flow.deferred.pieces)
    engine.destroy()


@pytest.mark.parametrize("world", (1, 2))
def test_bytes_are_those_of_the_formula(pool, world: int) -> None:
    pool.run(world, _held_bytes, 2)


def _epochs() -> None:
    import deepspeed

    auto = {"topk_ratio": 0.25, "update_interval": 2}
    epoch = {**auto, "select_strategy": "epoch", "select_interval": 2}
    data = torch.utils.data.TensorDataset(torch.randn(20, 16), torch.randn(20, 16))
    section = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}

    def made(flow: dict[str, Any], **more: Any) -> Any:
        config = {**section, "zero_optimization": {"stage": 2, **zero(flow)}}
        return deepspeed.initialize(model=SPECS["mlp"].build(), config=config, **more)[0]

    for flow, more, steps in (
        (auto, {}, 100),
        (auto, {"training_data": data}, 10 // dist.get_world_size()),
        (epoch, {"training_data": data}, 20 // dist.get_world_size()),
        ({**epoch, "steps_per_epoch": 3}, {}, 6),
    ):
        engine = made(flow, **more)
        assert engine.optimizer.executors.zenflow.select_steps == steps
        engine.destroy()
    with pytest.raises(ValueError, match=r"zenflow.select_strategy is epoch.*zenflow.steps_per_epoch"):
        made(epoch)
    params = SPECS["mlp"].build().parameters()
    with pytest.raises(ValueError, match=r"zero_optimization.zenflow: the optimizer is RMSprop"):
        made(auto, optimizer=torch.optim.RMSprop(params))


def test_epochs_and_optimizers(pool) -> None:
    pool.run(1, _epochs)
