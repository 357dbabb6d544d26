"""Norms of gradients, weights and tensor lists, over model-parallel ranks where there are any.

Definitions, in one place: a norm is taken in float32 over all elements of all ranks of the model-parallel group of
``mpu``; parameters that tensor parallelism repeats on each rank count once, on rank 0 of the group. ``norm_type`` is p
(``inf`` for the largest magnitude). Functions whose result says "not finite" return -1.

These serve clients and unpartitioned gradients; the ZeRO core has its own norm over shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.comm import collectives
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank

__all__ = [
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "combine_grad_norm_groups",
    "get_flattened_grad_norm",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_grad_zeros",
    "get_norm_with_moe_layers",
    "get_norm_with_moe_layers_fast",
    "get_weight_norm",
    "has_inf_or_nan",
    "is_invalid_grad_norm",
    "is_model_parallel_parameter",
    "mask_nan_or_inf_with_val_inplace",
]

_EPSILON = 1e-6
NOT_FINITE = -1.0


def is_model_parallel_parameter(p: torch.Tensor) -> bool:
    """Tell whether tensor parallelism splits ``p`` (its attribute ``model_parallel`` or ``tensor_model_parallel``)."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def _counts_here(param: torch.Tensor, mpu: Any) -> bool:
    """Whether this rank's copy of ``param`` enters a sum over the model-parallel group."""
    return mpu is None or is_model_parallel_parameter(param) or bwc_tensor_model_parallel_rank(mpu) == 0


def _reduce(value: torch.Tensor, op: str, mpu: Any, what: str) -> None:
    if mpu is not None:
        collectives.all_reduce(value, mpu.get_model_parallel_group(), op=op, what=what)


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device(get_accelerator().current_device_name())


def _local_norm(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """p-norm over the elements of ``tensors`` as a float32 scalar; 0 for none."""
    filled = [tensor for tensor in tensors if tensor.numel() > 0]
    if not filled:
        return torch.zeros((), dtype=torch.float32, device=_device_of(tensors))
    each = [torch.linalg.vector_norm(tensor.detach(), norm_type, dtype=torch.float32) for tensor in filled]
    return torch.linalg.vector_norm(torch.stack([norm.to(each[0].device) for norm in each]), norm_type)


def _combine_over_group(norm: torch.Tensor, norm_type: float, group: Any, what: str) -> torch.Tensor:
    """Combine each rank's norm of its own elements into the norm over the group."""
    if math.isinf(norm_type):
        collectives.all_reduce(norm, group, op="max", what=what)
        return norm
    power = norm.pow(norm_type)
    collectives.all_reduce(power, group, op="sum", what=what)
    return power.pow(1.0 / norm_type)


def _norm(tensors: Sequence[torch.Tensor], norm_type: float, mpu: Any, what: str) -> torch.Tensor:
    norm = _local_norm(tensors, float(norm_type))
    return norm if mpu is None else _combine_over_group(norm, float(norm_type), mpu.get_model_parallel_group(), what)


def _finite_or_marker(norm: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(norm), norm, torch.full_like(norm, NOT_FINITE))


def _as_parameters(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Scale the gradients in place so that their global norm is at most ``max_norm``; returns the norm before.

    Gradients must have been averaged over data-parallel ranks. The result is a float32 scalar tensor.
    """
    params = [param for param in _as_parameters(parameters) if param.grad is not None]
    grads = [param.grad for param in params if param.grad is not None]
    counted = [param.grad for param in params if param.grad is not None and _counts_here(param, mpu)]
    total = _norm(counted, norm_type, mpu, "the gradient norm of clip_grad_norm_")
    scale = torch.clamp(float(max_norm) / (total + _EPSILON), max=1.0)
    for grad in grads:
        grad.detach().mul_(scale.to(grad.device))
    return total


def _unmasked(grad: torch.Tensor, ranges: Iterable[tuple[int, int]]) -> torch.Tensor:
    """Flat ``grad`` with the elements of the half-open ``ranges`` set to 0."""
    flat = grad.detach().reshape(-1).clone()
    for start, end in ranges:
        flat[int(start) : int(end)] = 0
    return flat


def get_flattened_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2,
    mpu: Any = None,
    grad_norm_mask: Sequence[Any] | None = None,
) -> float:
    """Global norm of the gradients of flat parameters, -1 if not finite.

    ``grad_norm_mask`` lists for each parameter the half-open element ranges that do not count (repeated parameters).
    """
    params = _as_parameters(parameters)
    masks = [()] * len(params) if grad_norm_mask is None else list(grad_norm_mask)
    grads = [
        _unmasked(param.grad, mask) if len(mask) else param.grad
        for param, mask in zip(params, masks, strict=True)
        if param.grad is not None
    ]
    return float(_finite_or_marker(_norm(grads, norm_type, mpu, "the norm of flat gradients")))


def get_weight_norm(parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Global norm of the parameters themselves, -1 if not finite."""
    params = [param for param in _as_parameters(parameters) if _counts_here(param, mpu)]
    return float(_finite_or_marker(_norm(params, norm_type, mpu, "the norm of the weights")))


def get_grad_zeros(parameters: torch.Tensor | Iterable[torch.Tensor], mpu: Any = None) -> float:
    """Number of gradient elements that are exactly 0, over the model-parallel group."""
    params = [param for param in _as_parameters(parameters) if param.grad is not None and _counts_here(param, mpu)]
    zeros = torch.zeros((), dtype=torch.int64, device=_device_of(params))
    for param in params:
        if param.grad is not None:
            zeros += param.grad.numel() - torch.count_nonzero(param.grad).to(zeros.device)
    _reduce(zeros, "sum", mpu, "the number of zeros in the gradients")
    return float(zeros)


def get_global_norm(norm_list: Iterable[float | torch.Tensor]) -> float:
    """2-norm of a list of 2-norms."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def get_global_norm_of_tensors(
    input_tensors: Sequence[torch.Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> torch.Tensor:
    """Norm over ``input_tensors`` of all ranks of the model- and the expert-parallel group; -1 if not finite."""
    norm = _norm(input_tensors, norm_type, mpu, "the norm of a list of tensors")
    if moe_ep_group is not None:
        norm = _combine_over_group(norm, float(norm_type), moe_ep_group, "the norm of expert tensors")
    return _finite_or_marker(norm)


def clip_tensors_by_global_norm(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: float | torch.Tensor | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> float | torch.Tensor:
    """Scale the tensors in place so that their global norm is at most ``max_norm``; returns the norm before.

    ``global_norm`` spares computing it. Nothing is scaled when the norm is not finite.
    """
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    factor = max_norm / (float(norm) + eps)
    if 0.0 < factor < 1.0:
        for tensor in input_tensors:
            tensor.detach().mul_(factor)
    return norm


def combine_grad_norm_groups(norm_groups: Sequence[torch.Tensor], norm_type: float = 2) -> torch.Tensor:
    """Norm over parameter groups from the norm of each; infinity if one of them is -1 (not finite)."""
    if not norm_groups:
        return torch.zeros(())
    norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norm_groups])
    total = torch.linalg.vector_norm(norms, norm_type)
    return torch.where((norms == NOT_FINITE).any(), torch.full_like(total, math.inf), total)


def get_norm_with_moe_layers(
    non_expert_norm: float | torch.Tensor,
    mpu: Any,
    expert_tensors: Mapping[str, Sequence[torch.Tensor]],
    norm_type: float = 2,
) -> torch.Tensor:
    """Norm over dense and expert gradients.

    Args:
        non_expert_norm: norm of all gradients that are no expert's.
        mpu: model-parallel unit or None.
        expert_tensors: for each expert group name (``ep_size_4``) this rank's expert gradients.
        norm_type: p.
    """
    norms = [torch.as_tensor(non_expert_norm, dtype=torch.float32)]
    for name, tensors in expert_tensors.items():
        group = groups._get_expert_parallel_group(name)
        norms.append(get_global_norm_of_tensors(tensors, norm_type, mpu, moe_ep_group=group))
    return combine_grad_norm_groups([norm.to(norms[0].device) for norm in norms], norm_type)


def get_norm_with_moe_layers_fast(all_groups_norm: float | torch.Tensor, group: Any) -> float:
    """Mean of each rank's norm over ``group``: an estimate that needs one collective for all expert groups."""
    norm = torch.as_tensor(all_groups_norm, dtype=torch.float32, device=get_accelerator().current_device_name()).clone()
    collectives.all_reduce(norm, group, op="avg", what="the mean of the expert gradient norms")
    return float(norm)


def has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
    """Bool scalar tensor on the device of ``x``: whether an element is infinite or not a number."""
    return torch.logical_not(torch.isfinite(x)).any()


def is_invalid_grad_norm(norm: float | torch.Tensor) -> bool:
    """Tell whether a norm is -1 (the marker), infinite or not a number."""
    value = float(norm)
    return value == NOT_FINITE or not math.isfinite(value)


def mask_nan_or_inf_with_val_inplace(
    input: torch.Tensor, device: str | torch.device | None = None, val: float = -1.0
) -> None:
    """Replace infinite and not-a-number elements of ``input`` by ``val``. ``device`` is where the mask is made."""
    bad = torch.logical_not(torch.isfinite(input.to(device) if device is not None else input))
    input.masked_fill_(bad.to(input.device), val)
