"""Which instruction sets this CPU has, and with which compiler flags each variant of a native library is made.

A kernel is one source; each variant is a compilation of it. Owns: the table, the detection, `DS_ISA`.
Invariant: `choose()` never names a variant this CPU cannot run, except when `DS_ISA` asks for it by name.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["ISAS", "Isa", "choose", "cpu_features", "for_this_machine", "runnable"]

_X86 = ("x86_64", "amd64")
_ARM = ("aarch64", "arm64")


@dataclass(frozen=True)
class Isa:
    """One variant: the machines it is for, the CPU features it needs and the flags that make it."""

    name: str
    machines: tuple[str, ...]  # empty: any
    needs: frozenset[str]
    flags: tuple[str, ...]


# Best first.
ISAS: tuple[Isa, ...] = (
    Isa(
        "avx512",
        _X86,
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"}),
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
    ),
    Isa("avx2", _X86, frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c")),
    Isa("neon", _ARM, frozenset(), ()),
    Isa("generic", (), frozenset(), ()),
)


@functools.cache
def cpu_features() -> frozenset[str]:
    """The feature names of this CPU as the kernel spells them; empty where the system does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
            for line in info:
                key, _, value = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass
    return _features_from_torch()


def _features_from_torch() -> frozenset[str]:
    """Systems without /proc (macOS): what torch found out about the CPU."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        return ISAS[0].needs
    return ISAS[1].needs if capability == "AVX2" else frozenset()


def for_this_machine() -> list[Isa]:
    """The variants of this kind of machine, best first, whether or not this CPU can run them."""
    return [isa for isa in ISAS if not isa.machines or platform.machine().lower() in isa.machines]


def runnable(isa: Isa, *, machine: Callable[[], str] = platform.machine) -> bool:
    """Whether this CPU has all that the variant needs."""
    return (not isa.machines or machine().lower() in isa.machines) and isa.needs <= cpu_features()


def choose() -> Isa:
    """The variant for this process: `DS_ISA` if set, else the best this CPU can run.

    Raises:
        ValueError: `DS_ISA` names no variant, or one for another kind of machine.
    """
    asked = os.environ.get("DS_ISA", "").strip().lower()
    if not asked:
        return next(isa for isa in ISAS if runnable(isa))
    known = for_this_machine()
    for isa in known:
        if isa.name == asked:
            return isa
    raise ValueError(f"DS_ISA={asked!r}: no such variant here; expected one of {', '.join(isa.name for isa in known)}")
