"""Compile a native library for this CPU, keep it, load it.

A library is C++17 with a plain C interface: `csrc/<name>.cpp`, the parts `csrc/<name>_*.cpp` if it has any (compiled
side by side), and the headers beside them; no torch headers, so a compiler needs a second or two for it and no toolkit.
A wheel carries libraries in `lib/`; elsewhere the first use compiles into a cache folder. The file name holds a hash of
sources, flags and compiler, so nothing stale is ever loaded.

Owns: finding a compiler, the command line, the cache, the load. Does not own: what the functions take (each caller
declares its prototypes) and what to do without them: `load` raises `NativeUnavailable`, callers have a fallback.
Invariants: a library appears in the cache whole or not at all (temporary name, then rename); processes that build at
once wait for the first (file lock) or, where the file system has no locks, build the same file twice.

Environment:
    DS_NATIVE_CACHE   folder of the built libraries (default $XDG_CACHE_HOME/deepspeed or ~/.cache/deepspeed)
    CXX               compiler
    DS_ISA            variant, see isa.py
    DS_SKIP_<NAME>=1, DS_BUILD_<NAME>=0   do not use this library (NAME in upper case)
    DS_SKIP_OPS=1, DS_BUILD_OPS=0         do not use any
    DS_NATIVE_FLAGS   more compiler flags, e.g. "-fsanitize=address"
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shlex
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deepspeed.native.isa import Isa, choose, for_this_machine

__all__ = [
    "LIBRARIES",
    "Built",
    "NativeUnavailable",
    "build",
    "build_all",
    "build_package",
    "cache_folder",
    "find_compiler",
    "load",
    "switched_off",
]

_HERE = Path(__file__).parent
SOURCES = _HERE / "csrc"
PACKAGED = _HERE / "lib"

# No -ffast-math: overflow checks need inf and nan. -fno-math-errno lets sqrt be one instruction.
_CODE = ("-std=c++17", "-O3", "-fno-math-errno", "-Wall", "-Wextra")
_FLAGS = (*_CODE, "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
# Compiler flags one library needs beside the common ones.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "aio": ("-O1",),  # it waits for files
    # Simple loops over a block that lies in the cache: -O2 takes twice as long for a few percent.
    "blockwise": (
        *("-O1", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-Wno-psabi"),
        *("-ffp-contract=off", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti"),
    ),
    "crc32": ("-O2",),
    # Multiplications and additions are fused where the source says so and nowhere else: bits are compared with torch.
    # Vectors are written out, so that -O2 makes the same loops as -O3 in half the time.
    "draws": ("-O2", "-ffp-contract=off", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti", "-Wno-psabi"),
    "optimizers": ("-O2", "-ffp-contract=off", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti", "-Wno-psabi"),
    "transport": (
        *("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic"),
        *("-ffp-contract=off", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti"),
    ),
}
"""Name -> additional flags, of every library there is."""


class NativeUnavailable(RuntimeError):
    """A native library cannot be used here; the text says why and what would change that."""


@dataclass(frozen=True)
class Built:
    """A library ready to load. `seconds` is the time spent compiling: 0 when it was found."""

    path: Path
    isa: Isa
    seconds: float


_INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_loaded: dict[tuple[str, str], ctypes.CDLL | NativeUnavailable] = {}
_loading = threading.Lock()


def load(name: str) -> ctypes.CDLL:
    """The library `name`, built if need be; later calls return the same object.

    Raises:
        NativeUnavailable: switched off, no compiler, or the compiler failed. The first failure is remembered.
        ValueError: a name or `DS_ISA` that does not exist.
    """
    isa = choose()
    with _loading:
        found = _loaded.get((name, isa.name))
        if found is None:
            try:
                found = ctypes.CDLL(str(build(name).path))
            except NativeUnavailable as problem:
                found = problem
            except OSError as problem:
                found = NativeUnavailable(
                    f"native library {name!r}: built, but it cannot be loaded: {problem}. Remove the file, and it is "
                    "built again"
                )
            _loaded[(name, isa.name)] = found
    if isinstance(found, NativeUnavailable):
        raise found
    return found


def build(name: str) -> Built:
    """Make sure that the library exists for this CPU. Raises as `load`."""
    if name not in LIBRARIES:
        raise ValueError(f"no native library {name!r}; there are: {', '.join(LIBRARIES)}")
    reason = switched_off(name)
    if reason:
        raise NativeUnavailable(f"native library {name!r}: {reason}")
    isa = choose()
    sources = _sources(name)
    flags = [*_flags(name, isa), *_given_flags()]
    packaged = PACKAGED / f"{name}-{isa.name}-{_digest(sources, flags, '')}.so"
    if packaged.is_file():
        return Built(packaged, isa, 0.0)
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailable(f"native library {name!r}: {_no_compiler()}")
    target = cache_folder() / f"{name}-{isa.name}-{_digest(sources, flags, _identity(compiler))}.so"
    if _whole(target):
        return Built(target, isa, 0.0)
    with _lock(target):
        if _whole(target):  # another process built it while this one waited
            return Built(target, isa, 0.0)
        return Built(target, isa, _compile(name, compiler, flags, sources, target))


def _whole(library: Path) -> bool:
    """Whether the library is there, to its end: one cut short (a crash, a half-done copy) kills who loads it.

    The table of sections is the last thing in an ELF file. Files of other formats are taken as they are.
    """
    try:
        with library.open("rb") as file:
            head, nbytes = file.read(64), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return False
    if len(head) < 64:
        return False
    if head[:5] != b"\x7fELF\x02":  # 64 bits
        return True
    order = "<" if head[5] == 1 else ">"
    (start,) = struct.unpack_from(f"{order}Q", head, 40)
    entry_nbytes, entries = struct.unpack_from(f"{order}HH", head, 58)
    return bool(start + entry_nbytes * entries <= nbytes)


def build_package(folder: Path) -> list[Path]:
    """Compile every library for every instruction set of this kind of machine into `folder`: what a wheel carries.

    Raises:
        NativeUnavailable: no compiler, or it failed.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailable(_no_compiler())
    folder.mkdir(parents=True, exist_ok=True)

    def make(name: str, isa: Isa) -> Path:
        sources = _sources(name)
        target = folder / f"{name}-{isa.name}-{_digest(sources, _flags(name, isa), '')}.so"
        if not target.is_file():
            _compile(name, compiler, _flags(name, isa), sources, target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        pairs = [(name, isa) for name in LIBRARIES for isa in for_this_machine()]
        return list(compilers.map(lambda pair: make(*pair), pairs))


def build_all() -> list[Built]:
    """Make sure that every library exists for this CPU, several at a time. Raises as `load`."""
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        slowest_first = sorted(LIBRARIES, key=lambda name: -sum(source.stat().st_size for source in _sources(name)))
        return list(compilers.map(build, slowest_first))


def find_compiler() -> str | None:
    """The C++ compiler this process would use: $CXX, else c++, g++ or clang++ on the PATH."""
    asked = os.environ.get("CXX")
    return shutil.which(asked) if asked else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def _no_compiler() -> str:
    asked = os.environ.get("CXX")
    if asked:
        return (
            f"no C++ compiler found: CXX={asked!r} is no program on the PATH. Give its name or path alone (arguments "
            "go into DS_NATIVE_FLAGS), or unset CXX to take c++, g++ or clang++"
        )
    return "no C++ compiler found (looked for c++, g++, clang++); install one, or name it in CXX"


def cache_folder() -> Path:
    """Where built libraries are kept; made if it is not there.

    Raises:
        NativeUnavailable: the folder cannot be made.
    """
    asked = os.environ.get("DS_NATIVE_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(asked) if asked else home / "deepspeed"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        if folder.exists() and not folder.is_dir():
            named = f"DS_NATIVE_CACHE={asked}" if asked else str(folder)
            raise NativeUnavailable(
                f"no folder for built libraries: {named} is a file; set DS_NATIVE_CACHE to a folder"
            ) from problem
        raise NativeUnavailable(
            f"no folder for built libraries: {folder}: {problem.strerror}; set DS_NATIVE_CACHE to a writable folder"
        ) from problem
    return folder


def switched_off(name: str) -> str:
    """Why the environment forbids this library; empty when it does not."""
    for variable in (f"DS_SKIP_{name.upper()}", "DS_SKIP_OPS"):
        if os.environ.get(variable, "").strip().lower() in ("1", "true", "yes", "on"):
            return f"{variable}={os.environ[variable]} is set"
    for variable in (f"DS_BUILD_{name.upper()}", "DS_BUILD_OPS"):
        value = os.environ.get(variable, "").strip().lower()
        if value in ("0", "false", "no", "off"):
            return f"{variable}={value} is set"
        if value:
            return ""  # the more special variable wins
    return ""


def _flags(name: str, isa: Isa) -> list[str]:
    return [*_FLAGS, *isa.flags, *LIBRARIES[name]]


def _sources(name: str) -> list[Path]:
    """What is compiled for the library `name`: its file and its parts."""
    return [SOURCES / f"{name}.cpp", *sorted(SOURCES.glob(f"{name}_*.cpp"))]


def _digest(sources: list[Path], flags: list[str], compiler: str) -> str:
    """A hash of everything that decides the content of the library: 16 hexadecimal digits."""
    mixed = hashlib.sha256()
    for name, content in sorted(_texts(sources).items()):
        mixed.update(name.encode() + b"\0" + content + b"\0")
    mixed.update("\0".join([*flags, compiler]).encode())
    return mixed.hexdigest()[:16]


def _texts(sources: list[Path]) -> dict[str, bytes]:
    """The sources and the headers of ours they include, directly or not: name -> content."""
    found: dict[str, bytes] = {}
    waiting = [source.name for source in sources]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = sources[0].with_name(name).read_bytes()
            waiting += [match.decode() for match in _INCLUDE.findall(found[name])]
    return found


def _identity(compiler: str) -> str:
    """What changes when the compiler does. Asking it for its version would cost more than the rest of a cached load."""
    real = os.path.realpath(compiler)
    facts = os.stat(real)
    return f"{real}:{facts.st_size}:{facts.st_mtime_ns}"


def _compile(name: str, compiler: str, flags: list[str], sources: list[Path], target: Path) -> float:
    """Compile to a name of our own, then rename. Returns seconds."""
    aside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    began = time.monotonic()
    if len(sources) == 1:
        objects: list[Path] = []
        commands = []
        link = [compiler, *flags, str(sources[0]), "-o", str(aside)]
    else:
        objects = [aside.with_name(f"{aside.name}.{source.stem}.o") for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        link = [compiler, *flags, *map(str, objects), "-o", str(aside)]
    try:
        _run_all(name, commands)
        _run_all(name, [link])
        os.replace(aside, target)
    except OSError as problem:
        raise NativeUnavailable(f"native library {name!r}: {shlex.join(link)}: {problem}") from problem
    finally:
        for path in (aside, *objects):
            with contextlib.suppress(OSError):
                path.unlink()
    return time.monotonic() - began


def _run_all(name: str, commands: list[list[str]]) -> None:
    """Run compilers side by side; the first that fails is quoted, the others are ended."""
    running: list[subprocess.Popen[str]] = []
    try:
        running += (subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands)
        for command, process in zip(commands, running, strict=True):
            try:
                text, _ = process.communicate(timeout=300)
            except subprocess.TimeoutExpired as problem:
                raise NativeUnavailable(f"native library {name!r}: {shlex.join(command)}: {problem}") from problem
            if process.returncode:
                raise NativeUnavailable(
                    f"native library {name!r}: the compiler failed: {_first_error(text, process.returncode)}\n"
                    f"{shlex.join(command)}\n{text.strip()[-2000:]}"
                )
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()


def _first_error(text: str, code: int) -> str:
    """The line that says why, for who shows one line; and whose flags these were, if they are not only ours."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    why = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else f"exit code {code}")
    given = os.environ.get("DS_NATIVE_FLAGS")
    return f"{why} (with DS_NATIVE_FLAGS={given!r})" if given else why


def _given_flags() -> list[str]:
    given = os.environ.get("DS_NATIVE_FLAGS", "")
    try:
        return shlex.split(given)
    except ValueError as problem:
        raise NativeUnavailable(f"DS_NATIVE_FLAGS={given!r} cannot be split into arguments: {problem}") from None


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """One builder at a time. The kernel drops the lock of a process that dies."""
    import fcntl

    try:
        handle = os.open(f"{target}.lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as problem:
        raise NativeUnavailable(
            f"{target.parent} is not writable ({problem.strerror}); set DS_NATIVE_CACHE to a folder that is"
        ) from problem
    try:
        with contextlib.suppress(OSError):  # no locks on this file system: the rename is atomic all the same
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
