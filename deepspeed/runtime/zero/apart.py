"""``apart``: for functions that make or move buffers which outlive the mode their caller happens to be in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

P = ParamSpec("P")
R = TypeVar("R")


def in_transform() -> bool:
    """Inside ``torch.func.grad``, ``vmap``, ``jvp`` or their like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def apart(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` without gradients, outside of inference mode and of ``torch.func`` transforms.

    What inference mode makes can never be trained with; what a transform makes is wrapped and has no memory of its own.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with contextlib.ExitStack() as stack:
            if in_transform():
                stack.enter_context(temporarily_clear_interpreter_stack())
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            return function(*args, **kwargs)

    return run
