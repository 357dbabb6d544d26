"""`accelerate launch` on two processes: the example by its config file, fields by command line, a rank that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import accelerated as acc
from tests.clients import recipe
from tests.harness.project import ROOT

EXAMPLE = ROOT / "examples" / "accelerate"


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", *arguments]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=folder, env=environment, check=False
    )


@pytest.mark.flow(stage="3", dtype="fp32")
def test_the_example_as_documented(tmp_path: Path) -> None:
    """`accelerate launch` with the file that `accelerate config` writes."""
    done = launch(EXAMPLE, "--config_file", "deepspeed.yaml", "train.py", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Exception ignored" not in done.stderr
    result: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    losses = result["losses"]
    assert result["stage"] == 3
    assert len(losses) == 16
    assert losses[-1] < losses[0] - 0.5
    assert result["resumed"] == losses[8:]
    assert result["exported"] < losses[0] - 0.5


FAILS = """
import torch
from accelerate import Accelerator, PartialState

PartialState(cpu=True)
accelerator = Accelerator()
settings = accelerator.state.deepspeed_plugin.deepspeed_config
assert settings["zero_optimization"]["stage"] == 2, settings
assert settings["gradient_clipping"] == 0.5, settings
settings["train_micro_batch_size_per_gpu"] = 2
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for number in range(4):
    if number == 2 and accelerator.process_index == 1:
        raise ValueError("the file of rank 1 has ended early")
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
"""


@pytest.mark.flow(stage="2", dtype="fp32")
def test_a_rank_that_fails_ends_the_run(tmp_path: Path) -> None:
    """Stage and clipping come from the command line. The cause is told, no rank goes on waiting."""
    (tmp_path / "train.py").write_text(FAILS)
    fields = ("--use_deepspeed", "--num_processes", "2", "--zero_stage", "2", "--gradient_clipping", "0.5")
    rest = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "train.py")
    done = launch(tmp_path, *fields, "--offload_optimizer_device", "none", *rest)
    assert done.returncode != 0
    assert "ValueError: the file of rank 1 has ended early" in done.stderr, done.stderr[-4000:]
    assert "rank      : 1" in done.stderr  # the summary names the first to fail


def unresolved(folder: str) -> None:
    from accelerate.utils import DummyOptim, DummyScheduler

    made = acc.accelerator(2, "dummy", folder)
    model = recipe.llama()
    loader = torch.utils.data.DataLoader(recipe.Tokens(), batch_size=2)
    optimizer = DummyOptim(model.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match=r"scheduler\.params\.total_num_steps.*auto"):
        made.prepare(model, optimizer, loader, DummyScheduler(optimizer, warmup_num_steps=2))


def mismatching(folder: str) -> None:
    made = acc.accelerator(2, "dummy", folder, train_batch_size=100)
    with pytest.raises(ValueError, match=r"train_batch_size.*100") as caught:
        acc.prepare(made, "dummy", recipe.llama())
    assert "8" in str(caught.value)  # 2 micro x 2 accumulation x 2 ranks


@pytest.mark.parametrize("flow", (unresolved, mismatching))
def test_values_nobody_has_resolved(ranks: Any, tmp_path: Path, flow: Any) -> None:
    ranks(flow, str(tmp_path))
