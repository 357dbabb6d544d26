"""Tags written by deepspeed 0.19.6 and 0.19.8 load as they are, into any stage, number of ranks and precision.

The tags are test data, made by ``scripts/reference_fixtures.py``, each with ``expected.pt``: what the engine held.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint import CheckpointError
from deepspeed.checkpoint.trusted import load_file
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from tests.harness.pool import WorkerPool
from tests.harness.width import wide
from tests.interchange import cases

DATA = Path(__file__).resolve().parents[2] / "data" / "reference_checkpoints"
OLDER = ("stage0_bf16", "stage1_bf16", "stage2_bf16", "stage3_fp32")
# name -> (stage, ranks, precision) it is loaded into: always its own, one that is quite another
LAYOUTS: dict[str, tuple[int, int, str]] = {
    "stage0_fp32": (3, 2, "bf16"),
    "stage0_bf16": (2, 2, "fp32"),
    "stage0_fp16": (1, 1, "fp16"),
    "stage1_fp32": (0, 1, "fp32"),
    "stage1_bf16": (3, 1, "bf16"),
    "stage1_bf16_grads": (2, 1, "fp32"),
    "stage1_fp16": (3, 2, "fp16"),
    "stage2_fp32": (3, 2, "bf16"),
    "stage2_bf16": (1, 1, "fp32"),
    "stage2_fp16_static": (3, 2, "fp16_static"),
    "stage2_elastic": (1, 1, "bf16"),
    "stage2_sgd": (3, 2, "fp32"),
    "stage3_fp32": (0, 1, "fp32"),
    "stage3_bf16": (2, 2, "bf16"),
    "stage3_fp16": (1, 1, "fp32"),
}


def scrambled(case: cases.Case) -> cases.Tiny:
    """The case's model with other values: what is right afterwards has been loaded."""
    module = cases.build(case)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(1.0)
    return module


def start(case: cases.Case, config: dict[str, Any], module: Any = None) -> Any:
    import deepspeed

    module = scrambled(case) if module is None else module
    groups = cases.parameter_groups(case, module)
    optimizer = cases.client_optimizer(case, groups)
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=None if optimizer else groups, optimizer=optimizer, config=config
    )
    return engine


def load(folder: str, name: str, layout: tuple[int, int, str] | None) -> dict[str, Any]:
    """Load and compare with what was held, bit by bit; then one step. ``layout`` None: the saved one."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    case = cases.CASES[name]
    stage, _, precision = layout or (case.stage, case.ranks, case.precision)
    expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
    engine = start(case, cases.config(case, stage, precision))
    path, client_state = engine.load_checkpoint(folder)
    assert path is not None
    assert client_state["note"] == name
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == expected["steps"]
    if "stage2_elastic" not in name:  # holds no settings
        assert [group["lr"] for group in engine.optimizer.param_groups] == expected["lr"]
    if precision == case.precision == "fp16" and case.stage:
        assert engine.optimizer.loss_scaler.cur_scale == expected["scale"]
    wrong = []
    with GatheredParameters(list(engine.module.parameters())):
        for key, param in engine.module.named_parameters():
            # At another precision weights are rounded from the masters, which round to the saved weights.
            held = expected["masters"].get(key) if precision != case.precision else None
            value, found = expected["weights"][key] if held is None else held, param.detach()
            found = found if held is not None or param.dtype != torch.float32 else found.to(value.dtype)
            wrong += [f"weight {key}"] * (not same(found, value.to(found.dtype)))
    for key, param in engine.module.named_parameters():
        if key in expected["masters"]:
            wrong += [f"master {key}"] * (not same(safe_get_full_fp32_param(param), expected["masters"][key]))
        for state, value in expected["states"].get(key, {}).items():
            wrong += [f"{state} {key}"] * (not same(safe_get_full_optimizer_state(param, state), value))
    assert not wrong, wrong
    loss = cases.step(engine, case.steps, dist.get_rank())
    with GatheredParameters(list(engine.module.parameters())):
        after = {key: param.detach().clone() for key, param in engine.module.named_parameters()}
    engine.destroy()
    return {"loss": loss, "after": after, "states": len(expected["states"])}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.reshape(-1), right.reshape(-1))


def tags() -> list[Any]:
    return [("0.19.8", name) for name in cases.CASES] + [("0.19.6", name) for name in OLDER]


@pytest.mark.parametrize(("release", "name"), tags())
def test_it_goes_on_where_it_was_saved(pool: WorkerPool, release: str, name: str) -> None:
    folder, case = DATA / release / name, cases.CASES[name]
    expected = torch.load(folder / "expected.pt", weights_only=True)
    assert expected["version"] == release
    (first, *_) = pool.run(case.ranks, load, str(folder), name, None)
    # The same weights give the same loss, but for the order of sums in the matrix products of another machine.
    assert first["loss"] == pytest.approx(expected["next_loss"], rel=1e-5 if case.precision == "fp32" else 1e-2)
    for key, value in expected["after"]["weights"].items():
        # Ranks add up in another order: one rounding of the weight's dtype.
        limit = {"fp32": 1e-6, "bf16": 2**-7, "fp16": 2**-9}[case.precision.partition("_")[0]]
        difference = (first["after"][key].float() - value.float()).abs().max()
        assert difference <= limit * max(1.0, float(value.float().abs().max())), key


DAILY = ("stage0_bf16", "stage1_bf16", "stage2_fp32", "stage3_bf16")


@pytest.mark.parametrize("name", [name if name in DAILY else wide(name) for name in LAYOUTS])
def test_it_loads_into_another_layout(pool: WorkerPool, name: str) -> None:
    layout = LAYOUTS[name]
    pool.run(layout[1], load, str(DATA / "0.19.8" / name), name, layout)


def failure(folder: str, name: str, **keywords: Any) -> str:
    """The error of a load; weights must be untouched."""
    case = cases.CASES[name]
    engine = start(case, cases.config(case, ranks=1), keywords.pop("module", None))
    before = {key: value.clone() for key, value in engine.module.state_dict().items()}
    try:
        engine.load_checkpoint(folder, **keywords)
    except CheckpointError as error:
        message = str(error)
    else:
        message = "loaded"
    assert all(torch.equal(value, before[key]) for key, value in engine.module.state_dict().items())
    engine.destroy()
    return message


def copied(tmp_path: Path, name: str) -> Path:
    target = tmp_path / name
    shutil.copytree(DATA / "0.19.8" / name, target)
    return target


def edited(path: Path, edit: Any) -> None:
    """Rewrite one file of a tag after ``edit`` has changed its content."""
    content = load_file(path)
    edit(content)
    plain = _plain(content)
    path.unlink()
    torch.save(plain, path)


def _plain(value: Any) -> Any:
    """Tensors of their own; objects of old classes as what the reader makes of them."""
    from deepspeed.checkpoint.trusted import PlainObject
    from deepspeed.utils.tensor_fragment import fragment_address

    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, PlainObject):
        return fragment_address(value.numel, value.start) if hasattr(value, "numel") else None
    if isinstance(value, dict):
        return type(value)((key, _plain(item)) for key, item in value.items())
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def test_a_missing_shard_is_named(pool: WorkerPool, tmp_path: Path) -> None:
    folder = copied(tmp_path, "stage2_bf16")
    (folder / "saved" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    (message,) = pool.run(1, failure, str(folder), "stage2_bf16")
    assert "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt" in message
    folder = copied(tmp_path, "stage3_fp32")
    (folder / "saved" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    (message,) = pool.run(1, failure, str(folder), "stage3_fp32")
    assert "zero_pp_rank_1_mp_rank_00_model_states.pt" in message


def shorter_masters(content: dict[str, Any]) -> None:
    state = content["optimizer_state_dict"]
    state["fp32_flat_groups"][1] = state["fp32_flat_groups"][1][:-1]


def moved_mapping(content: dict[str, Any]) -> None:
    mapping = content["optimizer_state_dict"]["param_slice_mappings"][0]
    next(iter(mapping.values())).start += 1


def short_state(content: dict[str, Any]) -> None:
    state = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    state["exp_avg"] = state["exp_avg"][:-9]


def experts(content: dict[str, Any]) -> None:
    content["num_experts"] = [4]


@pytest.mark.parametrize(
    ("name", "file", "edit", "says"),
    (
        ("stage3_fp32", "zero_pp_rank_0_mp_rank_00_optim_states.pt", shorter_masters, "does not end where a sub-group"),
        ("stage2_bf16", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", moved_mapping, "param_slice_mappings"),
        ("stage2_bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", short_state, "'exp_avg' has shape"),
        ("stage2_bf16", "mp_rank_00_model_states.pt", experts, "holds experts"),
    ),
)
def test_what_does_not_add_up_is_an_error(
    pool: WorkerPool, tmp_path: Path, name: str, file: str, edit: Any, says: str
) -> None:
    folder = copied(tmp_path, name)
    edited(folder / "saved" / file, edit)
    (message,) = pool.run(1, failure, str(folder), name)
    assert says in message
    assert file in message


def other_groups(folder: str) -> str:
    """Stage 0 files name no parameters: groups that are not the saved ones cannot be told apart."""
    case = cases.CASES["stage0_fp32"]
    import deepspeed

    module = scrambled(case)
    engine, *_ = deepspeed.initialize(model=module, config=cases.config(case))
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    path, _ = engine.load_checkpoint(folder, load_module_only=True)
    assert path is not None
    engine.destroy()
    return str(caught.value)


def test_stage_0_needs_the_saved_groups(pool: WorkerPool) -> None:
    (message,) = pool.run(1, other_groups, str(DATA / "0.19.8" / "stage0_fp32"))
    assert "parameter groups of [3, 3] parameters" in message
    assert "1 groups, saved were 2" in message


def weights_alone(folder: str, name: str) -> None:
    case = cases.CASES[name]
    expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
    engine = start(case, cases.config(case, ranks=1))
    engine.load_checkpoint(folder, load_module_only=True)
    with GatheredParameters(list(engine.module.parameters())):
        for key, param in engine.module.named_parameters():
            assert torch.equal(param.detach(), expected["weights"][key]), key
    engine.destroy()


def test_weights_load_without_the_optimizer_files(pool: WorkerPool, tmp_path: Path) -> None:
    folder = copied(tmp_path, "stage2_bf16")
    for path in (folder / "saved").glob("*optim_states.pt"):
        path.unlink()
    pool.run(1, weights_alone, str(folder), "stage2_bf16")


def another_optimizer(folder: str) -> str:
    case = cases.CASES["stage2_sgd"]
    config = {**cases.config(case, ranks=1), "optimizer": cases.OPTIMIZERS["torch_adamw"]}
    engine = start(case, config)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    engine.destroy()
    return str(caught.value)


def test_the_state_of_another_optimizer_is_refused(pool: WorkerPool) -> None:
    (message,) = pool.run(1, another_optimizer, str(DATA / "0.19.8" / "stage2_sgd"))
    assert "'sgd'" in message
