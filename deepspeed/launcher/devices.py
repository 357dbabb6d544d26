"""What this host can run workers on, found without importing torch.

Owns: the kind of accelerator, its device numbers, and the environment variable that limits them. Does not own: which of
them a run uses (selection.py), nor anything about using them (`deepspeed.accelerator`, inside the workers).

The launcher starts in milliseconds, so it reads device files of the kernel and the version file of the installed torch
instead of importing torch. ``DS_ACCELERATOR`` overrides the search exactly as it does in the workers.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from deepspeed.launcher.errors import UsageError

VISIBLE_DEVICES_VARIABLES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "cpu": "CUDA_VISIBLE_DEVICES",
    "mps": "CUDA_VISIBLE_DEVICES",
    "hpu": "CUDA_VISIBLE_DEVICES",
    "klxpu": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "sdaa": "SDAA_VISIBLE_DEVICES",
    "supa": "SUPA_VISIBLE_DEVICES",
}
"""Accelerator name -> the variable that limits its devices. Names not listed use CUDA_VISIBLE_DEVICES."""

EXPORTED_PREFIXES = {
    "cuda": ("NCCL",),
    "npu": ("ASCEND", "HCCL", "LD_LIBRARY", "PATH"),
    "mlu": ("NEUWARE_HOME", "CNCL", "LD_LIBRARY", "PATH"),
    "sdaa": ("NCCL", "LD_LIBRARY", "PATH"),
    "supa": ("BCCL", "BIREN", "SUPA", "LD_LIBRARY", "PATH"),
}
"""Accelerator name -> beginnings of the variables that a multi-node start forwards to the other hosts for it."""


@dataclass(frozen=True)
class Devices:
    """The accelerator of this host.

    ids: all device numbers, or None when their number cannot be told without the vendor's library.
    unbounded: any number of workers may share the device (the CPU).
    why: how this was found, for messages.
    """

    accelerator: str
    ids: tuple[int, ...] | None
    visible_variable: str
    unbounded: bool
    why: str


def find_devices(environ: Mapping[str, str]) -> Devices:
    """Choose as the workers will: ``DS_ACCELERATOR``, else CUDA / ROCm devices, else Apple's, else the CPU."""
    named = environ.get("DS_ACCELERATOR", "").strip().lower()
    if named:
        return _named_devices(named, environ)
    gpus, variable = _gpus(environ)
    if gpus and not _hides_everything(environ.get(variable)):
        build = torch_build()
        if build != "cpu":
            return Devices("cuda", gpus, variable, False, f"{len(gpus)} GPUs found")
        return _cpu(f"the installed torch is a CPU-only build, so the {len(gpus)} GPUs of this host are not used")
    if gpus:
        return _cpu(f"{variable} hides all GPUs")
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return Devices("mps", (0,), VISIBLE_DEVICES_VARIABLES["mps"], False, "Apple GPU")
    return _cpu("no GPU found")


def _named_devices(name: str, environ: Mapping[str, str]) -> Devices:
    why = f"DS_ACCELERATOR={name}"
    if name == "cpu":
        return _cpu(why)
    if name == "cuda":
        gpus, variable = _gpus(environ)
        if not gpus:
            raise UsageError(f"{why}: no CUDA or ROCm device found on this host; unset it, or set DS_ACCELERATOR=cpu")
        return Devices("cuda", gpus, variable, False, why)
    variable = VISIBLE_DEVICES_VARIABLES.get(name, "CUDA_VISIBLE_DEVICES")
    ids = (0,) if name == "mps" else None
    return Devices(name, ids, variable, False, why)


def _cpu(why: str) -> Devices:
    """One default worker per NUMA node, as many as asked for."""
    return Devices("cpu", tuple(range(_num_numa_nodes())), VISIBLE_DEVICES_VARIABLES["cpu"], True, why)


def _hides_everything(visible: str | None) -> bool:
    return visible is not None and not visible_ids(visible)


def visible_ids(visible: str) -> list[int | str]:
    """Device list of a variable like CUDA_VISIBLE_DEVICES, in its order.

    Numbers become integers, identifiers stay text. As in CUDA, the list ends at a negative number or an empty entry.
    """
    ids: list[int | str] = []
    for entry in visible.split(","):
        word = entry.strip()
        if not word or word.startswith("-") or word == "NoDevFiles":
            break
        ids.append(int(word) if word.isdigit() else word)
    return ids


def _gpus(environ: Mapping[str, str]) -> tuple[tuple[int, ...], str]:
    """(numbers of the GPUs this process may open, the variable that limits them); NVIDIA first, then AMD."""
    nvidia = _nvidia_gpu_count()
    if nvidia:
        return tuple(range(nvidia)), "CUDA_VISIBLE_DEVICES"
    amd = _amd_gpu_count()
    # HIP obeys its own variable before CUDA's, so the one the user has set is the one to narrow.
    variable = "HIP_VISIBLE_DEVICES" if environ.get("HIP_VISIBLE_DEVICES") is not None else "CUDA_VISIBLE_DEVICES"
    return tuple(range(amd)), variable


def _accessible(path: str) -> bool:
    # access(2) also answers for the device control group, so a GPU that a scheduler withholds is not counted.
    return os.access(path, os.R_OK | os.W_OK)


def _nvidia_gpu_count() -> int:
    try:
        nodes = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    except OSError:
        return 0
    if nodes:
        return sum(_accessible(f"/dev/{name}") for name in nodes)
    # Under WSL the driver has no per-device files; its management library counts.
    return _nvml_gpu_count() if os.path.exists("/dev/dxg") else 0


def _nvml_gpu_count() -> int:
    import ctypes

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    answered = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    nvml.nvmlShutdown()
    return count.value if answered else 0


def _amd_gpu_count(root: str = "/sys/class/kfd/kfd/topology/nodes") -> int:
    """ROCm compute nodes with SIMD units (the others are CPUs) whose render device may be opened."""
    count = 0
    try:
        nodes = os.listdir(root)
    except OSError:
        return 0
    for node in nodes:
        try:
            with open(f"{root}/{node}/properties", encoding="ascii") as text:
                properties = dict(line.split()[:2] for line in text if line.strip())
        except (OSError, ValueError):
            continue
        minor = properties.get("drm_render_minor", "0")
        if int(properties.get("simd_count", "0")) > 0 and _accessible(f"/dev/dri/renderD{minor}"):
            count += 1
    return count


def _num_numa_nodes(path: str = "/sys/devices/system/node/has_cpu") -> int:
    """NUMA nodes with cores; 1 where the system does not say."""
    try:
        with open(path, encoding="ascii") as text:
            ranges = text.read().strip()
    except OSError:
        return 1
    count = 0
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return max(1, count)


def torch_build() -> str | None:
    """``"cuda"``, ``"hip"``, ``"cpu"`` as the version file of the installed torch says; None without torch."""
    for folder in sys.path:
        version_file = os.path.join(folder or ".", "torch", "version.py")
        if os.path.isfile(version_file):
            break
    else:
        return None
    with open(version_file, encoding="utf-8") as text:
        source = text.read()
    for kind in ("cuda", "hip"):
        if re.search(rf"^{kind}\b[^=\n]*=\s*['\"]", source, flags=re.MULTILINE):
            return kind
    return "cpu"
