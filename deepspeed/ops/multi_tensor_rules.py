"""What the GPU kernels of each optimizer are called, and its hyper-parameters as the numbers they read.

Owns: the order of a rule's numbers, and the form a kernel is compiled for. Does not own: the tables
(`multi_tensor.py`), the arithmetic (`multi_tensor_triton.py`).
Invariant: rounded to fp32 here as `native/csrc/update_rules.h` rounds: from doubles, once.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["NUMBERS", "OPS", "SCALE", "Number", "Op"]

NUMBERS = 12
"""fp32 numbers of a rule; which is which, the kernels say."""
SCALE = 7
"""Place of the factor of the gradients (LAMB: of what they are divided by)."""

# What the optimizers' rules say (in the order of `native/csrc/update_rules.h`), as the kernels want it. The first
# number, lr, may be a 0-dim tensor on the device: then so are the results that depend on it.
Number = Any


def _lerp_coefficient(weight: float) -> float:
    """What `Weight` of update_rules.h holds: the weight in fp32, counted from the nearer end."""
    (weight,) = array.array("f", [weight])
    return weight if weight < 0.5 else weight - 1.0


def _adam_numbers(n: Sequence[Number]) -> tuple[list[Number], bool]:
    lr, beta1, beta2, eps, decay, bias1, root_of_bias2, flags = n
    decoupled = bool(int(flags) & 1)
    factor = 1.0 - lr * decay if decoupled else decay
    found = [_lerp_coefficient(1.0 - beta1), beta2, 1.0 - beta2, eps, factor, -(lr / bias1), root_of_bias2]
    return found, decoupled


def _lion_numbers(n: Sequence[Number]) -> tuple[list[Number], bool]:
    lr, beta1, beta2, decay, *_ = n
    return [_lerp_coefficient(1.0 - beta1), _lerp_coefficient(1.0 - beta2), lr, 1.0 - lr * decay], False


def _lamb_numbers(n: Sequence[Number]) -> tuple[list[Number], bool]:
    lr, beta1, beta2, eps, decay, bias1, bias2, low, high, divisor, inside = n
    found = [_lerp_coefficient(1.0 - beta1), beta2, 1.0 - beta2, eps, decay, lr, bias1, divisor, bias2, low, high]
    return found, bool(inside)


@dataclass(frozen=True)
class Op:
    """An optimizer with kernels. launch: name of the function in `multi_tensor_triton`; states: how many there are."""

    launch: str
    states: int
    numbers: Callable[[Sequence[Number]], tuple[list[Number], bool]]
    optimizer: str


OPS = {
    "fused_adam": Op("adam", 2, _adam_numbers, "deepspeed.ops.adam.fused_adam:FusedAdam"),
    "fused_lion": Op("lion", 1, _lion_numbers, "deepspeed.ops.lion.fused_lion:FusedLion"),
    "fused_lamb": Op("lamb", 2, _lamb_numbers, "deepspeed.ops.lamb.fused_lamb:FusedLamb"),
}
