"""Compile the native libraries for every instruction set of this kind of machine, e.g. before making a wheel.

Needs a C++17 compiler and nothing else, not even torch. Exit code 1 and the compiler's words when something cannot be
compiled.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def load_build() -> ModuleType:
    """`deepspeed.native.build` without the rest of the package, whose requirements may not be there yet."""
    if "deepspeed" not in sys.modules:
        for name in ("deepspeed", "deepspeed.native"):
            package = ModuleType(name)
            package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
            sys.modules[name] = package
    return import_module("deepspeed.native.build")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / "deepspeed" / "native" / "lib"
    parser.add_argument(
        "folder", nargs="?", type=Path, default=default, help="default: where an installation looks first"
    )
    folder = parser.parse_args(arguments).folder
    build = load_build()
    began = time.monotonic()
    try:
        made = build.build_package(folder)
    except build.NativeUnavailable as problem:
        print(f"build_ops: {problem}", file=sys.stderr)
        return 1
    for path in made:
        print(f"{path}  {path.stat().st_size / 1024:.0f} KiB")
    print(f"{len(made)} libraries in {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
