"""Measuring disks: `ds_io` times one setting, `ds_nvme_tune` searches the best. Names are loaded at first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.nvme.perf_generate_param import generate_main as generate_main
    from deepspeed.nvme.perf_run_sweep import parse_sweep_arguments as parse_sweep_arguments
    from deepspeed.nvme.perf_run_sweep import sweep_main as sweep_main
    from deepspeed.nvme.perf_run_sweep import tune_main as tune_main
    from deepspeed.nvme.test_ds_aio import ds_io_main as ds_io_main

_EXPORTS = {
    "ds_io_main": "deepspeed.nvme.test_ds_aio",
    "generate_main": "deepspeed.nvme.perf_generate_param",
    "parse_sweep_arguments": "deepspeed.nvme.perf_run_sweep",
    "sweep_main": "deepspeed.nvme.perf_run_sweep",
    "tune_main": "deepspeed.nvme.perf_run_sweep",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
