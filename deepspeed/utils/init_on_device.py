"""Build a model on another device or in another dtype without touching its code.

Owns: the context in which the plain tensor constructors answer with the chosen device and dtype. Does not own ZeRO's
partitioned construction (`deepspeed.zero.Init`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["OnDevice"]

# The constructors that allocate parameters. Those whose values models compute with while they are built (tensor,
# arange, linspace, rand, eye) stay as they are: `[rate.item() for rate in torch.linspace(...)]` is common.
_CONSTRUCTORS = frozenset({torch.empty, torch.zeros, torch.ones, torch.full})
_NEW_CONSTRUCTORS = frozenset(
    {torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full}
)


class _ConstructorMode(TorchFunctionMode):
    """Adds the device to a constructor call and turns a floating point result into the chosen dtype."""

    def __init__(self, dtype: torch.dtype | None, device: str | torch.device) -> None:
        super().__init__()
        self._dtype = dtype
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func in _CONSTRUCTORS and options.get("device") is None:
            options = {**options, "device": self._device}
        elif func not in _CONSTRUCTORS and func not in _NEW_CONSTRUCTORS:
            return func(*args, **options)
        made = func(*args, **options)
        return made.to(self._dtype) if self._dtype is not None and made.is_floating_point() else made


class _LegacyConstructor:
    """Replaces ``torch.Tensor.__new__``, so ``torch.Tensor(4, 3)``, which no mode can see, obeys the context too.

    Shared by nested contexts: installed by the first, removed by the last, whatever the order of exits.
    """

    def __init__(self) -> None:
        self._active: list[OnDevice] = []
        self._lock = threading.Lock()

    def enter(self, context: OnDevice) -> None:
        with self._lock:
            if not self._active:
                self._original = torch.Tensor.__new__
                torch.Tensor.__new__ = self._make  # type: ignore[method-assign,assignment]
            self._active.append(context)

    def exit(self, context: OnDevice) -> None:
        with self._lock:
            self._active.remove(context)
            if not self._active:
                # torch.Tensor inherits the constructor; without our attribute it is found there again.
                del torch.Tensor.__new__

    def _make(self, cls: type, *args: Any, **kwargs: Any) -> Any:
        sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
        context = self._active[-1]
        if cls is not torch.Tensor or kwargs or not all(type(size) is int for size in sizes) or not sizes:
            return self._original(cls, *args, **kwargs)
        return torch.empty(sizes, device=context.device, dtype=context.dtype)


_legacy = _LegacyConstructor()


class OnDevice:
    """Context manager: tensors made by plain constructors get a device and a dtype.

    Covers ``torch.empty``, ``zeros``, ``ones``, ``full``, the ``Tensor.new_*`` forms of these (dtype only: they follow
    the tensor's device), and ``torch.Tensor(sizes...)``, which is what modules allocate parameters with. A device given
    in the call wins; floating point results get ``dtype`` even if the call names another one; integers keep theirs.

    Example::

        with OnDevice(dtype=torch.bfloat16, device="meta"):
            model = Model()            # no memory is used

    Args:
        dtype: floating point type, or None to leave types alone.
        device: ``"meta"`` (shapes only), ``"cuda:1"``, ...
        enabled: False makes the context do nothing.
    """

    def __init__(self, dtype: torch.dtype | None, device: str | torch.device = "meta", enabled: bool = True) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"OnDevice: `dtype` must be a floating point torch.dtype or None, found {dtype!r}")
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._modes: list[_ConstructorMode] = []

    def __enter__(self) -> OnDevice:
        if self.enabled:
            mode = _ConstructorMode(self.dtype, self.device)
            mode.__enter__()
            self._modes.append(mode)
            _legacy.enter(self)
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self.enabled:
            _legacy.exit(self)
            self._modes.pop().__exit__(exc_type, exc_value, traceback)
