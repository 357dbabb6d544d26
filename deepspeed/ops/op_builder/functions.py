"""The functions that objects of `load()` had: an update of one tensor, told all numbers by the caller.

Owns: their signatures, and the modes remembered by `create_*` under the caller's id. Does not own: the arithmetic,
which is that of the optimizer classes, whose rows these functions fill.
All tensors are 1D or of one shape, contiguous, on the CPU (`multi_tensor_adam`: on any one device).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from deepspeed.native.build import NativeUnavailable
from deepspeed.ops import multi_tensor, native_kernels
from deepspeed.ops.adagrad.cpu_adagrad import adagrad_update as _torch_adagrad
from deepspeed.ops.adam.adam_update import AdamRule, adam_update_columns
from deepspeed.ops.lion.lion_update import lion_update_row
from deepspeed.ops.multi_tensor import Cache, DeviceTable
from deepspeed.ops.native_kernels import Table, all_readable

_adam_modes: dict[int, bool] = {}
_tables = Cache()  # of tensors on GPUs


def module(name: str, *functions: Callable[..., Any]) -> ModuleType:
    """An object with the functions as attributes."""
    made = ModuleType(name)
    for function in functions:
        setattr(made, function.__name__, function)
    return made


def _run(op: str, columns: list[list[torch.Tensor]], numbers: tuple[float, ...]) -> bool:
    """Update by a kernel of the tensors' device: columns are [params, grads, *states]. False where there is none."""
    params, grads, *states = columns
    if params and not params[0].is_cpu and all(map(DeviceTable.readable, columns)):
        if not multi_tensor.usable(op, params[0].device.type):
            return False
        on_device = DeviceTable(op, _tables)
        on_device.extend(params, grads, states, None, [on_device.add_rule(numbers)] * len(params))
        on_device.run()
        return True
    if not all(map(all_readable, columns)):
        return False
    try:
        kernel = native_kernels.kernel(op)
    except NativeUnavailable:
        return False
    table = Table()
    rule = table.add_rule(numbers)
    table.extend(params, grads, states, None, [rule] * len(params))
    table.run(kernel, 1.0)
    return True


def create_adam(
    optimizer_id: int,
    alpha: float = 1e-3,
    betta1: float = 0.9,
    betta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0,
    adamw_mode: bool = True,
    should_log: bool = False,
) -> int:
    """Remember the mode of an optimizer; returns 0. The numbers come again with every update."""
    _adam_modes[optimizer_id] = adamw_mode
    return 0


@torch.no_grad()
def adam_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    params: torch.Tensor,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
) -> int:
    """One Adam or AdamW update of one tensor in place; returns 0. Raises KeyError for an id nobody created."""
    rule = AdamRule(lr, beta1, beta2, epsilon, weight_decay, _adam_modes[optimizer_id], bias_correction)
    columns = [[params], [grads], [exp_avg], [exp_avg_sq]]
    if not _run("cpu_adam", columns, rule.numbers(step)):
        adam_update_columns(rule, step, columns)
    return 0


def destroy_adam(optimizer_id: int) -> int:
    """Forget an optimizer; returns 0."""
    _adam_modes.pop(optimizer_id, None)
    return 0


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update lists of tensors in place: `tensor_lists` is [grads, params, exp_avgs, exp_avg_sqs].

    mode: 0 Adam, 1 AdamW. Nothing happens when `noop_flag` is not zero. chunk_size is not needed.
    """
    if noop_flag is not None and bool(noop_flag.any()):
        return
    grads, params, exp_avgs, exp_avg_sqs = map(list, tensor_lists)
    rule = AdamRule(lr, beta1, beta2, epsilon, weight_decay, mode == 1, bool(bias_correction))
    columns = [params, grads, exp_avgs, exp_avg_sqs]
    if not _run("fused_adam", columns, rule.numbers(step)):
        adam_update_columns(rule, step, columns)


def create_adagrad(
    optimizer_id: int, alpha: float = 1e-2, eps: float = 1e-8, weight_decay: float = 0, should_log: bool = False
) -> int:
    """Returns 0: an update brings its numbers."""
    return 0


@torch.no_grad()
def adagrad_update(
    optimizer_id: int,
    step: int,
    lr: float,
    epsilon: float,
    weight_decay: float,
    params: torch.Tensor,
    grads: torch.Tensor,
    exp_avg_sq: torch.Tensor,
) -> int:
    """One Adagrad update of one tensor in place; returns 0."""
    columns = [[params], [grads], [exp_avg_sq]]
    if not _run("cpu_adagrad", columns, (lr, epsilon, weight_decay, 0.0, 0.0, 0.0, 0.0, 0.0)):
        _torch_adagrad(lr, epsilon, weight_decay, [params, grads, exp_avg_sq])
    return 0


def destroy_adagrad(optimizer_id: int) -> int:
    """Returns 0."""
    return 0


def create_lion(
    optimizer_id: int,
    alpha: float = 1e-3,
    betta1: float = 0.9,
    betta2: float = 0.999,
    weight_decay: float = 0,
    should_log: bool = False,
) -> int:
    """Returns 0: an update brings its numbers."""
    return 0


@torch.no_grad()
def lion_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    params: torch.Tensor,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
) -> int:
    """One Lion update of one tensor in place; returns 0."""
    columns = [[params], [grads], [exp_avg]]
    if not _run("cpu_lion", columns, (lr, beta1, beta2, weight_decay, 0.0, 0.0, 0.0, 0.0)):
        lion_update_row(lr, beta1, beta2, weight_decay, [params, grads, exp_avg])
    return 0


def destroy_lion(optimizer_id: int) -> int:
    """Returns 0."""
    return 0
