"""Saves and loads in any order, exports, sizes, the order of data, the optimizer's own state dict."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.checkpoint import runs
from tests.distributed.checkpoint.runs import lines, train
from tests.harness.pool import WorkerPool

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
    engine = runs.start(runs.config(stage, precision), module=runs.build(0, runs.MostlyFrozen))
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
    assert state <= runs.size_of(tmp_path / "global_step2") <= state + 65536


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
