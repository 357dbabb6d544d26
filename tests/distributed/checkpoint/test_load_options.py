"""What a load takes and leaves: its options, models that changed, what clients keep in a checkpoint."""

from __future__ import annotations

import argparse
import pathlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.checkpoint import runs
from tests.distributed.checkpoint.runs import lines, raises, train
from tests.harness.pool import WorkerPool

# ---- options -------------------------------------------------------------------------------------------------------


def options_body(folder: str, stage: int, precision: str) -> None:
    settings = runs.config(stage, precision, optimizer=runs.SGD)
    engine = runs.start(settings)
    train(engine, 0, 10)  # fp16 skips the first ones
    engine.save_checkpoint(folder, client_state={"mine": 1})
    saved = runs.snapshot(engine, ("momentum_buffer",))
    engine.destroy()

    def loaded(**kwargs: Any) -> tuple[dict[str, Any], Any]:
        other = runs.start(settings, seed=9)
        _, client_state = other.load_checkpoint(folder, **kwargs)
        found = runs.snapshot(other, ("momentum_buffer",))
        train(other, 4, 5)
        other.destroy()
        return found, client_state

    found, state = loaded(load_module_only=True)
    runs.same(saved["weights"], found["weights"])
    assert found["counters"] == (0, 0, 0, 0)
    assert found["states"] == {}
    assert state["mine"] == 1

    found, state = loaded(load_optimizer_states=False)
    runs.same(saved["weights"], found["weights"])
    runs.same(saved["masters"], found["masters"])  # load_from_fp32_weights is on by default
    runs.same(saved["counters"], found["counters"])
    runs.same(saved["schedule"], found["schedule"])
    assert found["states"] == {}
    assert "optimizer" in state

    found, state = loaded(load_lr_scheduler_states=False)
    runs.same(saved["states"], found["states"])
    assert found["schedule"] != saved["schedule"]
    assert state["lr_scheduler"]["last_batch_iteration"] >= 0
    assert "optimizer" not in state

    seen: dict[str, Any] = {}

    def custom(src: dict[str, Any], dst: nn.Module) -> None:
        seen.update(src)
        dst.load_state_dict(src)

    found, _ = loaded(custom_load_fn=custom)
    runs.same(saved["weights"], found["weights"])
    assert list(seen) == list(runs.build().state_dict())


@pytest.mark.parametrize(("stage", "precision"), ((0, "fp32"), (0, "bf16"), (1, "fp32"), (2, "bf16"), (2, "fp16")))
def test_options_of_load(pool: WorkerPool, tmp_path: Path, stage: int, precision: str) -> None:
    pool.run(2, options_body, str(tmp_path), stage, precision)


def fresh_masters_body(folder: str) -> None:
    settings = runs.config(2, "bf16", zero={"load_from_fp32_weights": False})
    engine = runs.start(settings)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    weights = runs.snapshot(engine)["weights"]
    other = runs.start(settings, seed=9)
    other.load_checkpoint(folder, load_optimizer_states=False)
    found = runs.snapshot(other)
    runs.same(weights, found["weights"])
    cast = {name: param.detach().float() for name, param in other.module.named_parameters() if param.requires_grad}
    runs.same(runs.digests(cast), found["masters"])
    for bad in (engine, other):
        bad.destroy()


def test_masters_from_the_weights(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, fresh_masters_body, str(tmp_path))


class Bigger(runs.Everything):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


class Narrower(runs.Everything):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(7, 11)
        self.back = nn.Linear(11, 7)


def strict_body(folder: str) -> None:
    settings = runs.config(1)
    engine = runs.start(settings)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    bigger = runs.start(settings, module=runs.build(9, Bigger))
    before = runs.snapshot(bigger)
    raises(lambda: bigger.load_checkpoint(folder), "extra.weight", "not in the checkpoint", "load_module_strict=False")
    runs.same(before, runs.snapshot(bigger))
    with lines() as said:
        bigger.load_checkpoint(folder, load_module_strict=False)
    if dist.get_rank() == 0:
        assert any("not in the checkpoint" in line and "extra.weight" in line for line in said), said
        assert any("start afresh" in line and "extra.weight" in line for line in said), said
    train(bigger, 2, 3)
    bigger.save_checkpoint(folder, tag="bigger")
    before = runs.snapshot(engine)
    raises(lambda: engine.load_checkpoint(folder, tag="bigger"), "extra.weight", "not in the model")
    runs.same(before, runs.snapshot(engine))
    with lines() as said:
        engine.load_checkpoint(folder, tag="bigger", load_module_strict=False)
    assert any("the model has none such" in line for line in said) is (dist.get_rank() == 0)
    narrower = runs.start(settings, module=runs.build(9, Narrower))
    for strict in (True, False):
        raises(
            lambda strict=strict: narrower.load_checkpoint(folder, load_module_strict=strict),
            "mix.weight has shape (13, 7) in the checkpoint, (11, 7) in the model",
        )
    momentum = runs.start(runs.config(1, optimizer=runs.SGD))
    tag = "global_step2"
    raises(lambda: momentum.load_checkpoint(folder, tag), "'adam'", "'sgd'", "load_optimizer_states=False")
    momentum.load_checkpoint(folder, tag, load_optimizer_states=False)
    for used in (engine, bigger, narrower, momentum):
        used.destroy()


def test_what_does_not_fit_is_named(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, strict_body, str(tmp_path))


def unfrozen_body(folder: str, stage: int) -> None:
    settings = runs.config(stage)
    module = runs.build()
    module.mix.requires_grad_(False)
    engine = runs.start(settings, module=module)
    train(engine, 0, 3)
    engine.save_checkpoint(folder)
    saved = runs.snapshot(engine)
    other = runs.start(settings, seed=9)
    with lines() as said:
        other.load_checkpoint(folder)
    found = runs.snapshot(other)
    runs.same(saved["weights"], found["weights"])
    runs.same(saved["states"], found["states"])
    if dist.get_rank() == 0:
        assert sum("2 parameters have no optimizer state" in line and "mix.weight" in line for line in said) == 1, said
    train(other, 3, 4)
    other.save_checkpoint(folder, tag="all")
    with lines() as said:
        engine.load_checkpoint(folder, tag="all")
    if dist.get_rank() == 0:
        assert sum("is skipped, they are not trained here" in line and "mix.bias" in line for line in said) == 1, said
    train(engine, 4, 5)
    for used in (engine, other):
        used.destroy()


@pytest.mark.parametrize("stage", (0, 2))
def test_later_frozen_and_unfrozen_parameters(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    pool.run(2, unfrozen_body, str(tmp_path), stage)


def frozen_body(folder: str, stage: int) -> int:
    settings = runs.config(stage)
    engine = runs.start(settings, module=runs.build(0, runs.MostlyFrozen))
    train(engine, 0, 2)
    with lines():
        engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    other = runs.start(settings, module=runs.build(9, runs.MostlyFrozen))
    base = runs.whole(other.module.base)
    with lines() as said:
        other.load_checkpoint(folder)
    if dist.get_rank() == 0:
        assert sum("20 frozen parameters were left out" in line for line in said) == 1, said
    runs.same(base, runs.whole(other.module.base))
    runs.same(runs.whole(engine.module.head), runs.whole(other.module.head))
    engine.save_16bit_model(folder, "part.bin", exclude_frozen_parameters=True)
    engine.save_16bit_model(folder, "whole.bin")
    if dist.get_rank() == 0:
        assert set(torch.load(f"{folder}/part.bin")) == {"head.weight", "head.bias", "embed.weight"}
        runs.build(3, runs.MostlyFrozen).load_state_dict(torch.load(f"{folder}/whole.bin"), strict=True)
    trained = sum(param.numel() for param in engine.module.parameters() if param.requires_grad)
    for used in (engine, other):
        used.destroy()
    return trained


@pytest.mark.parametrize("stage", (0, 2))
def test_frozen_parameters_can_be_left_out(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    trained = pool.run(2, frozen_body, str(tmp_path), stage)[0]
    assert runs.size_of(tmp_path / "global_step2") <= trained * 12 + 65536


# ---- client state --------------------------------------------------------------------------------------------------


class Custom:
    value = 1


PLAIN_CLIENT = {
    "n": numpy.float64(1.5),
    "p": pathlib.Path("x"),
    "a": argparse.Namespace(k=1),
    "t": torch.bfloat16,
    "nested": {"x": [1, (2.5, None)]},
}


def client_body(folder: str) -> None:
    engine = runs.start(runs.config(1, "bf16"))
    train(engine, 0, 1)
    tensor = torch.arange(4.0)
    with lines() as said:
        engine.save_checkpoint(folder, tag="plain", client_state={**PLAIN_CLIENT, "tensor": tensor})
    assert said == []
    _path, found = engine.load_checkpoint(folder)
    assert {key: found[key] for key in PLAIN_CLIENT} == PLAIN_CLIENT
    assert torch.equal(found["tensor"], tensor)
    found["n"] = 2
    engine.save_checkpoint(folder, tag="again", client_state=found)  # what load gave back may be saved again
    assert engine.load_checkpoint(folder)[1]["n"] == 2
    with lines() as said:
        engine.save_checkpoint(folder, tag="custom", client_state={"own": Custom(), "n": 3})
    name = f"{Custom.__module__}.Custom"
    assert sum("client_state['own']" in line and name in line for line in said) == (1 if dist.get_rank() == 0 else 0)
    before = runs.snapshot(engine)
    raises(lambda: engine.load_checkpoint(folder), "client_state['own']", name, "add_safe_globals([Custom])")
    runs.same(before, runs.snapshot(engine))
    with torch.serialization.safe_globals([Custom]):
        assert isinstance(engine.load_checkpoint(folder)[1]["own"], Custom)
    raises(
        lambda: engine.save_checkpoint(folder, tag="bad", client_state={"f": lambda: None}),
        "client_state['f'] cannot be pickled",
    )
    with pytest.raises(KeyError, match="checkpoint_parallel_dimensions"):
        engine.save_checkpoint(folder, tag="bad", client_state={"checkpoint_parallel_dimensions": 1})
    assert not Path(folder, "bad").exists()
    if dist.get_rank() == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        assert "mix.weight" in get_fp32_state_dict_from_zero_checkpoint(folder, tag="custom")
    engine.destroy()


def test_client_state(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, client_body, str(tmp_path))


@pytest.mark.parametrize("stage", (0, 2))
@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
def test_files_are_plain_tensors_and_data(pool: WorkerPool, tmp_path: Path, stage: int, precision: str) -> None:
    pool.run(2, save_body, str(tmp_path), stage, precision)
    files = list((tmp_path / "global_step2").glob("*.pt"))
    assert len(files) == (3 if stage == 0 else 5)
    for file in files:
        torch.load(file, weights_only=True)
    model = torch.load(tmp_path / "global_step2" / "mp_rank_00_model_states.pt", weights_only=True)
    assert {name.replace("_orig_mod.", "") for name in model["module"]} == set(model["module"])
    assert model["dp_world_size"] == 2
    assert model["optimizer"] is None or stage == 0
    if stage == 2:
        assert model["shared_params"] == {"head.weight": "embed.weight"}
        assert set(model["frozen_param_shapes"]) == {"frozen.weight", "frozen.bias"}
        prefix = "bf16_" if precision == "bf16" else ""
        shard = torch.load(
            tmp_path / "global_step2" / f"{prefix}zero_pp_rank_1_mp_rank_00_optim_states.pt", weights_only=True
        )["optimizer_state_dict"]
        assert shard["zero_stage"] == 2
        historical = {"loss_scaler", "base_optimizer_state", "single_partition_of_fp32_groups", "partition_count"}
        assert historical <= set(shard)


def save_body(folder: str, stage: int, precision: str) -> None:
    engine = runs.start(runs.config(stage, precision))
    train(engine, 0, 2)
    engine.save_checkpoint(folder, client_state={"plain": [1]})
    engine.destroy()
