"""Between plain tensors and torch's, for what only torch can answer; torch is imported when that is asked for.

Owns: the conversion, both ways, inside plain containers. Invariant: no element is copied that lies end to end.
"""

from __future__ import annotations

import collections
import copy
import importlib
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepspeed.utils.torch_archive import symbols
from deepspeed.utils.torch_archive.tensors import DTYPES, DType, PlainTensor, Size, Storage

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


def _storage_to_torch(value: Storage) -> torch.UntypedStorage | torch.TypedStorage:
    import torch

    whole = PlainTensor(value.data, DTYPES["uint8"], (len(value.data),))
    made = tensor_to_torch(whole).clone().untyped_storage()
    if value.dtype is None:
        return made
    return torch.TypedStorage(wrap_storage=made, dtype=dtype_to_torch(value.dtype), _internal=True)


def tensor_from_torch(value: torch.Tensor) -> PlainTensor:
    """The same elements as a plain tensor, over the same memory where they lie there end to end."""
    import torch

    dtype = DTYPES[_name(value.dtype)]
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel() == 1:
        flat = flat.as_strided((1,), (1,))  # one element may keep any stride, which a view in bytes refuses
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
        if isinstance(item, Storage):
            return _storage_to_torch(item)
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stands_in(value: Any) -> bool:
    """Whether ``value`` is the attributes of an object of a class of ours, under whose path it is written."""
    return bool(getattr(type(value), "pickled_as", "")) and hasattr(value, "__dict__")


def _named(path: str) -> Any:
    """The object at a path that our own tables spell."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def from_torch(value: Any) -> Any:
    """``value``, read by torch, with plain tensors where torch's are strided ones in no class of their own.

    Tensors without elements in memory, and of a dtype that is not known here, stay torch's.
    """
    import torch

    def convert(item: Any) -> Any:
        if type(item) is torch.Tensor and item.layout is torch.strided and not item.is_nested and not item.is_meta:
            return tensor_from_torch(item) if _name(item.dtype) in DTYPES else item
        if isinstance(item, torch.dtype) and _name(item) in DTYPES:
            return DTYPES[_name(item)]
        if _stands_in(item):
            vars(item).update(_replaced(vars(item), convert))
        return Size(item) if isinstance(item, torch.Size) else item

    return _replaced(value, convert)


def _replaced(value: Any, convert: Callable[[Any], Any]) -> Any:
    """``value`` with ``convert`` applied to what its plain containers hold; these keep their class and attributes."""
    kind = type(value)
    if isinstance(value, dict):
        made = copy.copy(value)  # with its class, attributes and default
        made.clear()
        for key, item in value.items():  # one by one: update() of a Counter counts
            made[_replaced(key, convert)] = _replaced(item, convert)
        return made
    if kind in (list, tuple, set, frozenset):
        return kind(_replaced(item, convert) for item in value)
    if kind is collections.deque:
        return collections.deque((_replaced(item, convert) for item in value), value.maxlen)
    if kind is types.SimpleNamespace or (kind.__module__, kind.__name__) == ("argparse", "Namespace"):
        held = copy.copy(value)
        vars(held).update(_replaced(vars(value), convert))
        return held
    return convert(value)
