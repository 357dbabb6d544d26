"""What loads, what is skipped and said, what is an error: tags, files, options, order of calls."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.checkpoint.errors import CheckpointError
from tests.distributed.checkpoint import runs
from tests.harness.pool import WorkerPool


@contextlib.contextmanager
def lines() -> Iterator[list[str]]:
    """What the package logs in the block."""
    from deepspeed.utils.logging import logger

    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep()
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def train(engine: Any, first: int, last: int) -> None:
    for index in range(first, last):
        runs.step(engine, index, dist.get_rank())


def raises(action: Any, *parts: str) -> str:
    """``action`` raises CheckpointError; its text holds ``parts``."""
    with pytest.raises(CheckpointError) as caught:
        action()
    text = str(caught.value)
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in: {text}"
    return text


# ---- tags ----------------------------------------------------------------------------------------------------------


def tags_body(folder: str, stage: int) -> None:
    settings = runs.config(stage)
    engine = runs.start(settings)
    train(engine, 0, 1)
    engine.save_checkpoint(folder, tag=1, client_state={"i": 1})
    at_one = runs.snapshot(engine)
    train(engine, 1, 3)
    engine.save_checkpoint(folder, tag="t3", client_state={"i": 3})
    train(engine, 3, 4)
    engine.save_checkpoint(folder, client_state={"i": 4}, save_latest=False)
    if dist.get_rank() == 0:
        assert (Path(folder) / "latest").read_bytes() == b"t3"
        assert (Path(folder) / "global_step4").is_dir()
    dist.barrier()
    for drop_latest in (False, True):
        if drop_latest and dist.get_rank() == 0:
            os.remove(f"{folder}/latest")
        dist.barrier()
        fresh = runs.start(settings, seed=9)
        path, client_state = fresh.load_checkpoint(folder, tag=1, load_optimizer_states=False)
        assert client_state["i"] == 1
        assert os.path.dirname(path) == f"{folder}/1"
        runs.same(at_one["weights"], runs.snapshot(fresh)["weights"])
        fresh.destroy()
    path, _ = engine.load_checkpoint(f"{folder}/t3", tag=".")
    assert path.startswith(f"{folder}/t3")
    engine.destroy()


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_tags_name_what_is_loaded(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    pool.run(2, tags_body, str(tmp_path), stage)


def nothing_there_body(folder: str) -> None:
    engine = runs.start(runs.config(1))
    train(engine, 0, 1)
    os.makedirs(f"{folder}/other/sub", exist_ok=True)
    before = runs.snapshot(engine)
    for path, text in ((f"{folder}/nowhere", "does not exist"), (f"{folder}/other", "holds sub/")):
        with lines() as said:
            assert engine.load_checkpoint(path) == (None, None)
        assert (len(said) == 1) is (dist.get_rank() == 0)
        assert all(text in line and "Training starts from scratch" in line for line in said)
        raises(lambda path=path: engine.load_checkpoint(path, tag="nope"), "no checkpoint 'nope'", path, text)
    engine.save_checkpoint(folder, tag="good")
    engine.save_checkpoint(folder, tag="half")
    dist.barrier()
    raises(lambda: engine.load_checkpoint(folder, tag="nope"), "no checkpoint 'nope'", "good, half")
    if dist.get_rank() == 0:
        os.remove(f"{folder}/half/zero_pp_rank_1_mp_rank_00_optim_states.pt")
    dist.barrier()
    raises(lambda: engine.load_checkpoint(folder, tag="half"), "zero_pp_rank_1_mp_rank_00_optim_states.pt", "good")
    if dist.get_rank() == 0:
        Path(f"{folder}/latest").write_text("gone")
    dist.barrier()
    raises(lambda: engine.load_checkpoint(folder), "'gone'", "good, half")
    for tag in ("../good", "/etc", "", ".hidden"):
        with pytest.raises(ValueError, match="checkpoint tag"):
            engine.save_checkpoint(folder, tag=tag)
        with pytest.raises(ValueError, match="checkpoint tag"):
            engine.load_checkpoint(folder, tag=tag)
    with pytest.raises(ValueError, match="save_dir is empty"):
        engine.save_checkpoint("")
    after = runs.snapshot(engine)
    runs.same(before, after)
    engine.destroy()


def test_what_is_not_there(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, nothing_there_body, str(tmp_path))


def tag_mismatch_body(folder: str, mode: str) -> list[str]:
    engine = runs.start(runs.config(1, checkpoint={"tag_validation": mode}))
    tag = f"rank{dist.get_rank()}"
    with lines() as said:
        if mode == "Fail":
            with pytest.raises(AssertionError, match="rank 1: 'rank1'"):
                engine.save_checkpoint(folder, tag=tag)
        else:
            engine.save_checkpoint(folder, tag=tag)
            assert engine.load_checkpoint(folder)[0].startswith(f"{folder}/rank0/")
    engine.destroy()
    return [line for line in said if "different tags" in line]


@pytest.mark.parametrize(("mode", "count"), (("Ignore", 0), ("Warn", 1), ("Fail", 0)))
def test_ranks_with_different_tags(pool: WorkerPool, tmp_path: Path, mode: str, count: int) -> None:
    said = pool.run(2, tag_mismatch_body, str(tmp_path), mode)
    assert [len(found) for found in said] == [count, 0]
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == ([] if mode == "Fail" else ["rank0"])


# ---- damaged files -------------------------------------------------------------------------------------------------


def damage_body(folder: str, name: str, how: str) -> None:
    engine = runs.start(runs.config(2, "bf16"))
    train(engine, 0, 1)
    engine.save_checkpoint(folder, tag="a")
    train(engine, 1, 2)
    before = runs.snapshot(engine)
    path = Path(folder) / "a" / name
    if dist.get_rank() == 0:
        raw = bytearray(path.read_bytes())
        if how == "flip":
            raw[len(raw) // 2] ^= 4
            path.write_bytes(raw)
        elif how == "cut":
            path.write_bytes(raw[: len(raw) // 2])
        elif how == "foreign":
            path.write_bytes(b"something else")
        else:
            path.unlink()
    dist.barrier()
    raises(lambda: engine.load_checkpoint(folder, tag="a"), name)
    runs.same(before, runs.snapshot(engine))
    engine.destroy()


MODEL, SHARD = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("name", "how"),
    (
        *((name, how) for name in (MODEL, SHARD) for how in ("flip", "cut", "foreign", "missing")),
        *(("manifest.json", how) for how in ("cut", "foreign", "missing")),
    ),
)
def test_damage_is_an_error_on_all_ranks(pool: WorkerPool, tmp_path: Path, name: str, how: str) -> None:
    pool.run(2, damage_body, str(tmp_path), name, how)


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


class MostlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(*[nn.Linear(100, 100) for _ in range(10)])
        self.base.requires_grad_(False)
        self.head = nn.Linear(100, runs.VOCABULARY)
        self.embed = nn.Embedding(runs.VOCABULARY, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(self.embed(tokens)))


def frozen_body(folder: str, stage: int) -> int:
    settings = runs.config(stage)
    engine = runs.start(settings, module=runs.build(0, MostlyFrozen))
    train(engine, 0, 2)
    with lines():
        engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    other = runs.start(settings, module=runs.build(9, MostlyFrozen))
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
        runs.build(3, MostlyFrozen).load_state_dict(torch.load(f"{folder}/whole.bin"), strict=True)
    trained = sum(param.numel() for param in engine.module.parameters() if param.requires_grad)
    for used in (engine, other):
        used.destroy()
    return trained


@pytest.mark.parametrize("stage", (0, 2))
def test_frozen_parameters_can_be_left_out(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    trained = pool.run(2, frozen_body, str(tmp_path), stage)[0]
    assert size_of(tmp_path / "global_step2") <= trained * 12 + 65536


def size_of(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in folder.iterdir())


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


# ---- order of calls ------------------------------------------------------------------------------------------------


def order_body(folder: str, stage: int, steps: int) -> None:
    settings = runs.config(stage, "bf16")
    engine = runs.start(settings)
    train(engine, 0, steps)
    engine.save_checkpoint(folder, tag="a")
    saved = runs.snapshot(engine)
    train(engine, steps, steps + 2)
    end = runs.snapshot(engine)
    second = runs.start(settings, seed=8)
    second.load_checkpoint(folder, tag="a")
    second.save_checkpoint(folder, tag="b")
    third = runs.start(settings, seed=9)
    third.load_checkpoint(folder, tag="b")
    runs.same(saved, runs.snapshot(third))
    train(third, steps, steps + 2)
    runs.same(end, runs.snapshot(third))
    engine.load_checkpoint(folder, tag="a")  # into the engine that has gone on, and twice
    engine.load_checkpoint(folder, tag="b")
    runs.same(saved, runs.snapshot(engine))
    train(engine, steps, steps + 2)
    runs.same(end, runs.snapshot(engine))
    for used in (engine, second, third):
        used.destroy()


@pytest.mark.parametrize("steps", (0, 2))
@pytest.mark.parametrize("stage", (0, 1, 2))
def test_any_order_of_save_and_load(pool: WorkerPool, tmp_path: Path, stage: int, steps: int) -> None:
    pool.run(2, order_body, str(tmp_path), stage, steps)
    assert tensors_of(tmp_path / "a") == tensors_of(tmp_path / "b")


def tensors_of(folder: Path) -> dict[str, dict[str, str]]:
    return {file.name: runs.digests(flat(torch.load(file, weights_only=True))) for file in folder.glob("*_states.pt")}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{path}[{i}]").items()}
    return {path: value}


def accumulation_body(folder: str) -> None:
    settings = runs.config(2, gradient_accumulation_steps=3)
    engine = runs.start(settings)
    train(engine, 0, 3)
    saved = runs.snapshot(engine)
    train(engine, 3, 4)
    saved["weights"]["seen"] = runs.snapshot(engine)["weights"]["seen"]  # a buffer does not wait for the boundary
    with lines() as said:
        engine.save_checkpoint(folder)
    assert sum("inside a window of 3 micro-steps" in line for line in said) == (1 if dist.get_rank() == 0 else 0)
    other = runs.start(settings, seed=9)
    train(other, 0, 2)  # a window begun is given up by loading
    other.load_checkpoint(folder)
    runs.same(saved, {**runs.snapshot(other), "random": saved["random"]})
    engine.load_checkpoint(folder)
    for used in (engine, other):
        torch.manual_seed(5)
        train(used, 3, 6)
    runs.same(runs.snapshot(engine), runs.snapshot(other))
    for used in (engine, other):
        used.destroy()


def test_inside_an_accumulation_window(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, accumulation_body, str(tmp_path))


def rng_body(folder: str) -> None:
    settings = runs.config(1, checkpoint={"load_rng_state": False})
    engine = runs.start(settings)
    engine.save_checkpoint(folder)
    torch.manual_seed(77)
    engine.load_checkpoint(folder)
    assert torch.initial_seed() == 77
    engine.destroy()


def test_random_states_can_be_left_alone(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, rng_body, str(tmp_path))


# ---- names, ties, sizes --------------------------------------------------------------------------------------------


def compile_body(folder: str, stage: int) -> None:
    plain = nn.Module.__init__  # torch.compile wraps it for good
    try:
        names_body(folder, stage)
    finally:
        nn.Module.__init__ = plain  # type: ignore[method-assign]
        torch.compiler.set_stance("default")


def names_body(folder: str, stage: int) -> None:
    settings = runs.config(stage)

    def made(compiled: bool, seed: int) -> Any:
        module = runs.build(seed)
        return runs.start(settings, module=torch.compile(module, backend="eager") if compiled else module)

    torch.compiler.set_stance("force_eager")  # the wrapper and its names matter here, compiling does not
    for compiled in (True, False):
        engine = made(compiled, 0)
        train(engine, 0, 2)
        tag = f"compiled{compiled}"
        engine.save_checkpoint(folder, tag=tag)
        right = clean(engine)
        for target in (True, False):
            other = made(target, 9)
            other.load_checkpoint(folder, tag=tag)
            runs.same(right, clean(other))
            other.destroy()
        if dist.get_rank() == 0:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            runs.build(3).load_state_dict(get_fp32_state_dict_from_zero_checkpoint(folder, tag), strict=True)
        engine.save_16bit_model(folder, f"{tag}.bin")
        if dist.get_rank() == 0:
            runs.build(3).load_state_dict(torch.load(f"{folder}/{tag}.bin"), strict=True)
        engine.destroy()


def clean(engine: Any) -> dict[str, str]:
    return {name.replace("_orig_mod.", ""): value for name, value in runs.whole(engine.module).items()}


@pytest.mark.parametrize("stage", (0, 2))
def test_names_do_not_know_of_compile(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    pool.run(2, compile_body, str(tmp_path), stage)


def export_body(folder: str, stage: int, precision: str) -> None:
    engine = runs.start(runs.config(stage, precision))
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    assert engine.save_16bit_model(folder, "model.bin") is True
    state = engine.checkpoint.consolidated_16bit_state_dict()
    assert (state is None) is (dist.get_rank() != 0)
    whole = runs.whole(engine.module)
    if state is not None:
        runs.same(whole, runs.digests(state))
        runs.same(whole, runs.digests(torch.load(f"{folder}/model.bin", weights_only=True)))
        assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
        assert state["embed.weight"].data_ptr() != engine.module.embed.weight.data_ptr()
    snapshot = runs.snapshot(engine)
    if dist.get_rank() == 0:
        check_fp32_export(folder, snapshot["masters"])
    with pytest.raises(ValueError, match="save_filename"):
        engine.save_16bit_model(folder, "../x.bin")
    engine.destroy()


def check_fp32_export(folder: str, masters: dict[str, str]) -> None:
    from deepspeed.utils.zero_to_fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
    )

    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    module = runs.build(3)
    assert set(found) == set(module.state_dict())
    module.load_state_dict(found, strict=True)
    runs.same(masters, runs.digests({name: found[name] for name in masters}))
    assert found["head.weight"] is found["embed.weight"]
    assert found["frozen.weight"].dtype == torch.float32
    assert found["seen"].dtype == torch.int64
    for safe in (False, True):
        out = f"{folder}/out{safe}"
        convert_zero_checkpoint_to_fp32_state_dict(folder, out, "1KB", safe)
        merged: dict[str, Any] = {}
        for file in Path(out).iterdir():
            if file.suffix == ".safetensors":
                from safetensors.torch import load_file

                merged.update(load_file(file))
            elif file.suffix == ".bin":
                merged.update(torch.load(file, weights_only=True))
        runs.same(runs.digests(found), runs.digests(merged))


@pytest.mark.parametrize(("stage", "precision"), ((0, "fp32"), (0, "bf16"), (1, "fp16"), (2, "fp32"), (2, "bf16")))
def test_exports_are_complete(pool: WorkerPool, tmp_path: Path, stage: int, precision: str) -> None:
    pool.run(2, export_body, str(tmp_path), stage, precision)


def size_body(folder: str, stage: int, precision: str) -> int:
    engine = runs.start(runs.config(stage, precision), module=runs.build(0, MostlyFrozen))
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    trained = sum(param.numel() for param in engine.module.parameters() if param.requires_grad)
    whole = sum(tensor.nbytes for tensor in engine.module.state_dict().values())
    engine.destroy()
    return whole + trained * (8 if precision == "fp32" else 12)


@pytest.mark.parametrize("stage", (0, 1, 2))
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_size_on_disk_is_the_state(pool: WorkerPool, tmp_path: Path, stage: int, precision: str) -> None:
    state = pool.run(2, size_body, str(tmp_path), stage, precision)[0]
    assert state <= size_of(tmp_path / "global_step2") <= state + 65536


def growth_body(folder: str) -> tuple[int, int]:
    module = nn.Sequential(nn.Embedding(runs.VOCABULARY, 1536), nn.Linear(1536, 1536), nn.Linear(1536, runs.VOCABULARY))
    engine = runs.start(runs.config(2), module=module)
    train(engine, 0, 1)
    seen = []
    for count in range(20):
        engine.save_checkpoint(folder, tag="same")
        if count in (3, 19):
            with open("/proc/self/statm") as file:
                seen.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    nbytes = sum(param.nbytes for param in module.parameters())
    engine.destroy()
    return seen[1] - seen[0], nbytes


def test_memory_does_not_grow_with_saves(pool: WorkerPool, tmp_path: Path) -> None:
    for grown, nbytes in pool.run(2, growth_body, str(tmp_path)):
        assert grown < 0.05 * nbytes
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == ["same"]


# ---- faults and retention ------------------------------------------------------------------------------------------


def fault_body(folder: str, rank: int, name: str) -> None:
    from deepspeed.checkpoint.disk import durable

    engine = runs.start(runs.config(2))
    train(engine, 0, 1)
    engine.save_checkpoint(folder, tag="a")
    saved = runs.snapshot(engine)
    train(engine, 1, 2)
    if name == "latest":
        saved = runs.snapshot(engine)  # the pointer comes last: what it points to has been replaced by then
    plain = durable.open_for_writing

    def failing(path: Path) -> Any:
        if dist.get_rank() == rank and name in path.name:
            raise OSError(5, "Input/output error", str(path))
        return plain(path)

    durable.open_for_writing = failing
    try:
        for tag in ("a", "b"):
            text = raises(lambda tag=tag: engine.save_checkpoint(folder, tag=tag), f"rank {rank}", "Input/output error")
            assert dist.get_world_size() == 2
            texts: list[Any] = [None, None]
            dist.all_gather_object(texts, text)
            assert texts[0] == texts[1]
    finally:
        durable.open_for_writing = plain
    dist.barrier()
    engine.load_checkpoint(folder)
    runs.same(saved, runs.snapshot(engine))
    engine.save_checkpoint(folder, tag="a")
    engine.destroy()


@pytest.mark.parametrize(
    ("rank", "name"), ((0, "model_states"), (1, "optim_states"), (0, "manifest"), (0, "latest"), (1, "rng_state"))
)
def test_one_ranks_failure_is_everyones(pool: WorkerPool, tmp_path: Path, rank: int, name: str) -> None:
    pool.run(2, fault_body, str(tmp_path), rank, name)
    # A pointer that could not be written leaves the new tag complete but not pointed to.
    tags = sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir())
    assert tags == (["a", "b"] if name == "latest" else ["a"])


def retention_body(folder: str) -> None:
    engine = runs.start(runs.config(1, checkpoint={"keep_last": 2}))
    Path(folder, "mine").mkdir(exist_ok=True)
    for tag in ("e", "d", "c"):
        engine.save_checkpoint(folder, tag=tag)
    engine.save_checkpoint(folder, tag="b", save_latest=False)
    engine.save_checkpoint(folder, tag="a", save_latest=False)
    engine.load_checkpoint(folder)
    assert engine.loaded_checkpoint_tag == "c"
    engine.destroy()


def test_retention_keeps_the_newest_and_the_one_pointed_to(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, retention_body, str(tmp_path))
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == ["a", "b", "c", "mine"]


def nested_retention_body(folder: str) -> None:
    engine = runs.start(runs.config(1, checkpoint={"keep_last": 1}))
    for tag, latest in (("run/1", True), ("run/2", False), ("run/3", False)):
        engine.save_checkpoint(folder, tag=tag, save_latest=latest)
    engine.load_checkpoint(folder)
    assert engine.loaded_checkpoint_tag == "run/1"
    for tag, latest in (("a", True), ("a/b", True), ("c", False)):
        engine.save_checkpoint(folder, tag=tag, save_latest=latest)
    engine.load_checkpoint(folder)
    assert engine.loaded_checkpoint_tag == "a/b"
    engine.destroy()


def test_retention_knows_tags_in_folders(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, nested_retention_body, str(tmp_path))
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == ["1", "3"]


def own_schedule_body(folder: str) -> None:
    settings = runs.config(1)
    del settings["scheduler"]
    engine = runs.start(settings)
    with lines() as said:
        engine.save_checkpoint(folder, client_state={"lr_scheduler": {"at": 5}, "optimizer": {"x": 1}, "n": 1})
    assert sum("'optimizer' belong" in line and "NOT saved" in line for line in said) == 1
    assert not any("'lr_scheduler'" in line for line in said)
    found = engine.load_checkpoint(folder)[1]
    assert (found["lr_scheduler"], found["n"]) == ({"at": 5}, 1)
    engine.save_checkpoint(folder, tag="again", client_state=found)
    assert engine.load_checkpoint(folder)[1]["lr_scheduler"] == {"at": 5}
    engine.destroy()


def test_a_schedule_of_the_users_own_is_kept(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, own_schedule_body, str(tmp_path))


def full_disk_body(folder: str) -> None:
    engine = runs.start(runs.config(1))
    train(engine, 0, 1)
    plain = shutil.disk_usage
    shutil.disk_usage = lambda path: plain(path)._replace(free=1000)  # type: ignore[assignment]
    try:
        raises(lambda: engine.save_checkpoint(folder), "rank 0", "1,000 bytes free")
    finally:
        shutil.disk_usage = plain
    dist.barrier()
    assert list(Path(folder).iterdir()) == []
    engine.destroy()


def test_space_is_looked_at_before_writing(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, full_disk_body, str(tmp_path))


def without_optimizer_body(folder: str) -> None:
    settings = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 10**9}
    engine = runs.start(settings)
    engine.save_checkpoint(folder)
    other = runs.start(settings, seed=9)
    other.load_checkpoint(folder)
    runs.same(runs.whole(engine.module), runs.whole(other.module))
    trained = runs.start(runs.config(1), seed=8)
    raises(lambda: trained.load_checkpoint(folder), "holds no optimizer state", "load_module_only=True")
    trained.load_checkpoint(folder, load_module_only=True)
    runs.same(runs.whole(engine.module), runs.whole(trained.module))
    for used in (engine, other, trained):
        used.destroy()


def test_engines_without_optimizer(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, without_optimizer_body, str(tmp_path))


# ---- data order ------------------------------------------------------------------------------------------------------


def data_body(folder: str) -> None:
    settings = runs.config(1)
    data = [runs.batch(index, 0, 1)[0] for index in range(24)]
    engine = runs.start(settings, training_data=data)
    batches = iter(engine.training_dataloader)
    for _ in range(2):
        runs.step(engine, 0, dist.get_rank(), next(batches))
    engine.save_checkpoint(folder)
    left = len(engine.training_dataloader) - 2
    rest = [runs.step(engine, 0, dist.get_rank(), next(batches)) for _ in range(left)]
    other = runs.start(settings, seed=9, training_data=data)
    other.load_checkpoint(folder)
    assert [runs.step(other, 0, dist.get_rank(), batch) for batch in other.training_dataloader] == rest
    for used in (engine, other):
        used.destroy()


def test_data_goes_on_where_it_was(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, data_body, str(tmp_path))


# ---- the optimizer's own state dict ----------------------------------------------------------------------------------


def state_dict_body(stage: int, precision: str) -> None:
    settings = runs.config(stage, precision)
    engine = runs.start(settings)
    train(engine, 0, 4)
    state, saved = engine.optimizer.state_dict(), runs.snapshot(engine)
    other = runs.start(settings, seed=9)
    train(other, 0, 1)
    other.optimizer.load_state_dict(state)
    found = runs.snapshot(other)
    # Weights that are their own masters are the module's part, as in plain torch.
    for key in ("states", "groups", "own") if precision == "fp32" else ("masters", "states", "groups", "own"):
        runs.same(saved[key], found[key])
    weights = {name: bits for name, bits in saved["weights"].items() if name in saved["masters"]}
    if precision != "fp32":
        runs.same(weights, {name: found["weights"][name] for name in weights})
    before = found["masters"]
    train(engine, 4, 5)
    runs.same(before, runs.snapshot(other)["masters"])  # the state dict is a copy
    engine.optimizer.load_state_dict(state)
    runs.same(saved["states"], runs.snapshot(engine)["states"])
    with pytest.raises(ValueError, match="another layout"):
        engine.optimizer.load_state_dict({**state, "param_slice_mappings": []})
    for used in (engine, other):
        used.destroy()


@pytest.mark.parametrize(("stage", "precision"), ((0, "fp32"), (0, "bf16"), (1, "fp32"), (2, "fp16")))
def test_the_optimizers_own_state_dict(pool: WorkerPool, stage: int, precision: str) -> None:
    pool.run(2, state_dict_body, stage, precision)


def client_methods_body() -> None:
    engine = runs.start(runs.config(2, "bf16"))
    for method in (engine._consolidated_16bit_state_dict, engine._zero3_consolidated_16bit_state_dict):
        state = method(exclude_frozen_parameters=True)
        assert (state is None) is (dist.get_rank() != 0)
        assert state is None or ("frozen.weight" not in state and state["mix.weight"].dtype == torch.bfloat16)
    assert engine.checkpoint_engine.preserves_storage_sharing()
    assert engine.checkpoint_engine.is_data_parallel_writer(0)
    engine.destroy()
    engine.destroy()


def test_what_clients_call(pool: WorkerPool) -> None:
    pool.run(2, client_methods_body)
