"""Weights of stage 3 for use outside: 16-bit models, fp32 exports, and what reads and writes parameters directly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from tests.distributed.checkpoint import runs, test_save_and_load
from tests.distributed.checkpoint.runs import lines, train
from tests.distributed.checkpoint.test_stage3_resume import FORCED
from tests.distributed.checkpoint.test_stage3_rules import Watch
from tests.harness.pool import WorkerPool

# ---- the 16-bit model ----------------------------------------------------------------------------------------------


def export_body(folder: str, precision: str, zero: dict[str, Any]) -> None:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    engine = runs.start(runs.config(3, precision, zero=zero))
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    whole = runs.whole(engine.module)
    assert engine.save_16bit_model(folder, "model.bin") is True
    with GatheredParameters(list(engine.module.parameters())):  # borrowing what somebody else holds
        held = engine._zero3_consolidated_16bit_state_dict()
    state = engine._zero3_consolidated_16bit_state_dict()
    part = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert (state is None, part is None) == (dist.get_rank() != 0,) * 2
    if state is not None:
        assert list(state) == list(runs.build().state_dict())
        for found in (state, held, torch.load(f"{folder}/model.bin", weights_only=True)):
            runs.same(whole, runs.digests(found))
            assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
        assert set(state) - set(part) == {"frozen.weight", "frozen.bias"}
    runs.same(whole, runs.whole(engine.module))
    snapshot = runs.snapshot(engine)
    if dist.get_rank() == 0:
        test_save_and_load.check_fp32_export(folder, snapshot["masters"])
        frozen_left_out(folder)
        scripts(folder)
    train(engine, 2, 3)
    engine.destroy()


def frozen_left_out(folder: str) -> None:
    from deepspeed.utils.zero_to_fp32 import (
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )

    found = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert set(runs.build().state_dict()) - set(found) == {"frozen.weight", "frozen.bias"}
    module = load_state_dict_from_zero_checkpoint(runs.build(9), folder)
    runs.same(runs.digests(get_fp32_state_dict_from_zero_checkpoint(folder)), runs.digests(module.state_dict()))


def scripts(folder: str) -> None:
    """The copies beside the checkpoint, run as their own programs would."""
    from deepspeed.utils import zero_to_fp32

    assert zero_to_fp32.main([folder, f"{folder}/bf16", "--dtype", "bf16"], with_dtype=True) == 0
    found = torch.load(f"{folder}/bf16/pytorch_model.bin", weights_only=True)
    assert {value.dtype for value in found.values() if value.dtype.is_floating_point} == {torch.bfloat16}
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        assert (Path(folder) / name).exists()


@pytest.mark.parametrize(("world", "precision", "zero"), ((2, "fp32", {}), (2, "bf16", FORCED), (1, "bf16", {})))
def test_exports_are_complete(
    pool: WorkerPool, tmp_path: Path, world: int, precision: str, zero: dict[str, Any]
) -> None:
    pool.run(world, export_body, str(tmp_path), precision, zero)


def refused_body(folder: str) -> None:
    settings = runs.config(3, "bf16", zero={**FORCED, "stage3_gather_16bit_weights_on_model_save": False})
    engine = runs.start(settings)
    train(engine, 0, 1)
    with Watch() as seen, lines() as said:
        assert engine.save_16bit_model(folder, "m.bin") is False
    assert seen.numel == 0
    assert len(said) == (dist.get_rank() == 0)
    assert all("stage3_gather_16bit_weights_on_model_save" in line and "m.bin" in line for line in said)
    assert list(Path(folder).iterdir()) == []
    dist.barrier()  # below a rank leaves a part of a file there
    engine.sharded_module.gatherer.release_all()
    for state in (engine.module.state_dict(), engine.module_state_dict()):
        assert state["mix.weight"].shape == (13, 7)
        with pytest.raises(RuntimeError, match=r"save_checkpoint or engine.save_16bit_model"):
            torch.save(state, f"{folder}/m{dist.get_rank()}.bin")
        with pytest.raises(RuntimeError, match="sharded"):
            copy.deepcopy(state["mix.weight"])
    engine.destroy()


@pytest.mark.parametrize("world", (1, 2))
def test_nothing_that_looks_like_a_model_is_written(pool: WorkerPool, tmp_path: Path, world: int) -> None:
    if world == 2:
        pool.run(2, refused_body, str(tmp_path))
    else:
        pool.run(1, one_rank_body, str(tmp_path))


def one_rank_body(folder: str) -> None:
    """The answer does not depend on the number of ranks, although one rank has everything."""
    engine = runs.start(runs.config(3, zero={"stage3_gather_16bit_weights_on_model_save": False}))
    with lines():
        assert engine.save_16bit_model(folder, "m.bin") is False
    assert list(Path(folder).iterdir()) == []
    engine.destroy()


def memory_body() -> tuple[int, int, int]:
    """(most elements gathered at once, elements of the largest block, of the model)."""
    engine = runs.start(runs.config(3, "bf16", zero=FORCED))
    gatherer = engine.sharded_module.gatherer
    peak = 0

    from deepspeed.runtime.zero.param_block import ParamBlock

    launch = ParamBlock.launch

    def watched(block: ParamBlock, **kwargs: Any) -> None:
        nonlocal peak
        launch(block, **kwargs)
        peak = max(peak, sum(other.numel for other in gatherer.blocks if other.full is not None))

    ParamBlock.launch = watched  # type: ignore[method-assign]
    try:
        engine._zero3_consolidated_16bit_state_dict()
    finally:
        ParamBlock.launch = launch  # type: ignore[method-assign]
    assert gatherer.live_numel == 0
    sizes = [block.numel for block in gatherer.blocks]
    engine.destroy()
    return peak, max(sizes), sum(sizes)


def test_one_block_at_a_time_is_gathered(pool: WorkerPool) -> None:
    for peak, largest, model in pool.run(2, memory_body):
        assert peak == largest < model


def fault_body() -> None:
    from deepspeed.checkpoint import export

    engine = runs.start(runs.config(3, zero=FORCED))
    plain = export._views

    def failing(*args: Any) -> Any:
        raise RuntimeError("no memory for it")

    if dist.get_rank() == 0:
        export._views = failing
    try:
        with pytest.raises(deepspeed.checkpoint.CheckpointError, match="rank 0: RuntimeError: no memory for it"):
            engine.save_16bit_model("/nonexistent", "m.bin")
    finally:
        export._views = plain
    train(engine, 0, 1)
    engine.destroy()


def test_a_failure_while_gathering_is_everyones(pool: WorkerPool) -> None:
    pool.run(2, fault_body)


def revived_body(folder: str) -> None:
    """`load_state_dict_from_zero_checkpoint` into the very module an engine has sharded."""
    from deepspeed.utils.zero_to_fp32 import (
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )

    engine = runs.start(runs.config(3, zero=FORCED))
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    module = engine.module
    if dist.get_rank() == 0:
        assert load_state_dict_from_zero_checkpoint(module, folder) is module
        assert module.head.weight is module.embed.weight
        found = get_fp32_state_dict_from_zero_checkpoint(folder)
        runs.same(runs.digests(found), runs.digests(module.state_dict()))
        right = runs.build(3)
        right.load_state_dict(found)
        tokens = runs.batch(0, 0)
        assert torch.equal(module.eval()(tokens), right.eval()(tokens))  # one rank alone: nothing is gathered any more
    dist.barrier()
    engine.checkpoint.close()


def test_a_sharded_module_becomes_a_plain_one(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, revived_body, str(tmp_path))


# ---- loading into the module ---------------------------------------------------------------------------------------


def module_load_body(precision: str, zero: dict[str, Any]) -> None:
    source = runs.build(5)
    state = source.state_dict()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    names = {name for name, _ in source.named_parameters(remove_duplicate=False)}
    right = runs.digests({name: value.to(dtype) if name in names else value for name, value in state.items()})
    masters = {
        name: param.detach().to(dtype).float() for name, param in source.named_parameters() if param.requires_grad
    }

    def check(engine: Any) -> None:
        found = runs.snapshot(engine)
        runs.same(right, found["weights"])
        runs.same(runs.digests(masters), found["masters"])
        train(engine, 7, 8)
        engine.destroy()

    for trained in (0, 2):
        engine = runs.start(runs.config(3, precision, zero=zero))
        train(engine, 0, trained)
        engine.load_module_state_dict({"module": state})
        check(engine)
    engine = runs.start(runs.config(3, precision, zero=zero))
    engine.module.load_state_dict(state)
    check(engine)
    engine = runs.start(runs.config(3, precision, zero=zero))
    own = state if dist.get_rank() == 0 else runs.build(6).state_dict()
    engine.load_module_state_dict({"module": own}, fetch_z3_params=True)  # the first rank's values count
    check(engine)


@pytest.mark.parametrize(("precision", "zero"), (("fp32", {}), ("bf16", FORCED)))
def test_a_whole_state_dict_loads_into_the_module(pool: WorkerPool, precision: str, zero: dict[str, Any]) -> None:
    pool.run(2, module_load_body, precision, zero)


# ---- the optimizer's own state dict ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
def test_the_optimizers_own_state_dict(pool: WorkerPool, precision: str) -> None:
    pool.run(2, state_dict_body, precision)


def state_dict_body(precision: str) -> None:
    settings = runs.config(3, precision)
    engine = runs.start(settings)
    train(engine, 0, 4)
    state, saved = engine.optimizer.state_dict(), runs.snapshot(engine)
    assert {"fp32_flat_groups", "optimizer_state_dict", "zero_stage"} <= set(state)
    other = runs.start(settings, seed=9)
    train(other, 0, 1)
    with torch.no_grad():
        other.module.mix.weight.add_(1.0)  # an edit that loading overwrites, and not the other way round
    other.optimizer.load_state_dict(state)
    found = runs.snapshot(other)
    for key in ("masters", "states", "groups", "own"):
        runs.same(saved[key], found[key])
    trained = set(saved["masters"]) | {"head.weight"}
    runs.same({n: saved["weights"][n] for n in trained}, {n: found["weights"][n] for n in trained})
    train(engine, 4, 5)
    runs.same(found["masters"], runs.snapshot(other)["masters"])  # the state dict is a copy
    for used in (engine, other):
        used.destroy()


# ---- single parameters -----------------------------------------------------------------------------------------------


def fragments_body(folder: str, precision: str, zero: dict[str, Any], load: bool) -> None:
    """Read and write masters, states and gradients; after training or after loading, before the first step."""
    settings = runs.config(3, precision, zero=zero)
    engine = runs.start(settings)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    if load:
        engine.destroy()
        engine = runs.start(settings, seed=9)
        engine.load_checkpoint(folder)
    dtype = engine.module.mix.weight.dtype
    third = 1.0 + torch.arange(13 * 7, dtype=torch.float32).view(13, 7) / 3  # no bf16 number
    for param in (engine.module.mix.weight, engine.module.back.weight):
        value = third.reshape(param.shape)
        safe_set_full_fp32_param(param, value)
        assert torch.equal(safe_get_full_fp32_param(param), value)
        with deepspeed.zero.GatheredParameters(param):
            assert torch.equal(param.detach(), value.to(dtype))
        assert torch.equal(safe_get_full_fp32_param(param), value)  # having been gathered has not rounded it
        for key in ("exp_avg", "exp_avg_sq"):
            safe_set_full_optimizer_state(param, value + 1, key)
            assert torch.equal(safe_get_full_optimizer_state(param, key), value + 1)
        local = safe_get_local_fp32_param(param)
        assert local.numel() == param.ds_tensor.numel()
        safe_set_local_fp32_param(param, local * 2)
        assert torch.equal(safe_get_full_fp32_param(param), value * 2)
        with deepspeed.zero.GatheredParameters(param):
            assert torch.equal(param.detach(), (value * 2).to(dtype))
        safe_set_local_optimizer_state(param, safe_get_local_optimizer_state(param, "exp_avg") * 2, "exp_avg")
        assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), (value + 1) * 2)
    assert safe_get_full_fp32_param(engine.module.frozen.weight) is None
    with pytest.raises(ValueError, match="has shape"):
        safe_set_full_fp32_param(engine.module.mix.weight, torch.zeros(3))
    gradients(engine)
    engine.destroy()


def gradients(engine: Any) -> None:
    tokens = runs.batch(5, dist.get_rank())
    loss = torch.nn.functional.cross_entropy(engine(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss)
    param = engine.module.mix.weight
    grad = safe_get_full_grad(param)
    assert grad is not None
    assert grad.shape == param.shape
    start = param._ds_block().own(param._ds_position)[0]
    local = safe_get_local_grad(param)
    assert torch.equal(local, grad.flatten()[start : start + local.numel()])
    safe_set_full_grad(param, torch.full(param.shape, 0.5))
    assert torch.equal(safe_get_full_grad(param), torch.full(param.shape, 0.5))
    engine.step()


@pytest.mark.parametrize(
    ("precision", "zero", "load"),
    (("fp32", {}, False), ("bf16", {}, True), ("bf16", FORCED, False), ("fp32", FORCED, True)),
)
def test_single_parameters(pool: WorkerPool, tmp_path: Path, precision: str, zero: dict[str, Any], load: bool) -> None:
    pool.run(2, fragments_body, str(tmp_path), precision, zero, load)
