"""The C++ engine by itself, under sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deepspeed.native import build
from deepspeed.native.build import find_compiler
from tests.harness.project import ROOT


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    program = tmp_path / "driver"
    command = [
        compiler, "-std=c++17", "-O0", "-g0", "-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
        f"-I{build.SOURCES}", str(ROOT / "tests" / "native" / "aio_driver.cpp"), "-o", str(program),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr:
        pytest.skip("the compiler has no sanitizer libraries")
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([program, tmp_path], capture_output=True, text=True, check=False, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "engine 2, flags 0: well" in ran.stdout
