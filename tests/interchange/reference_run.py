"""Run by the reference's interpreter: loads converted tags, makes a step, and puts its own tools to them.

    <reference>/bin/python tests/interchange/reference_run.py FOLDER CASE ...      (on every rank)

``FOLDER/CASE/converted`` is a checkpoint folder; ``FOLDER/CASE/seen.pt`` becomes what the engine held after loading and
after one step, ``consolidated.pt`` what its ``zero_to_fp32`` makes of it, ``universal`` what ``ds_to_universal`` does.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))


def held(engine: Any, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and masters, whole. Collective."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    found: dict[str, dict[str, torch.Tensor]] = {"weights": {}, "masters": {}}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        for name, param in engine.module.named_parameters():
            found["weights"][name] = param.detach().clone()
    for name, param in engine.module.named_parameters():
        if param.requires_grad and stage:
            found["masters"][name] = safe_get_full_fp32_param(param).clone()
    return found


def resume(case: Any, cases: Any, folder: Path) -> None:
    import deepspeed

    module = cases.build(case)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(1.0)
    groups = cases.parameter_groups(case, module)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=cases.config(case))
    path, client_state = engine.load_checkpoint(str(folder / "converted"))
    assert path is not None
    rank = int(os.environ["RANK"])
    seen: dict[str, Any] = {"loaded": held(engine, case.stage), "note": client_state["note"]}
    seen["steps"] = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    seen["lr"] = [group["lr"] for group in engine.optimizer.param_groups]
    seen["scale"] = float(getattr(engine.optimizer, "cur_scale", 1.0) or 1.0)
    seen["loss"] = cases.step(engine, case.steps, rank)
    seen["after"] = held(engine, case.stage)
    if rank == 0:
        torch.save(seen, folder / "seen.pt")
    torch.distributed.barrier()
    engine.destroy()


def tools(case: Any, folder: Path) -> None:
    """Theirs, over the converted tag."""
    from deepspeed.checkpoint.ds_to_universal import main as to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if case.reads_back:
        state = get_fp32_state_dict_from_zero_checkpoint(str(folder / "converted"))
        torch.save({name: value.clone() for name, value in state.items()}, folder / "consolidated.pt")
    if not case.universal:
        return
    tag = (folder / "converted" / "latest").read_text()
    to_universal(
        argparse.Namespace(
            input_folder=str(folder / "converted" / tag), output_folder=str(folder / "universal"),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    import cases
    import ranks

    ranks.prepare_reference()
    folder, chosen = Path(arguments[0]), [cases.CASES[name] for name in arguments[1:]]
    for case in chosen:
        resume(case, cases, folder / case.name)
    if os.environ["RANK"] == "0":
        for case in chosen:
            if case.stage:
                tools(case, folder / case.name)
    torch.distributed.barrier()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
