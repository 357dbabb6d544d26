"""Between plain tensors and torch's, for what only torch can answer; torch is imported when that is asked for.

Owns: the conversion, both ways, inside plain containers. Invariant: no element is copied that lies end to end.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepspeed.utils.torch_archive import symbols
from deepspeed.utils.torch_archive.tensors import DTYPES, DType, PlainTensor, Size

if TYPE_CHECKING:
    import torch

__all__ = ["dtype_to_torch", "from_torch", "tensor_from_torch", "tensor_to_torch", "to_torch"]


def dtype_to_torch(dtype: DType) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, dtype.name)
    return found


def tensor_to_torch(value: PlainTensor) -> torch.Tensor:
    """The same elements as a tensor of torch, over the same bytes where these may be written to."""
    import torch

    dtype = dtype_to_torch(value.dtype)
    if not value.numel():
        return torch.empty(tuple(value.shape), dtype=dtype)
    data: Any = value.bytes()
    flat = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
    if flat.data_ptr() % value.dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).reshape(tuple(value.shape)).requires_grad_(value.requires_grad)


def tensor_from_torch(value: torch.Tensor) -> PlainTensor:
    """The same elements as a plain tensor, over the same memory where they lie there end to end."""
    import torch

    dtype = DTYPES[str(value.dtype).removeprefix("torch.")]
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]
    address = value.data_ptr() if value.is_contiguous() and value.numel() else None
    return PlainTensor(data, dtype, value.shape, requires_grad=value.requires_grad, address=address)


def to_torch(value: Any) -> Any:
    """``value`` with torch's own in place of what stands for it."""
    import torch

    def convert(item: Any) -> Any:
        if isinstance(item, symbols.Parameter):
            return torch.nn.Parameter(tensor_to_torch(item), item.requires_grad)
        if isinstance(item, PlainTensor):
            return tensor_to_torch(item)
        if isinstance(item, DType):
            return dtype_to_torch(item)
        if isinstance(item, Size):
            return torch.Size(item)
        if isinstance(item, symbols.Symbol):
            return _named(item.pickled_as)
        if isinstance(item, symbols.Call):
            return _named(item.symbol.pickled_as)(*map(convert, item.args))
        if _stands_in(item):
            made = object.__new__(_named(item.pickled_as))
            made.__dict__.update(_replaced(vars(item), convert))
            return made
        return item

    return _replaced(value, convert)


def _stands_in(value: Any) -> bool:
    """Whether ``value`` is the attributes of an object of a class of ours, under whose path it is written."""
    return bool(getattr(type(value), "pickled_as", "")) and hasattr(value, "__dict__")


def _named(path: str) -> Any:
    """The object at a path that our own tables spell."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def from_torch(value: Any) -> Any:
    """``value``, read by torch, with plain tensors where torch's are strided ones in no class of their own."""
    import torch

    def convert(item: Any) -> Any:
        if type(item) is torch.Tensor and item.layout is torch.strided and not item.is_quantized:
            return tensor_from_torch(item)
        if isinstance(item, torch.dtype) and str(item).removeprefix("torch.") in DTYPES:
            return DTYPES[str(item).removeprefix("torch.")]
        if _stands_in(item):
            vars(item).update(_replaced(vars(item), convert))
        return Size(item) if isinstance(item, torch.Size) else item

    return _replaced(value, convert)


def _replaced(value: Any, convert: Callable[[Any], Any]) -> Any:
    """``value`` with ``convert`` applied to what its plain containers hold; these keep their class and attributes."""
    kind = type(value)
    if isinstance(value, dict):
        made = kind() if kind is not dict and issubclass(kind, dict) and not hasattr(value, "default_factory") else {}
        made.update((_replaced(key, convert), _replaced(item, convert)) for key, item in value.items())
        made.__dict__.update(vars(value)) if hasattr(value, "__dict__") else None
        return made
    if kind in (list, tuple):
        return kind(_replaced(item, convert) for item in value)
    return convert(value)
