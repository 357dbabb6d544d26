"""Facts about this build: version, revision, torch, native ops.

``version`` is plain data. The rest is looked up on first use, since most programs never ask.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    accelerator_name: str
    git_branch: str
    git_hash: str
    installed_ops: dict[str, bool]
    torch_info: dict[str, Any]

__all__ = ["accelerator_name", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]

version = "0.20.0"

_UNKNOWN = "unknown"


@functools.cache
def _revision() -> tuple[str, str]:
    """(short hash, branch) of the source tree this package is imported from; "unknown" for an installed copy."""
    git_folder = Path(__file__).resolve().parent.parent / ".git"
    try:
        head = (git_folder / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head[:8], "HEAD"
        reference = head.removeprefix("ref: ")
        branch = reference.removeprefix("refs/heads/")
        loose = git_folder / reference
        if loose.is_file():
            return loose.read_text(encoding="utf-8").strip()[:8], branch
        for line in (git_folder / "packed-refs").read_text(encoding="utf-8").splitlines():
            if line.endswith(f" {reference}"):
                return line[:8], branch
    except OSError:
        pass
    return _UNKNOWN, _UNKNOWN


def _torch_info() -> dict[str, Any]:
    import torch

    from deepspeed.accelerator.real_accelerator import get_accelerator

    nccl = "0.0"
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "version": ".".join(torch.__version__.split(".")[:2]),
        "bf16_support": get_accelerator().is_bf16_supported(),
        "cuda_version": ".".join((torch.version.cuda or "0.0").split(".")[:2]),
        "nccl_version": nccl,
        "hip_version": ".".join((torch.version.hip or "0.0").split(".")[:2]),
    }


def _accelerator_name() -> str:
    from deepspeed.accelerator.real_accelerator import get_accelerator

    return get_accelerator().name


def _installed_ops() -> dict[str, bool]:
    # Native ops are compiled when they are first used; no wheel carries prebuilt ones.
    return {}


_LOOK_UPS = {
    "accelerator_name": _accelerator_name,
    "git_branch": lambda: _revision()[1],
    "git_hash": lambda: _revision()[0],
    "installed_ops": _installed_ops,
    "torch_info": _torch_info,
}


def __getattr__(name: str) -> Any:
    if name not in _LOOK_UPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = _LOOK_UPS[name]()
    globals()[name] = value
    return value
