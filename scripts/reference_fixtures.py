"""Makes the checkpoints under ``tests/data/reference_checkpoints/<release>``. Run it with the reference's interpreter:

    DS_ACCELERATOR=cpu <reference>/bin/python scripts/reference_fixtures.py FOLDER [CASE ...]

Every case trains a tiny model for a few steps with the reference release, saves it, writes down what it held at that
moment (weights, fp32 masters, moments, counters), makes one more step and writes down its loss and the weights after
it: ``expected.pt`` beside the tag. The table of cases and the model are in ``tests/interchange/cases.py``, which the
tests use too; neither file imports anything of the package under test.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
TAG = "saved"


def load(name: str) -> Any:
    """A module of ``tests/interchange`` by its file, without putting this repository on the path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "interchange" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def add_universal_states(case: Any, folder: Path) -> None:
    """Optimizer state of stages 1 and 2 by parameter, as the reference's converter to universal checkpoints sees it."""
    from deepspeed.checkpoint.ds_to_universal import main as convert

    with tempfile.TemporaryDirectory() as scratch:
        convert(
            argparse.Namespace(
                input_folder=str(folder / TAG), output_folder=f"{scratch}/universal", num_extract_workers=1,
                num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
            )
        )  # fmt: skip
        found: dict[str, dict[str, torch.Tensor]] = {}
        for path in sorted(Path(scratch, "universal", "zero").glob("*/*.pt")):
            if path.stem in case.state_keys:
                found.setdefault(path.parent.name, {})[path.stem] = torch.load(path, weights_only=False)["param"]
    expected = torch.load(folder / "expected.pt", weights_only=False)
    torch.save({**expected, "states": found}, folder / "expected.pt")


# ---- in a rank -----------------------------------------------------------------------------------------------------


def held(engine: Any, case: Any) -> dict[str, Any]:
    """Weights, masters, buffers and counters of the engine, whole, in host memory. Collective."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    found: dict[str, Any] = {"weights": {}, "masters": {}}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=case.stage == 3):
        for name, param in engine.module.named_parameters():
            found["weights"][name] = param.detach().clone()
    for name, param in engine.module.named_parameters():
        if param.requires_grad and case.stage and case.accessors:
            found["masters"][name] = safe_get_full_fp32_param(param).clone()
    found["buffers"] = {name: value.clone() for name, value in engine.module.named_buffers()}
    found["steps"] = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    found["lr"] = [group["lr"] for group in engine.optimizer.param_groups]
    found["scale"] = float(getattr(engine.optimizer, "cur_scale", 1.0) or 1.0)
    return found


def states(engine: Any, case: Any, order: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Optimizer state by parameter and key, as the reference's own tools see it. Collective at stage 3."""
    named = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
    if case.stage == 3:
        from deepspeed.utils import safe_get_full_optimizer_state

        return {
            name: {key: safe_get_full_optimizer_state(param, key).clone() for key in case.state_keys}
            for name, param in named.items()
        }
    if case.stage == 0:
        plain = getattr(engine.optimizer, "optimizer", engine.optimizer)
        masters = [master for group in plain.param_groups for master in group["params"]]
        return {
            name: {key: plain.state[master][key].clone() for key in case.state_keys}
            for name, master in zip(order, masters, strict=True)
        }
    return {}  # add_universal_states


def train(case: Any, cases: Any, target: Path) -> None:
    """One rank of one case."""
    import deepspeed

    load("ranks").prepare_reference()
    rank = int(os.environ["RANK"])
    module = cases.build(case)
    groups = cases.parameter_groups(case, module)
    names = {id(param): name for name, param in module.named_parameters()}
    order = [names[id(param)] for group in groups for param in (group["params"] if case.groups > 1 else [group])]
    optimizer = cases.client_optimizer(case, groups)
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=None if optimizer is not None else groups,
        optimizer=optimizer,
        config=cases.config(case),
    )
    for index in range(case.steps):
        cases.step(engine, index, rank)
    engine.save_checkpoint(
        str(target), tag=TAG, client_state={"note": case.name}, exclude_frozen_parameters=case.exclude_frozen
    )
    expected = held(engine, case)
    expected["states"] = {} if rank and case.stage < 3 else states(engine, case, order)
    expected["next_loss"] = cases.step(engine, case.steps, rank)
    after = held(engine, case)
    expected["after"] = {"weights": after["weights"], "masters": after["masters"]}
    expected["version"] = deepspeed.__version__.split("+")[0]
    if rank == 0:
        torch.save(expected, target / "expected.pt")
    torch.distributed.barrier()
    engine.destroy()


def main(arguments: list[str]) -> int:
    cases = load("cases")
    folder, chosen = Path(arguments[0]).resolve(), [cases.CASES[name] for name in arguments[1:] or cases.CASES]
    if "DS_REFERENCE_RANK" in os.environ:
        for case in chosen:
            (folder / case.name).mkdir(exist_ok=True)
            train(case, cases, folder / case.name)
        return 0
    for ranks in sorted({case.ranks for case in chosen}):
        names = [case.name for case in chosen if case.ranks == ranks]
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            load("ranks").run_ranks(sys.executable, Path(__file__), ranks, [str(made), *names], Path(scratch))
            for name in names:
                if cases.CASES[name].stage in (1, 2) and cases.CASES[name].universal:
                    add_universal_states(cases.CASES[name], made / name)
                for script in (made / name).glob("*.py"):
                    script.unlink()
                shutil.rmtree(folder / name, ignore_errors=True)
                shutil.copytree(made / name, folder / name)
                size = sum(path.stat().st_size for path in (folder / name).rglob("*") if path.is_file())
                print(f"{name}: {size:,} bytes", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
