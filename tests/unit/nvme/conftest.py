"""What tests of file access share: each engine in turn, and disks that are too small."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed.native.build import NativeUnavailable
from deepspeed.ops.aio.engine import ENGINES, AioEngine


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the engine that everything made in the test uses."""
    monkeypatch.setenv("DS_AIO_ENGINE", request.param)
    if request.param != "python":
        try:
            AioEngine(4096, 1, 1).close()
        except NativeUnavailable as problem:
            pytest.skip(str(problem).splitlines()[0])
    return request.param


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
