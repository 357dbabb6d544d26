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

NEEDS = ("lightning",)
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed here: pip install lightning"
)
SHAPES = {"net.0.weight": [16, 8], "net.0.bias": [16], "net.2.weight": [2, 16], "net.2.bias": [2]}


def run(folder: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "examples" / "lightning" / "train.py"), "--folder", str(folder), *options]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment.pop("DS_CONFIG_STRICT", None)  # the strategy always writes aio.thread_count, which is no key
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Exception ignored" not in done.stderr
    result: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return result


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("stage1"), "--stage", "1")


@pytest.mark.parametrize("options", (("--stage", "2"), ("--stage", "3"), ("--stage", "2", "--offload")), ids=" ".join)
def test_stages_agree_save_and_resume(options: tuple[str, ...], plain: dict[str, Any], tmp_path: Path) -> None:
    result = run(tmp_path, *options)
    assert result["shapes"] == SHAPES
    assert result["steps"] == plain["steps"] == 4
    for key in ("losses", "resumed"):
        assert result[key] == pytest.approx(plain[key], rel=1e-3)
    # The state has come back: the first loss of the second epoch is not that of an untrained model.
    assert result["resumed"][0] != result["losses"][0]


@pytest.mark.parametrize("precision", ("bf16-mixed", "16-mixed"))
def test_half_precisions(precision: str, plain: dict[str, Any], tmp_path: Path) -> None:
    result = run(tmp_path, "--stage", "3", "--precision", precision)
    assert result["losses"] == pytest.approx(plain["losses"], abs=0.05)
