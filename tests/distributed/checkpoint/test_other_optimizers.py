"""A tag of one optimizer and an engine with another: refused with both names, unless the states are not asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.runtime.zero import state_dict as zero_state
from tests.distributed.checkpoint import runs
from tests.distributed.checkpoint.runs import lines, raises
from tests.harness.pool import WorkerPool

BLOCKS: dict[str, dict[str, Any]] = {
    "adam": runs.ADAMW,
    "lion": {"type": "Lion", "params": {"lr": 1e-3}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "lamb": {"type": "Lamb", "params": {"lr": 1e-2}},
    "sgd": runs.SGD,
}


def body(folder: str, stage: int, saved: str, own: list[str]) -> None:
    engine = runs.start(runs.config(stage, optimizer=BLOCKS[saved]))
    runs.train(engine, 0, 1)
    engine.save_checkpoint(folder)
    weights = runs.whole(engine.module)
    in_memory = engine.optimizer.state_dict()
    engine.destroy()
    for name in own:
        other = runs.start(runs.config(stage, optimizer=BLOCKS[name]), seed=9)
        before = runs.snapshot(other, ())
        raises(
            lambda other=other: other.load_checkpoint(folder), f"{saved!r}", f"{name!r}", "load_optimizer_states=False"
        )
        with pytest.raises(ValueError, match=f"state of optimizer '{saved}', and '{name}' runs here"):
            other.optimizer.load_state_dict(in_memory)
        runs.same(before, runs.snapshot(other, ()))
        for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
            with lines() as said:
                other.load_checkpoint(folder, **options)
            assert not [line for line in said if "optimizer" in line], said
            runs.same(weights, runs.whole(other.module))
        runs.train(other, 1, 2)
        other.destroy()


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_states_of_another_optimizer_are_refused(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    pool.run(2, body, str(tmp_path), stage, "adam", ["lion", "adagrad", "sgd"])


def test_so_are_those_with_fewer_states(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, body, str(tmp_path), 2, "lion", ["adam", "lamb"])


class Mine(torch.optim.AdamW):
    pass


def of_the_client(folder: str) -> None:
    settings = {key: value for key, value in runs.config(1).items() if key not in ("optimizer", "scheduler")}
    module = runs.build(0)
    engine = runs.start(settings, module=module, optimizer=Mine(module.parameters(), lr=1e-3))
    runs.train(engine, 0, 1)
    engine.save_checkpoint(folder)
    engine.destroy()
    raises(lambda: runs.start(runs.config(1, optimizer=BLOCKS["lion"])).load_checkpoint(folder), "'mine'", "'lion'")
    built_in = runs.start(runs.config(1))
    built_in.load_checkpoint(folder, load_lr_scheduler_states=False)  # an AdamW is an AdamW
    built_in.destroy()


def test_optimizers_of_the_client_have_a_family_too(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, of_the_client, str(tmp_path))


def test_records_that_list_the_common_bases_are_read() -> None:
    assert not zero_state.related(["lion"], ["adam", "rowoptimizer", "stateoptimizer"])
    assert zero_state.related(["adam"], ["adam", "rowoptimizer", "stateoptimizer"])
    assert zero_state.related(["mine", "adam"], ["FusedAdam"])
