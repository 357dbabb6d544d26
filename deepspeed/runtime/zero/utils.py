"""Small helpers around ZeRO: nested values, agreement between ranks, packing of tensors."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as torch_dist

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.comm import collectives
from deepspeed.utils.logging import warning_once

if TYPE_CHECKING:
    ZERO_SUPPORTED_OPTIMIZERS: list[type]

__all__ = [
    "ZERO_SUPPORTED_OPTIMIZERS",
    "ZeRORuntimeException",
    "apply_to_tensors_only",
    "assert_ints_same_as_other_ranks",
    "assert_lst_len_same_as_other_ranks",
    "defragment",
    "get_lst_from_rank0",
    "get_mapping_to_flat_buffer",
    "get_norm_dtype",
    "is_builtin_type",
    "is_zero_param",
    "is_zero_supported_optimizer",
    "isinstance_namedtuple",
]

# Optimizers admitted under `zero_allow_untested_optimizer: false`: the classes the reference names, and our own.
_TESTED: tuple[tuple[str, str], ...] = (
    ("torch.optim", "Adam"),
    ("torch.optim", "AdamW"),
    ("torch.optim", "Adagrad"),
    ("deepspeed.ops.adam", "FusedAdam"),
    ("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
    ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad"),
    ("deepspeed.ops.lion", "FusedLion"),
    ("deepspeed.ops.lion", "DeepSpeedCPULion"),
    ("deepspeed.runtime.zero.muon.muon_optimizer", "MuonWithAuxAdam"),
)


class ZeRORuntimeException(Exception):
    """A call that the state of ZeRO does not allow."""


def _tested_optimizers() -> list[type]:
    return [getattr(importlib.import_module(module), name) for module, name in _TESTED]


def __getattr__(name: str) -> Any:
    if name == "ZERO_SUPPORTED_OPTIMIZERS":
        # Built on first use: the list names classes that most programs never load.
        value = _tested_optimizers()
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Tell whether ``optimizer`` is exactly of a class ZeRO is tested with (a subclass may do anything)."""
    return type(optimizer) in _tested_optimizers()


def is_zero_param(parameter: Any) -> bool:
    """Tell whether ``parameter`` is a tensor that stage 3 manages."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


def is_builtin_type(obj: Any) -> bool:
    """Tell whether the class of ``obj`` is one of Python's own."""
    return type(obj).__module__ in ("builtins", "__builtin__")


def isinstance_namedtuple(obj: object) -> bool:
    """Tell whether ``obj`` is an instance of a named tuple class."""
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")


def apply_to_tensors_only(
    function: Callable[[torch.Tensor], Any], value: Any, warning_msg_fn: Callable[[Any], str] | None = None
) -> Any:
    """Return ``value`` with ``function`` applied to each tensor inside its tuples, named tuples, lists and dicts.

    Other objects come back as they are; ``warning_msg_fn(object)`` gives the text of a warning (once a text) for those
    that are neither None nor of a builtin class.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance_namedtuple(value):
        return type(value)(*(apply_to_tensors_only(function, item, warning_msg_fn) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(apply_to_tensors_only(function, item, warning_msg_fn) for item in value)
    if isinstance(value, dict):
        # A copy keeps what subclasses such as model outputs carry beside their items.
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = apply_to_tensors_only(function, item, warning_msg_fn)
        return mapped
    if warning_msg_fn is not None and not is_builtin_type(value):
        warning_once(warning_msg_fn(value))
    return value


def _other_ranks() -> bool:
    return torch_dist.is_available() and torch_dist.is_initialized() and torch_dist.get_world_size() > 1


def get_lst_from_rank0(lst: list[int]) -> list[int]:
    """Return rank 0's list; all ranks must pass lists of the same length."""
    if not _other_ranks():
        return list(lst)
    tensor = torch.tensor(lst, dtype=torch.int64, device=get_accelerator().current_device_name())
    collectives.broadcast(tensor, 0, None, what="a list of integers of rank 0")
    return tensor.tolist()


def assert_ints_same_as_other_ranks(ints: list[int]) -> None:
    """Raise RuntimeError if this rank's integers differ from those of rank 0; lists must have the same length."""
    expected = get_lst_from_rank0(ints)
    if list(ints) != expected:
        raise RuntimeError(
            f"rank {torch_dist.get_rank()} has the values {list(ints)} where rank 0 has {expected}; "
            "all ranks must make the same calls in the same order"
        )


def assert_lst_len_same_as_other_ranks(lst: list[int]) -> None:
    """Raise RuntimeError if the length of this rank's list differs from that of rank 0."""
    assert_ints_same_as_other_ranks([len(lst)])


def get_norm_dtype() -> torch.dtype:
    """Number format in which norms are summed: float64 where the device has it, else float32."""
    return torch.float64 if get_accelerator().is_fp64_supported() else torch.float32


def get_mapping_to_flat_buffer(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, int, int]]:
    """Return (tensor, offset, numel) of each tensor in a flat buffer that holds them one after another."""
    mapping = []
    offset = 0
    for tensor in tensors:
        mapping.append((tensor, offset, tensor.numel()))
        offset += tensor.numel()
    return mapping


def defragment(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Move ``tensors`` (one dtype, one device) into one new flat buffer and return it.

    The tensors become views of the buffer; their old memory is given back. The values pass through host memory, so at
    no time does the device hold them twice.
    """
    if not tensors:
        raise ValueError("defragment: the list of tensors is empty")
    dtypes, devices = {t.dtype for t in tensors}, {t.device for t in tensors}
    if len(dtypes) != 1 or len(devices) != 1:
        raise ValueError(f"defragment: expected one dtype and one device, found {dtypes} and {devices}")
    mapping = get_mapping_to_flat_buffer(tensors)
    shapes = [tensor.shape for tensor in tensors]
    total = sum(numel for _, _, numel in mapping)
    device, dtype = tensors[0].device, tensors[0].dtype
    on_host = torch.empty(total, dtype=dtype)
    for tensor, offset, numel in mapping:
        on_host[offset : offset + numel].copy_(tensor.detach().reshape(-1))
        tensor.data = torch.empty(0, dtype=dtype, device=device)
    get_accelerator().empty_cache()
    buffer = on_host.to(device)
    for (tensor, offset, numel), shape in zip(mapping, shapes, strict=True):
        tensor.data = buffer[offset : offset + numel].view(shape)
    return buffer
