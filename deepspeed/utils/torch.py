"""Questions about the installed torch, and the few places where its releases differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version

__all__ = ["is_functorch_transforming", "jit_script_compat", "register_grad_hook", "required_torch_version"]

_INSTALLED = Version(Version(torch.__version__).base_version)


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Tell whether the installed torch is at least ``min_version`` and at most ``max_version`` (inclusive).

    Versions as text (``"2.10"``) or, for old callers, as numbers; a number cannot tell 2.10 from 2.1. Local build
    marks such as ``+cu128`` and pre-release marks of the installed version do not count.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version: give `min_version`, `max_version` or both")
    if min_version is not None and Version(str(min_version)) > _INSTALLED:
        return False
    return max_version is None or Version(str(max_version)) >= _INSTALLED


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Call ``hook(param)`` each time ``param.grad`` has been accumulated in full; returns the removable handle."""
    return param.register_post_accumulate_grad_hook(hook)


def is_functorch_transforming() -> bool:
    """Tell whether code runs inside a ``torch.func`` transform (vmap, grad, jvp, ...)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def jit_script_compat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` itself. Callers once scripted small functions here; torch retired ``torch.jit.script``, and
    ``torch.compile`` around the whole model fuses them without a mark."""
    return fn
