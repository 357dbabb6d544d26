"""`ds_report`: what this installation is, what it found on this host, and what is missing.

Owns: gathering the facts (`collect`) and printing them as text or JSON. Does not own any of them: versions come from
the installed packages, the accelerator from `deepspeed.accelerator`, memory limits from `utils.host_memory`.

Exit code: 0 when everything DeepSpeed requires is there, 1 when not (the last lines say what).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

GREEN = "\033[92m"
RED = "\033[91m"
YELLOW = "\033[93m"
END = "\033[0m"
SUCCESS = f"{GREEN} [SUCCESS] {END}"
OKAY = f"{GREEN}[OKAY]{END}"
WARNING = f"{YELLOW}[WARNING]{END}"
FAIL = f"{RED}[FAIL]{END}"
INFO = "[INFO]"
color_len = len(GREEN) + len(END)
okay = OKAY
warning = WARNING

_DISTRIBUTION = "deepspeed"
_WIDTH = 78
_SMALL_SHM = 512 * 2**20
# Used when present; the reason why one would want it.
_OPTIONAL_PACKAGES = {
    "transformers": "training Hugging Face models",
    "matplotlib": "the picture of make demo",
    "tensorboard": "the tensorboard monitor",
    "wandb": "the wandb monitor",
    "triton": "GPU kernels",
    "mpi4py": "starts by MPI launchers that set no rank variables",
}
_TOOLS = {
    "pdsh": "deepspeed --launcher pdsh",
    "ssh": "starting several nodes from one",
    "mpirun": "deepspeed --launcher openmpi, mpich, impi",
    "srun": "deepspeed --launcher slurm",
    "numactl": "memory binding with --bind_cores_to_rank",
    "c++": "building native ops (without it torch's kernels are used)",
}
_NOT_IN_THIS_VERSION = (
    "fp_quantizer", "gds", "quantizer", "ragged_ops", "random_ltd", "sparse_attn", "spatial_inference", "transformer",
    "transformer_inference",
)  # fmt: skip


@dataclass(frozen=True)
class OpRow:
    """One op: the implementation used on this host (None: it cannot run), and why the others are not.

    ``library``: file of the native library it uses; None when it uses none. ``build_seconds``: time this report took to
    compile that file; 0 when it was there.
    """

    name: str
    implementation: str | None
    others: dict[str, str] = field(default_factory=dict)
    library: str | None = None
    build_seconds: float = 0.0


@dataclass(frozen=True)
class AcceleratorRow:
    """One known accelerator: usable or why not, and its devices in words."""

    name: str
    usable: bool
    reason: str
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Everything `ds_report` shows. ``missing``: thing -> what it is needed for and how to get it; ``required`` names
    those of them without which DeepSpeed does not run."""

    versions: dict[str, str | None]
    accelerators: list[AcceleratorRow]
    chosen_accelerator: str | None
    why_chosen: str
    communication_backends: list[str]
    memory: dict[str, int]
    warnings: list[str]
    ops: list[OpRow]
    tools: dict[str, str | None]
    missing: dict[str, str]
    required: list[str]

    @property
    def complete(self) -> bool:
        return not self.required


def human_readable_size(size: float) -> str:
    """``1536`` -> ``"1.50 KB"``; steps of 1024."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024:
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TB"


# --- gathering


def collect() -> Report:
    """Look at the installation and the host. Nothing here raises for what is merely missing."""
    missing: dict[str, str] = {}
    required = _requirement_problems(missing)
    versions = _versions()
    accelerators, chosen, why, backends = _accelerators(missing, required)
    for tool, purpose in _TOOLS.items():
        if shutil.which(tool) is None:
            missing[tool] = f"only for {purpose}"
    for package, purpose in _OPTIONAL_PACKAGES.items():
        if _version_of(package) is None:
            missing[package] = f"only for {purpose}"
    memory, warnings = _memory()
    return Report(
        versions=versions,
        accelerators=accelerators,
        chosen_accelerator=chosen,
        why_chosen=why,
        communication_backends=backends,
        memory=memory,
        warnings=warnings,
        ops=_ops(chosen) if chosen is not None else [],
        tools={tool: shutil.which(tool) for tool in _TOOLS},
        missing=missing,
        required=required,
    )


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirement_problems(missing: dict[str, str]) -> list[str]:
    """Names of required packages that are absent or too old, with the details added to ``missing``."""
    from packaging.requirements import Requirement

    try:
        texts = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []  # run from a source tree; the imports tell
    problems = []
    for requirement in map(Requirement, texts):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _version_of(requirement.name)
        if found is None:
            missing[requirement.name] = f"required: pip install '{requirement}'"
        elif not requirement.specifier.contains(found, prereleases=True):
            missing[requirement.name] = f"required: {requirement}, found {found}; pip install '{requirement}'"
        else:
            continue
        problems.append(requirement.name)
    return problems


def _versions() -> dict[str, str | None]:
    from deepspeed import git_version_info

    versions: dict[str, str | None] = {
        "deepspeed": git_version_info.version,
        "deepspeed revision": f"{git_version_info.git_hash}, {git_version_info.git_branch}",
        "deepspeed path": os.path.dirname(os.path.abspath(__file__)),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
    }
    versions["C++ compiler"] = _compiler()
    try:
        import torch
    except Exception as problem:  # a broken install may raise anything, and this report is where one looks then
        versions["torch"] = None
        versions["torch problem"] = f"{type(problem).__name__}: {problem}"
        return versions
    versions["torch"] = torch.__version__
    versions["torch path"] = os.path.dirname(torch.__file__)
    versions["CUDA of torch"] = torch.version.cuda
    versions["ROCm of torch"] = torch.version.hip
    if torch.version.cuda is not None:
        versions["CUDA compiler"] = nvcc_version()
        if torch.distributed.is_nccl_available():
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    for package in ("numpy", "pydantic", "hjson", "packaging", "psutil", "tqdm", "rich", *_OPTIONAL_PACKAGES):
        versions[package] = _version_of(package)
    return versions


def _compiler() -> str:
    """Path and version of the compiler of native libraries, or why there is none."""
    from deepspeed.native import build

    path = build.find_compiler()
    if path is None:
        return build._no_compiler()
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"{path}, which does not tell its version: {problem}"
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    return f"{path}: {lines[0] if lines else 'gives no version'}"


def _accelerators(
    missing: dict[str, str], required: list[str]
) -> tuple[list[AcceleratorRow], str | None, str, list[str]]:
    try:
        import torch.distributed as dist

        from deepspeed.accelerator import real_accelerator
    except Exception as problem:  # see _versions
        missing["torch"] = f"required, and cannot be imported: {type(problem).__name__}: {problem}"
        if "torch" not in required:
            required.append("torch")
        return [], None, "torch cannot be imported", []
    rows = [
        _accelerator_row(name, real_accelerator._built_in(name)) for name in real_accelerator.SUPPORTED_ACCELERATOR_LIST
    ]
    forced = os.environ.get("DS_ACCELERATOR")
    try:
        chosen = real_accelerator.get_accelerator()
    except ValueError as problem:
        missing["accelerator"] = str(problem)
        required.append("accelerator")
        return rows, None, str(problem), []
    why = f"DS_ACCELERATOR={forced}" if forced else "the first usable one of: plug-ins, cuda, mps, cpu"
    if chosen.name not in {row.name for row in rows}:
        rows.insert(0, _accelerator_row(chosen.name, chosen))
    backends = [name for name in ("gloo", "nccl", "mpi", "xccl") if getattr(dist, f"is_{name}_available")()]
    return rows, chosen.name, why, backends


def _accelerator_row(name: str, accelerator: Any) -> AcceleratorRow:
    if not accelerator.is_available():
        return AcceleratorRow(name, False, accelerator.unavailable_reason(), ())
    if name != "cuda":
        import psutil

        cores = f"{psutil.cpu_count(logical=False) or os.cpu_count()} cores"
        return AcceleratorRow(name, True, "usable", (cores,) if name == "cpu" else ())
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(accelerator.device_count())]
    listing = tuple(f"{gpu.name}, {human_readable_size(gpu.total_memory)}, sm_{gpu.major}{gpu.minor}" for gpu in found)
    return AcceleratorRow(name, True, "usable", listing)


def _shared_memory() -> tuple[int, int] | None:
    """(size, free bytes) of /dev/shm; None on systems without it."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return usage.total, usage.free


def _memory() -> tuple[dict[str, int], list[str]]:
    import psutil

    from deepspeed.utils import host_memory

    memory = {
        "host": psutil.virtual_memory().total,
        "limit": host_memory.total_memory(),
        "available": host_memory.available_memory(),
    }
    shared = _shared_memory()
    if shared is not None:
        memory["shared"], memory["shared free"] = shared
    return memory, get_shm_size()[1]


def get_shm_size() -> tuple[str | None, list[str]]:
    """Size of /dev/shm in words, and warnings about it."""
    shared = _shared_memory()
    if shared is None:
        return None, ["no /dev/shm on this system: data loaders pass batches through files"]
    warnings = []
    if shared[0] < _SMALL_SHM:
        warnings.append(
            f"/dev/shm has only {human_readable_size(shared[0])}: NCCL and data loader workers may end with a bus "
            "error; in a container start it with --shm-size=1g or more"
        )
    return human_readable_size(shared[0]), warnings


def nvcc_version() -> str:
    """Version of the CUDA compiler, or why there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = os.path.join(home, "bin", "nvcc") if home else shutil.which("nvcc")
    if nvcc is None or not os.path.exists(nvcc):
        return f"none ({nvcc or 'nvcc'} not found; only for building CUDA ops)"
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    release = [line for line in done.stdout.splitlines() if "release" in line]
    return release[0].partition("release ")[2].partition(",")[0] if release else f"{nvcc} gives no version"


def installed_cann_path() -> str | None:
    """Folder of Ascend's CANN toolkit, if its variable names one that exists."""
    path = os.environ.get("ASCEND_HOME_PATH")
    return path if path is not None and os.path.exists(path) else None


def installed_cann_version() -> str | None:
    """Version of that toolkit as its own file says."""
    path = installed_cann_path()
    if path is None:
        return None
    for machine in ("x86_64-linux", "aarch64-linux"):
        info = os.path.join(path, machine, "ascend_toolkit_install.info")
        if os.path.isfile(info):
            with open(info, encoding="utf-8") as lines:
                return next((line.strip().partition("=")[2] for line in lines if line.startswith("version=")), None)
    return None


# --- ops


def _ops(accelerator: str) -> list[OpRow]:
    """What the op registry chooses, tried: native libraries are built and loaded."""
    from deepspeed.ops.registry import OPS

    rows = []
    for op in OPS.values():
        device = accelerator if op.name.startswith(("fused_", "blockwise_")) else "cpu"
        used, others, file, seconds = None, {}, None, 0.0
        for way in op.implementations:
            if used is not None:
                reason = way.problem(device)  # of the device alone: nothing is built that is not used
                others[way.name] = reason.splitlines()[0] if reason else f"{used} is taken before it"
                continue
            found, took = _library(way.library) if way.library else (None, 0.0)
            problem = way.why_not(op.name, device)
            if problem:
                others[way.name] = problem.splitlines()[0]
            else:
                used, file, seconds = way.name, found, took
        rows.append(OpRow(op.name, used, others, file, seconds))
    rows += [OpRow(name, None, {"any implementation": "not part of this version"}) for name in _NOT_IN_THIS_VERSION]
    return rows


def _library(name: str) -> tuple[str | None, float]:
    """The file of a native library and the seconds it took to build; None where it cannot be built."""
    from deepspeed.native import build

    try:
        built = build.build(name)
    except (build.NativeUnavailable, ValueError):
        return None, 0.0
    return str(built.path), built.seconds


# --- printing


def _heading(text: str) -> None:
    print("-" * _WIDTH)
    print(text)
    print("-" * _WIDTH)


def _line(name: str, content: str) -> None:
    print(f"{name} {'.' * max(3, 32 - len(name))} {content}")


def _coloured(text: str, colour: str) -> str:
    wanted = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"{colour}{text}{END}" if wanted else text


def op_report(verbose: bool = True) -> None:
    """Print the op table; with ``verbose`` also why the implementations that are not used are not."""
    report = collect()
    _print_ops(report, verbose)


def _print_ops(report: Report, verbose: bool) -> None:
    _heading(f"ops: implementation used on {report.chosen_accelerator}")
    for row in report.ops:
        if row.name in _NOT_IN_THIS_VERSION:
            continue
        mark = _coloured("[OKAY]", GREEN) if row.implementation else _coloured("[NO]", RED)
        state = f", {_built(row)}" if row.library else ""
        _line(row.name, f"{mark} {row.implementation or ''}{state}".rstrip())
        for other, reason in row.others.items() if verbose else ():
            print(f"    not {other}: {reason}")
    _line("not part of this version", ", ".join(_NOT_IN_THIS_VERSION))


def _built(row: OpRow) -> str:
    return f"built in {row.build_seconds:.1f} s: {row.library}" if row.build_seconds else f"built: {row.library}"


def debug_report() -> None:
    """Print versions, accelerators, memory, tools."""
    _print_environment(collect())


def _print_environment(report: Report) -> None:
    _heading("DeepSpeed general environment info")
    for name, content in report.versions.items():
        _line(name, content if content is not None else "none")
    for row in report.accelerators:
        state = _coloured("[OKAY]", GREEN) if row.usable else f"{_coloured('[NO]', YELLOW)} {row.reason}"
        _line(f"accelerator {row.name}", state + ("; " + "; ".join(row.devices) if row.devices else ""))
    _line("accelerator used", f"{report.chosen_accelerator}: {report.why_chosen}")
    _line("communication back ends", ", ".join(report.communication_backends) or "none")
    memory = report.memory
    limit = "" if memory["limit"] == memory["host"] else f", limited to {human_readable_size(memory['limit'])} (cgroup)"
    _line(
        "host memory",
        f"{human_readable_size(memory['host'])}{limit}, available {human_readable_size(memory['available'])}",
    )
    if "shared" in memory:
        _line(
            "shared memory (/dev/shm) size",
            f"{human_readable_size(memory['shared'])}, free {human_readable_size(memory['shared free'])}",
        )
    if installed_cann_path() is not None:
        _line("CANN", f"{installed_cann_path()}, version {installed_cann_version()}")


def _print_problems(report: Report) -> None:
    for text in report.warnings:
        print(f"{_coloured('[WARNING]', YELLOW)} {text}")
    if report.missing:
        _heading("missing")
    for name, purpose in report.missing.items():
        mark = _coloured("[FAIL]", RED) if name in report.required else INFO
        print(f"{mark} {name}: {purpose}")


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the whole report."""
    _print(collect(), hide_operator_status, hide_errors_and_warnings)


def _print(report: Report, hide_operator_status: bool, hide_errors_and_warnings: bool) -> None:
    if not hide_operator_status:
        _print_ops(report, verbose=not hide_errors_and_warnings)
    _print_environment(report)
    if not hide_errors_and_warnings:
        _print_problems(report)


def parse_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ds_report", description="What this DeepSpeed installation has and lacks.")
    parser.add_argument("--hide_operator_status", action="store_true", help="leave out the op table")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="leave out what is missing and why")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    return parser.parse_args(args)


def cli_main() -> None:
    """Entry of the console script ds_report. Exits with 1 when something required is missing."""
    options = parse_arguments()
    report = collect()
    if options.json:
        print(json.dumps({**asdict(report), "complete": report.complete}, indent=2))
    else:
        _print(report, options.hide_operator_status, options.hide_errors_and_warnings)
    if not report.complete:
        sys.exit(1)


if __name__ == "__main__":
    cli_main()
