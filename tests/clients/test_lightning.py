"""Lightning's DeepSpeedStrategy as in the example: every stage and placement trains the same, saves and resumes."""

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

SCRIPT = ROOT / "examples" / "lightning" / "train.py"
SHAPES = {"net.0.weight": [16, 8], "net.0.bias": [16], "net.2.weight": [2, 16], "net.2.bias": [2]}


def run_command(folder: Path, *options: str) -> dict[str, Any]:
    """The example as its documentation starts it: Lightning starts the second process."""
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), *options]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment.pop("DS_CONFIG_STRICT", None)  # the strategy always writes aio.thread_count, which is no key
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Exception ignored" not in done.stderr
    result: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return result


def example(folder: str, *options: str) -> dict[str, Any]:
    """The same in a process that has Lightning imported, which takes it longer than training."""
    os.environ.pop("DS_CONFIG_STRICT", None)
    spec = importlib.util.spec_from_file_location("lightning_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result: dict[str, Any] = module.main(["--folder", folder, *options])
    return result


_PLAIN: dict[str, Any] = {}


@pytest.fixture
def plain(ranks: Any, tmp_path: Path) -> dict[str, Any]:
    """Stage 1, run once."""
    if not _PLAIN:
        _PLAIN.update(ranks(example, str(tmp_path / "stage1"), "--stage", "1")[0])
    return _PLAIN


@pytest.mark.flow(stage="1", dtype="fp32")
def test_the_command(plain: dict[str, Any], tmp_path: Path) -> None:
    assert run_command(tmp_path, "--stage", "1") == plain


@pytest.mark.flow(dtype="fp32")
@pytest.mark.parametrize("options", (("--stage", "2"), ("--stage", "3"), ("--stage", "2", "--offload")), ids=" ".join)
def test_stages_agree_save_and_resume(
    ranks: Any, options: tuple[str, ...], plain: dict[str, Any], tmp_path: Path
) -> None:
    result = ranks(example, str(tmp_path), *options)[0]
    assert plain["shapes"] == result["shapes"] == SHAPES
    assert result["steps"] == plain["steps"] == 4
    for key in ("losses", "resumed"):
        assert result[key] == pytest.approx(plain[key], rel=1e-3)
    # The state has come back: the first loss of the second epoch is not that of an untrained model.
    assert result["resumed"][0] != result["losses"][0]


@pytest.mark.flow(stage="3")
@pytest.mark.parametrize("precision", ("bf16-mixed", "16-mixed"))
def test_half_precisions(ranks: Any, precision: str, plain: dict[str, Any], tmp_path: Path) -> None:
    result = ranks(example, str(tmp_path), "--stage", "3", "--precision", precision)[0]
    assert result["losses"] == pytest.approx(plain["losses"], abs=0.05)
