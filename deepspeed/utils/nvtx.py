"""Named ranges for device profilers (NVTX, rocTX).

Owns: the decorator. Does not own: what a range is; the accelerator decides, and on one without ranges a decorated
function costs one attribute test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from deepspeed.accelerator.real_accelerator import get_accelerator

__all__ = ["DEEPSPEED_NVTX_DOMAIN", "enable_nvtx", "instrument_w_nvtx"]

DEEPSPEED_NVTX_DOMAIN = "DeepSpeed"

enable_nvtx: bool = True
"""Process-wide switch, read at each call."""

P = ParamSpec("P")
R = TypeVar("R")


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """Decorator: run ``func`` inside a profiler range named after it.

    The range is closed when ``func`` raises. Nothing is recorded under ``torch.compile`` (the calls would break the
    graph) or when `enable_nvtx` is False.
    """

    @functools.wraps(func)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if not enable_nvtx or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        accelerator = get_accelerator()
        accelerator.range_push(func.__qualname__, domain=DEEPSPEED_NVTX_DOMAIN)
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop(domain=DEEPSPEED_NVTX_DOMAIN)

    return wrapped
