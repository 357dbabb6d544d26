"""Every native library by itself, under the address and undefined-behaviour sanitizers.

A driver includes the library's source and calls it on memory of the very size that it may touch. What a library
computes is compared with torch elsewhere.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deepspeed.native import build, isa
from deepspeed.native.build import find_compiler

HERE = Path(__file__).parent
# Library -> what its driver prints at the end, and what it is told. Two ranks of the transport, in threads.
DRIVERS: dict[str, tuple[str, list[str]]] = {
    "aio": ("engine 2, flags 0: well", ["{folder}"]),
    "blockwise": ("0 failures", []),
    "crc32": ("0 failures", []),
    "draws": ("0 failures", []),
    "optimizers": ("0 failures", []),
    "transport": ("ok", ["2", "6"]),
}


def test_every_library_has_a_driver() -> None:
    assert set(DRIVERS) == set(build.LIBRARIES)


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
@pytest.mark.parametrize("library", DRIVERS)
def test_sanitizers_find_nothing(library: str, tmp_path: Path) -> None:
    compiler, program = find_compiler(), tmp_path / "driver"
    assert compiler is not None
    # The first source is included by the driver; the others of this library are compiled beside it.
    sources = [HERE / f"{library}_driver.cpp", *build.SOURCES.glob(f"{library}_sums.cpp")]
    command = [
        compiler, "-std=c++17", *isa.choose().flags, *build.LIBRARIES[library], "-O0", "-g0", "-fexceptions",
        "-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{build.SOURCES}",
        *map(str, sources), "-o", str(program),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr:
        pytest.skip("the compiler has no sanitizer libraries")
    assert done.returncode == 0, done.stderr
    end, told = DRIVERS[library]
    arguments = [word.format(folder=tmp_path) for word in told]
    ran = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=240)
    assert end in ran.stdout, ran.stdout + ran.stderr
    assert (ran.returncode, ran.stderr) == (0, "")
