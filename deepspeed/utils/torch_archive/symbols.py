"""Names of torch in files, and calls of them, that are carried along and never looked up.

Owns: that list. Does not own: which other names a file may hold (``checkpoint/trusted.py``).
Invariant: a name that is not listed, and no tensor, is a :class:`NeedsTorch`: only torch knows what it makes.
"""

from __future__ import annotations

import sys
from typing import Any

from deepspeed.utils.torch_archive.tensors import DTYPES, DType, PlainTensor

__all__ = ["Call", "NeedsTorch", "StorageKind", "Symbol", "find"]


class NeedsTorch(Exception):
    """The file, or the object, holds something of torch that is no plain tensor: it is torch's to read or to write."""


class Symbol:
    """A name in a file. Calling it makes a :class:`Call`."""

    __slots__ = ("pickled_as",)

    def __init__(self, path: str) -> None:
        self.pickled_as = path

    def __call__(self, *args: Any) -> Call:
        return Call(self, args)

    def __repr__(self) -> str:
        return self.pickled_as


class Call:
    """What calling a name with these arguments makes, whatever it is."""

    __slots__ = ("args", "symbol")

    def __init__(self, symbol: Symbol, args: tuple[Any, ...]) -> None:
        self.symbol, self.args = symbol, args

    def __repr__(self) -> str:
        return f"{self.symbol}{self.args}"


class StorageKind:
    """A class of storages. ``dtype`` None: it counts bytes."""

    __slots__ = ("dtype", "pickled_as")

    def __init__(self, name: str, dtype: DType | None) -> None:
        self.pickled_as, self.dtype = name, dtype


class Parameter(PlainTensor):
    """A tensor that a module owns, with the dict of hooks it was saved with."""

    __slots__ = ("hooks",)

    hooks: Any


def parameter(data: Any, requires_grad: bool, hooks: Any) -> Parameter:
    if type(data) is not PlainTensor:
        raise NeedsTorch("a parameter over something that is no plain tensor")
    made = Parameter(
        data._data, data.dtype, data.shape, data._strides, data._offset,
        requires_grad=bool(requires_grad), address=data._address,
    )  # fmt: skip
    made.hooks = hooks
    return made


STORAGES = {dtype.name: StorageKind(f"torch.{dtype.storage}", dtype) for dtype in DTYPES.values() if dtype.storage}
BYTES = StorageKind("torch.storage.UntypedStorage", None)
_NAMES = ("torch.device", "torch.serialization._get_layout", "torch.Tensor", "torch.nn.parameter.Parameter")
_FOUND: dict[str, Any] = {
    **{str(dtype): dtype for dtype in DTYPES.values()},
    **{kind.pickled_as: kind for kind in STORAGES.values()},
    **dict.fromkeys(("torch.storage.UntypedStorage", "torch.UntypedStorage"), BYTES),
    **{path: Symbol(path) for path in _NAMES},
    "torch._utils._rebuild_parameter": parameter,
}


def find(path: str) -> Any:
    """What the name of torch stands for here. Raises NeedsTorch for one that is not known."""
    try:
        return _FOUND[path]
    except KeyError:
        raise NeedsTorch(path) from None


def is_torchs(value: Any) -> bool:
    """True for an object of torch itself (a file that was read by torch may hold some)."""
    return "torch" in sys.modules and type(value).__module__.partition(".")[0] == "torch"
