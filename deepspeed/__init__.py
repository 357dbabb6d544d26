# ruff: noqa: F401  (the imports for type checkers are the exports)
"""deepspeed: parallel training and inference of models that do not fit.

``import deepspeed`` loads next to nothing; every name and sub-package below is imported when it is first used. The two
calls most programs need:

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json")
    loss = engine(batch); engine.backward(loss); engine.step()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deepspeed.git_version_info import version
from deepspeed.unbuilt import install_finder, refusal

if TYPE_CHECKING:
    from deepspeed import checkpointing, comm, ops, runtime, utils
    from deepspeed import comm as dist
    from deepspeed.accelerator import get_accelerator
    from deepspeed.arguments import add_config_arguments
    from deepspeed.comm.comm import init_distributed
    from deepspeed.git_version_info import git_branch, git_hash
    from deepspeed.initialization import initialize
    from deepspeed.runtime import zero
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
    from deepspeed.runtime.config import MUON_OPTIMIZER, DeepSpeedConfig, DeepSpeedConfigError
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.muon.tagging import set_optimizer_flags
    from deepspeed.utils.init_on_device import OnDevice
    from deepspeed.utils.logging import log_dist, logger

__version__ = version
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in version.split("+")[0].split(".")[:3])

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500

_NAMES = {
    "initialize": "deepspeed.initialization",
    "git_hash": "deepspeed.git_version_info",
    "git_branch": "deepspeed.git_version_info",
    "add_config_arguments": "deepspeed.arguments",
    "init_distributed": "deepspeed.comm.comm",
    "get_accelerator": "deepspeed.accelerator",
    "DeepSpeedEngine": "deepspeed.runtime.engine",
    "DeepSpeedConfig": "deepspeed.runtime.config",
    "DeepSpeedConfigError": "deepspeed.runtime.config",
    "DeepSpeedOptimizer": "deepspeed.runtime.base_optimizer",
    "ZeROOptimizer": "deepspeed.runtime.base_optimizer",
    "DeepSpeedDataLoader": "deepspeed.runtime.dataloader",
    "MUON_OPTIMIZER": "deepspeed.runtime.config",
    "OnDevice": "deepspeed.utils.init_on_device",
    "log_dist": "deepspeed.utils.logging",
    "logger": "deepspeed.utils.logging",
    "set_optimizer_flags": "deepspeed.runtime.zero.muon.tagging",
}
_MODULES = {
    "accelerator": "deepspeed.accelerator",
    "autotuning": "deepspeed.autotuning",
    "checkpoint": "deepspeed.checkpoint",
    "checkpointing": "deepspeed.checkpointing",
    "comm": "deepspeed.comm",
    "compile": "deepspeed.compile",
    "compression": "deepspeed.compression",
    "dist": "deepspeed.comm",
    "elasticity": "deepspeed.elasticity",
    "inference": "deepspeed.inference",
    "launcher": "deepspeed.launcher",
    "linear": "deepspeed.linear",
    "module_inject": "deepspeed.module_inject",
    "monitor": "deepspeed.monitor",
    "ops": "deepspeed.ops",
    "profiling": "deepspeed.profiling",
    "runtime": "deepspeed.runtime",
    "utils": "deepspeed.utils",
    "zero": "deepspeed.runtime.zero",
}
__all__ = ["__version__", "version", *_NAMES, *_MODULES]


install_finder()


def __getattr__(name: str) -> Any:
    if name in ("__git_hash__", "__git_branch__"):
        name = name.strip("_")
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(refusal(f"deepspeed.{name}") or f"module 'deepspeed' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
