"""`DS_BUILD_OPS=1 pip install .`: put the native libraries into the wheel, for every instruction set of this kind of
machine. Without that variable nothing is compiled at installation, and each library is compiled at its first use. All
else about the package stands in pyproject.toml.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

WANTED = os.environ.get("DS_BUILD_OPS", "").strip().lower() in ("1", "true", "yes", "on")


class BuildWithOps(build_py):
    """Compiles into the folder the wheel is made from."""

    def run(self) -> None:
        super().run()
        if WANTED and not self.editable_mode:
            sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts"))
            import build_ops

            for path in build_ops.load_build().build_package(Path(self.build_lib) / "deepspeed" / "native" / "lib"):
                self.announce(f"built {path}", level=2)


class PlatformWheel(bdist_wheel):
    """The libraries need this kind of machine and no certain Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not WANTED

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if WANTED else (python, abi, platform)


class WithOps(Distribution):
    def has_ext_modules(self) -> bool:
        return WANTED


commands: dict[str, Any] = {"build_py": BuildWithOps, "bdist_wheel": PlatformWheel}
setup(cmdclass=commands, distclass=WithOps)
