"""Build a model on another device or in another dtype without touching its code.

Owns: the context in which the plain tensor constructors answer with the chosen device and dtype. Does not own ZeRO's
partitioned construction (`deepspeed.zero.Init`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
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


class OnDevice:
    """Context manager: tensors made by plain constructors, and all parameters, get a device and a dtype.

    Covers ``torch.empty``, ``zeros``, ``ones``, ``full`` and the ``Tensor.new_*`` forms of these (dtype only: they
    follow the tensor's device). A device given in the call wins; floating point results get ``dtype`` even if the call
    names another one; integers keep theirs. A parameter whose values came from elsewhere (``torch.Tensor(4, 3)``,
    ``torch.randn``) is moved when a module takes it.

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
        self._open: list[tuple[_ConstructorMode, Any]] = []
        # Tied parameters are registered several times and must stay one object. The original is kept, so that its id
        # is not given to another parameter meanwhile.
        self._moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def _move_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        """Registration hook: returns what the module takes instead of ``param`` (None: ``param`` itself)."""
        if type(param) is not nn.Parameter:
            return None  # None, lazy and quantized parameters manage themselves
        if id(param) in self._moved:
            return self._moved[id(param)][1]
        dtype = self.dtype if self.dtype is not None and param.is_floating_point() else param.dtype
        data = param.data.to(device=self.device, dtype=dtype)
        if data.device == param.device and data.dtype == param.dtype:
            return None
        moved = nn.Parameter(data, requires_grad=param.requires_grad)
        moved.__dict__.update(param.__dict__)
        self._moved[id(param)] = (param, moved)
        return moved

    def __enter__(self) -> OnDevice:
        if self.enabled:
            mode = _ConstructorMode(self.dtype, self.device)
            mode.__enter__()
            # torch annotates the hook as returning None, and documents that a parameter it returns is taken instead.
            hook = cast("Callable[..., None]", self._move_parameter)
            self._open.append((mode, register_module_parameter_registration_hook(hook)))
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self.enabled:
            mode, hook = self._open.pop()
            hook.remove()
            mode.__exit__(exc_type, exc_value, traceback)
            if not self._open:
                self._moved.clear()
