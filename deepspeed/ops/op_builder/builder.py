"""`OpBuilder`: the historical face of an op, and the builder of ops that are not there.

Owns: names, `is_compatible`, `load`. Does not own: compiling; that is `deepspeed.native.build`, and an op without its
library still loads, over torch.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from deepspeed.ops.registry import OPS

__all__ = ["NotImplementedBuilder", "OpBuilder", "get_default_compute_capabilities", "not_implemented"]


class OpBuilder:
    """One op under its historical names. Subclasses set `NAME` and `_functions`."""

    NAME: ClassVar[str] = ""
    BUILD_VAR: ClassVar[str] = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME
        self.error_log: str | None = None

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether torch is built for AMD GPUs."""
        import torch

        return torch.version.hip is not None

    def absolute_name(self) -> str:
        """The dotted name under which the op used to be installed."""
        return f"deepspeed.ops.{self.name}_op"

    def sources(self) -> list[str]:
        """Files the op is compiled from, relative to the package; empty for one that torch does."""
        libraries = {way.library for way in OPS[self.name].implementations if way.library}
        return [f"native/csrc/{library}.cpp" for library in sorted(libraries)]

    def include_paths(self) -> list[str]:
        return ["native/csrc"]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether any implementation works here; with `verbose` prints why those that do not are not used."""
        works = False
        for implementation, problem in OPS[self.name].candidates():
            if problem:
                self.error_log = problem
                if verbose:
                    print(f"{self.name}: not by {implementation.name}: {problem}")
            works = works or not problem
        return works

    def load(self, verbose: bool = False) -> Any:
        """The object with the op's functions. Compiles the native library at the first use; without one, torch."""
        return self._functions()

    def jit_load(self, verbose: bool = True) -> Any:
        return self.load(verbose)

    def _functions(self) -> Any:
        raise NotImplementedError

    def builder(self) -> Any:
        """There is no setuptools extension: raises RuntimeError that says how libraries get into a wheel."""
        raise RuntimeError(
            f"op {self.name!r} is no torch extension; `DS_BUILD_OPS=1 pip install .` puts the native libraries into a "
            "wheel, and elsewhere they are compiled at first use"
        )


class NotImplementedBuilder(OpBuilder):
    """Builder of an op that this version does not have."""

    NAME = "deepspeed_not_implemented"
    BUILD_VAR = "DS_BUILD_NOT_IMPLEMENTED"
    asked: ClassVar[str] = "this op"

    def absolute_name(self) -> str:
        return f"deepspeed.ops.comm.{self.NAME}_op"

    def sources(self) -> list[str]:
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        if verbose:
            print(f"{self.asked}: not part of this version")
        return False

    def load(self, verbose: bool = False) -> Any:
        """Raises ValueError: there is nothing to load."""
        from deepspeed.accelerator import get_accelerator

        name = get_accelerator().name
        raise ValueError(f"{self.asked}: this op has not been implemented on the {name} backend in this version")


@functools.cache
def not_implemented(name: str) -> type[NotImplementedBuilder]:
    """The class behind the name of a builder whose op is not there."""
    return type("NotImplementedBuilder", (NotImplementedBuilder,), {"asked": name})


def get_default_compute_capabilities() -> str:
    """GPU architectures to compile for, as 'major.minor;...': none, nothing here is compiled for GPUs beforehand."""
    return ""
