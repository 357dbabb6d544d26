"""Random initial values on the CPU under ``deepspeed.zero.Init``: torch's bits, drawn many words at a time.

Drawing is what building a model waits for: torch draws element by element. The native library ``draws`` does the same
in vectors, from the state of torch's generator and back into it, so that nobody can tell afterwards who has drawn.

``Init`` sends the functions of :data:`DRAWING` through here. They run as they are, in a dispatch mode that replaces the
one operation below them that draws: what torch does around it (checks, version counters, gradients) stays torch's.

Owns: which tensors are filled so, and the trust in the library: of each law and dtype it is compared with torch once a
process. Does not own: the arithmetic (``native/csrc/draws.cpp``).
Invariant: values and the generator's state are those of torch; whatever is unusual is left to torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.native.build import NativeUnavailable, load, switched_off
from deepspeed.ops.columns import KINDS
from deepspeed.runtime.zero.sharded_parameter import block_of
from deepspeed.utils.logging import logger, warning_once

__all__ = ["DRAWING", "drawn"]

DRAWING: tuple[Callable[..., torch.Tensor], ...] = (
    torch.Tensor.uniform_, torch.Tensor.normal_, nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_,
)  # fmt: skip
"""Functions that fill their first argument. The others of ``nn.init`` call the first two where a mode sees them."""

_WORTH_IT = 1 << 15  # elements; of fewer, torch is done before a mode is entered
_LARGEST = 1e4  # of what a law is given; beyond come torch's checks of ranges
_STATE_NBYTES = 5056  # of a state of torch's generator

_LAWS = {torch.ops.aten.uniform_.default: "uniform", torch.ops.aten.normal_.default: "normal"}
_TRIAL = {"uniform": (-0.1234567, 0.3456789), "normal": (0.1234567, 0.3456789)}


def drawn(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``function``, one of :data:`DRAWING`, with the same results in less time."""

    def draw(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling() or not _worth_it(args[0] if args else kwargs.get("tensor")):
            return function(*args, **kwargs)
        with _Draws():
            return function(*args, **kwargs)

    return draw


def _worth_it(tensor: Any) -> bool:
    if type(tensor) not in (torch.Tensor, nn.Parameter) and block_of(tensor) is None:
        return False
    return tensor.device.type == "cpu" and tensor.numel() >= _WORTH_IT


class _Draws(TorchDispatchMode):
    """Draws where torch would."""


def _dispatch(self: _Draws, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    law = _LAWS.get(func)
    # Another mode below, or a class with a dispatch of its own, wants to see the operation.
    if law is not None and not types and not torch._C._len_torch_dispatch_stack() and _fill(law, *args, **kwargs or {}):
        return args[0]
    return func(*args, **kwargs or {})


# Not in the class: torch would keep the compiler away from it there, and load the compiler to do so (seconds).
_Draws.__torch_dispatch__ = _dispatch  # type: ignore[assignment,method-assign]


def _fill(
    law: str, tensor: torch.Tensor, first: float = 0.0, second: float = 1.0, *, generator: torch.Generator | None = None
) -> bool:
    """Fill ``tensor`` with values of ``law``: in [first, second), or of mean and deviation. Whether that was done."""
    source = torch.default_generator if generator is None else generator
    lowest = first if law == "uniform" else 0.0
    if (
        tensor.device.type != "cpu" or source.device.type != "cpu" or tensor.dtype not in KINDS
        or tensor.numel() < _WORTH_IT or not tensor.is_contiguous()
        or not (-_LARGEST <= first <= _LARGEST and lowest <= second <= _LARGEST)
    ):  # fmt: skip
        return False
    kernel = _kernel(law, tensor.dtype)
    if kernel is None:
        return False
    before = source.get_state()
    after = before.clone()
    if not kernel(tensor, after, first, second) or not torch.equal(source.get_state(), before):
        return False  # another thread has drawn in between, and must not get the same values
    source.set_state(after)
    return True


_Kernel = Callable[[torch.Tensor, torch.Tensor, float, float], bool]


@functools.cache
def _kernel(law: str, dtype: torch.dtype) -> _Kernel | None:
    """What fills a tensor and moves a state on, False where it cannot; None where it is missing or not as torch is."""
    try:
        entry = getattr(load("draws"), f"ds_{law}")
    except NativeUnavailable as problem:
        if switched_off("draws"):  # who has done so knows
            logger.debug("initial values are drawn by torch: %s", problem)
        else:
            warning_once(f"zero.Init: initial values are drawn by torch, which takes longer: {problem}")
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_float
    entry.argtypes = (pointer, pointer, ctypes.c_int64, ctypes.c_int, number, number)

    def kernel(tensor: torch.Tensor, state: torch.Tensor, first: float, second: float) -> bool:
        place, count = tensor.data_ptr(), tensor.numel()
        return entry(state.data_ptr(), place, count, KINDS[dtype], first, second) == 0

    # Of 16-bit numbers a few in 100,000 tell whether torch rounds once or twice on its way to them; of fp32, many do.
    if not _as_torch(kernel, law, dtype) or (dtype is not torch.float32 and _kernel(law, torch.float32) is None):
        logger.debug("initial values (%s, %s) are drawn by torch, which draws otherwise here", law, dtype)
        return None
    return kernel


def _as_torch(kernel: _Kernel, law: str, dtype: torch.dtype) -> bool:
    """Whether ``kernel`` gives the bits and leaves the state that torch does. Touches no generator of others."""
    generator = torch.Generator()
    state = generator.manual_seed(20).get_state()
    if state.numel() != _STATE_NBYTES:
        return False
    for numel in (4096, 1001):
        right, found = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
        getattr(right, f"{law}_")(*_TRIAL[law], generator=generator)
        if not kernel(found, state, *_TRIAL[law]):
            return False
        if not torch.equal(found, right) or not torch.equal(state, generator.get_state()):
            return False
    return True
