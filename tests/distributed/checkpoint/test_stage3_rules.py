"""Checkpoints of stage 3: the rules of the lower stages hold (their test bodies run here), and those of its own."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.distributed.checkpoint import runs, test_load_options, test_rules, test_save_and_load
from tests.distributed.checkpoint.runs import lines, raises, train
from tests.distributed.checkpoint.test_stage3_resume import FORCED
from tests.harness.pool import WorkerPool


def test_tags_name_what_is_loaded(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, test_rules.tags_body, str(tmp_path), 3)


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_options_of_load(pool: WorkerPool, tmp_path: Path, precision: str) -> None:
    pool.run(2, test_load_options.options_body, str(tmp_path), 3, precision)


def test_later_frozen_and_unfrozen_parameters(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, test_load_options.unfrozen_body, str(tmp_path), 3)


def test_frozen_parameters_can_be_left_out(pool: WorkerPool, tmp_path: Path) -> None:
    trained = pool.run(2, test_load_options.frozen_body, str(tmp_path), 3)[0]
    assert runs.size_of(tmp_path / "global_step2") <= trained * 12 + 65536


@pytest.mark.parametrize("steps", (0, 2))
def test_any_order_of_save_and_load(pool: WorkerPool, tmp_path: Path, steps: int) -> None:
    pool.run(2, test_save_and_load.order_body, str(tmp_path), 3, steps)
    assert test_save_and_load.tensors_of(tmp_path / "a") == test_save_and_load.tensors_of(tmp_path / "b")


def test_names_do_not_know_of_compile(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, test_save_and_load.compile_body, str(tmp_path), 3)


def compiled_body(folder: str) -> None:
    """Modules that really are compiled: training, saving and resuming as without."""
    with warnings.catch_warnings():
        # Tracing looks at the .grad of what a graph break hands over, and torch itself warns of that.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        train_compiled(folder)


def train_compiled(folder: str) -> None:
    plain = torch.nn.Module.__init__  # torch.compile wraps it for good
    settings = runs.config(3, zero=FORCED)
    try:
        engine = runs.start(settings)
        compiled = runs.start(settings, module=torch.compile(runs.build(), backend="eager"))
        for used in (engine, compiled):
            torch.manual_seed(dist.get_rank())
            train(used, 0, 2)
        runs.same(test_save_and_load.clean(engine), test_save_and_load.clean(compiled))
        compiled.save_checkpoint(folder)
        other = runs.start(settings, seed=9)
        other.compile(backend="eager")
        other.load_checkpoint(folder)
        for used in (engine, other):
            torch.manual_seed(dist.get_rank())
            train(used, 2, 4)
        runs.same(test_save_and_load.clean(engine), test_save_and_load.clean(other))
        for used in (engine, compiled, other):
            used.destroy()
    finally:
        torch.nn.Module.__init__ = plain  # type: ignore[method-assign]
        torch.compiler.reset()


def test_compiled_modules(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, compiled_body, str(tmp_path))


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_size_on_disk_is_the_state(pool: WorkerPool, tmp_path: Path, precision: str) -> None:
    trained_and_frozen = pool.run(2, size_body, str(tmp_path), precision)[0]
    assert trained_and_frozen <= runs.size_of(tmp_path / "global_step2") <= trained_and_frozen + 65536


def size_body(folder: str, precision: str) -> int:
    engine = runs.start(runs.config(3, precision), module=runs.build(0, runs.MostlyFrozen))
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    params = list(engine.module.parameters())
    engine.destroy()
    # Masters and two states of what is trained; the weights of what is frozen. No 16-bit copies of masters.
    return sum(param.numel() * 12 if param.requires_grad else param.nbytes for param in params)


def save_body(folder: str, precision: str) -> None:
    engine = runs.start(runs.config(3, precision, zero=FORCED))
    train(engine, 0, 2)
    engine.save_checkpoint(folder, client_state={"plain": [1]})
    engine.destroy()


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_files_and_keys_are_the_historical_ones(pool: WorkerPool, tmp_path: Path, precision: str) -> None:
    pool.run(2, save_body, str(tmp_path), precision)
    folder = tmp_path / "global_step2"
    prefix = "bf16_" if precision == "bf16" else ""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    models = [torch.load(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt") for rank in range(2)]
    shards = [
        torch.load(folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
        for rank in range(2)
    ]
    assert len(list(folder.glob("*_states.pt"))) == 4
    reference = runs.build()
    shapes = {name: tuple(param.shape) for name, param in reference.named_parameters()}
    for model, shard in zip(models, shards, strict=True):
        for name, value in model["module"].items():
            expected = (
                ((0,), dtype) if name in shapes or name == "head.weight" else (reference.state_dict()[name].shape,)
            )
            assert (value.shape, value.dtype)[: len(expected)] == expected, name
        assert set(model["module"]) == set(reference.state_dict())
        assert model["shared_params"] == {"head.weight": "embed.weight"}
        trained = {name: tuple(shape) for group in model["param_shapes"] for name, shape in group.items()}
        frozen = {name: tuple(shape) for name, shape in model["frozen_param_shapes"].items()}
        assert {**trained, **frozen} == shapes
        assert set(frozen) == {"frozen.weight", "frozen.bias"}
        assert int(shard["zero_stage"]) == 3
        assert shard["partition_count"] == 2
        assert {"state", "param_groups"} <= set(shard["optimizer_state_dict"])
    for name in ("frozen.weight", "frozen.bias"):
        parts = [model["frozen_param_fragments"][name] for model in models]
        assert torch.equal(torch.cat(parts), reference.get_parameter(name).detach().flatten().to(dtype)), name
    held = sum(flat.numel() for shard in shards for flat in shard["fp32_flat_groups"])
    assert held == sum(param.numel() for param in reference.parameters() if param.requires_grad)
    assert all(flat.dtype == torch.float32 for shard in shards for flat in shard["fp32_flat_groups"])


class Watch:
    """Counts the elements that are gathered inside, and the files that are opened."""

    def __enter__(self) -> Watch:
        from deepspeed.checkpoint import trusted
        from deepspeed.runtime.zero.param_block import ParamBlock

        self.numel, self.files = 0, []
        self.block, self.kept = ParamBlock, (ParamBlock.launch, ParamBlock.refresh)
        self.trusted, self.load = trusted, trusted.load_file

        def launch(block: ParamBlock, **kwargs: Any) -> None:
            self.numel += block.numel
            self.kept[0](block, **kwargs)

        def refresh(block: ParamBlock, **kwargs: Any) -> Any:
            self.numel += block.numel
            return self.kept[1](block, **kwargs)

        def load_file(path: Path) -> Any:
            self.files.append(path.name)
            return self.load(path)

        ParamBlock.launch, ParamBlock.refresh, trusted.load_file = launch, refresh, load_file  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        self.block.launch, self.block.refresh = self.kept
        self.trusted.load_file = self.load


def no_gathers_body(folder: str) -> None:
    rank = dist.get_rank()
    settings = runs.config(3, "bf16", zero=FORCED)
    engine = runs.start(settings)
    with Watch() as seen:
        train(engine, 0, 1)
    assert seen.numel > 0, "the watch sees no gathers"
    engine.sharded_module.gatherer.release_all()
    with Watch() as seen:
        engine.save_checkpoint(folder)
    assert seen.numel == 0
    other = runs.start(settings, seed=9)
    with Watch() as seen:
        other.load_checkpoint(folder)
    assert seen.numel == 0
    assert other.sharded_module.gatherer.live_numel == 0
    # At the same number of ranks each reads its own files; ties and buffers are in them.
    assert set(seen.files) == {
        f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        f"rng_state_{rank}.pt",
    }
    runs.same(runs.snapshot(engine), {**runs.snapshot(other), "random": runs.snapshot(engine)["random"]})
    for used in (engine, other):
        used.destroy()


def test_nothing_is_gathered_to_save_or_load(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, no_gathers_body, str(tmp_path))


def damage_body(folder: str, name: str, how: str) -> None:
    settings = runs.config(3, "bf16")
    engine = runs.start(settings)
    train(engine, 0, 1)
    engine.save_checkpoint(folder, tag="t")
    before = runs.snapshot(engine)
    path = Path(folder, "t", name)
    if dist.get_rank() == 0:
        if how == "missing":
            os.remove(path)
        else:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    dist.barrier()
    raises(lambda: engine.load_checkpoint(folder, tag="t"), name, *(["is missing"] if how == "missing" else []))
    runs.same(before, runs.snapshot(engine))
    engine.destroy()


@pytest.mark.parametrize("how", ("missing", "damaged"))
def test_damage_is_an_error_on_all_ranks(pool: WorkerPool, tmp_path: Path, how: str) -> None:
    pool.run(2, damage_body, str(tmp_path), "zero_pp_rank_1_mp_rank_00_model_states.pt", how)


def other_release_body(folder: str) -> None:
    engine = runs.start(runs.config(3))
    if dist.get_rank() == 0:
        os.makedirs(f"{folder}/old")
        for rank in range(2):
            torch.save(
                {"module": {}, "ds_version": "0.1"}, f"{folder}/old/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            )
    dist.barrier()
    wanted = ("has no dp_world_size", "another release", "zero_to_fp32.py")
    raises(lambda: engine.load_checkpoint(folder, tag="old"), *wanted)
    with deepspeed.zero.GatheredParameters(engine.module.mix.weight):
        raises(lambda: engine.load_checkpoint(folder, tag="old"), "GatheredParameters", "leave the context")
    engine.destroy()


def test_what_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, other_release_body, str(tmp_path))


class Renaming(runs.Everything):
    """Takes loading into its own hands: the saved names are not its own."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in [name for name in state_dict if name.startswith("mix.")]:
            state_dict[name.replace("mix.", "blend.")] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)


def renaming() -> Renaming:
    module = Renaming()
    module.blend = module.mix
    del module.mix
    Renaming.mix = property(lambda self: self.blend)
    return module


def renaming_body(folder: str) -> None:
    engine = runs.start(runs.config(3, "bf16", zero=FORCED))
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    right = {name.replace("mix.", "blend."): bits for name, bits in runs.whole(engine.module).items()}
    for stage in (3, 1):
        other = runs.start(runs.config(stage, "bf16"), module=runs.build(9, renaming))
        with lines():
            other.load_checkpoint(folder, load_module_only=True)
        runs.same(right, runs.whole(other.module))
        other.destroy()
    engine.destroy()


def test_modules_that_rename_keys_get_whole_tensors(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, renaming_body, str(tmp_path))
