"""Which dtype each kind of tensor has, and how the module is cast and run.

Owns the :class:`PrecisionPolicy` (a frozen record built once from the config), the module cast with its exceptions
(modules and buffers kept in fp32), and the forward context (autocast). It does not own the loss scaler's state
machine (``runtime/fp16/loss_scaler.py``) or any optimizer storage.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.runtime.zero.init_shard import cast_sharded
from deepspeed.runtime.zero.sharded_parameter import block_of

LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes of one engine.

    ``model``: parameters and activations. ``master``: the copy the optimizer updates, for parameters in ``model``
    dtype (a parameter that is already fp32 is its own master). ``accum``: gradients while they accumulate; None means
    the parameter's dtype. ``comm``: gradients on the wire; None means the dtype they are held in. ``buffer``: floating
    buffers; None leaves them alone. ``autocast``: dtype of ``torch.autocast`` around forward, None for off.
    """

    model: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    accum: torch.dtype | None = None
    comm: torch.dtype | None = None
    buffer: torch.dtype | None = None
    autocast: torch.dtype | None = None
    autocast_comm_modules: tuple[str, ...] = ()
    keep_fp32: tuple[str, ...] = ()
    check_overflow: bool = False
    cast_inputs: bool = False
    fp16_scaling: bool = field(default=False)

    def master_dtype(self, param: torch.Tensor) -> torch.dtype:
        """Dtype the optimizer sees for ``param``: low-precision parameters get ``master``, others their own."""
        return self.master if param.dtype in LOW_PRECISION else param.dtype

    def accum_dtype(self, param: torch.Tensor) -> torch.dtype:
        return self.accum or param.dtype

    def forward_context(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """Autocast around forward when it is configured, else nothing."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device_type=device_type, dtype=self.autocast)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True when dotted ``name`` is, lies under, ends with or fits (shell pattern) one of ``patterns``."""
    for pattern in patterns:
        if name == pattern or name.startswith(pattern + ".") or f".{pattern}." in f".{name}.":
            return True
        if any(mark in pattern for mark in "*?[") and fnmatch.fnmatchcase(name, pattern):
            return True
    return False


def cast_module(module: nn.Module, policy: PrecisionPolicy) -> dict[str, list[str]]:
    """Cast floating parameters to ``policy.model`` in place and buffers to ``policy.buffer`` when that is set.

    Integer and bool tensors are never touched, nor is anything under ``policy.keep_fp32``. Parameter objects keep
    their identity, so ties and optimizers built earlier stay valid. Returns what was done, by name, for the start-up
    report: ``{"cast": [...], "kept": [...], "buffers_cast": [...]}``.

    A model in fp32 whose frozen parameters alone are smaller (adapters on a base that is stored in bf16) was mixed on
    purpose and runs as it is: its frozen parameters keep their dtype.
    """
    mixed = policy.model == torch.float32 and _trains_in(module, torch.float32)
    done: dict[str, list[str]] = {"cast": [], "kept": [], "buffers_cast": []}
    seen: set[int] = set()
    sharded: dict[torch.dtype, list[nn.Parameter]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if id(param) in seen or not param.is_floating_point():
            continue
        seen.add(id(param))
        if matches(name, policy.keep_fp32):
            wanted = torch.float32
            done["kept"].append(name)
        elif mixed and not param.requires_grad:
            continue
        elif param.dtype != policy.model:
            wanted = policy.model
            done["cast"].append(name)
        else:
            continue
        if block_of(param) is not None:
            sharded.setdefault(wanted, []).append(param)
        elif param.dtype != wanted:
            param.data = param.data.to(wanted)
    for wanted, params in sharded.items():
        cast_sharded([param for param in params if param.dtype != wanted], wanted)
    if policy.buffer is not None:
        for owner_name, owner in module.named_modules():
            for key, buffer in owner._buffers.items():
                name = f"{owner_name}.{key}" if owner_name else key
                if buffer is None or not buffer.is_floating_point() or matches(name, policy.keep_fp32):
                    continue
                if buffer.dtype != policy.buffer:
                    owner._buffers[key] = buffer.to(policy.buffer)
                    done["buffers_cast"].append(name)
    return done


def _trains_in(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether something trains, and all of that is in ``dtype``."""
    trained = {param.dtype for param in module.parameters() if param.requires_grad}
    return trained == {dtype}


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating tensor in it (nested lists, tuples, dicts) cast to ``dtype``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, cast_floating(item, dtype)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast_floating(item, dtype) for item in value)
    return value


def low_precision_safe_params(module: nn.Module, class_names: Iterable[str]) -> Iterator[nn.Parameter]:
    """Parameters held directly by modules whose qualified class name is listed (autocast communication)."""
    wanted = set(class_names)
    for owner in module.modules():
        cls = type(owner)
        if f"{cls.__module__}.{cls.__qualname__}" in wanted or f"torch.nn.{cls.__qualname__}" in wanted:
            yield from (param for param in owner._parameters.values() if param is not None)
