"""What our own optimizers share: the dtype of their states, the step count, loading, and the older calling forms.

Owns: `StateOptimizer`, the base class. Does not own: any update rule.
Invariants: the state of a parameter is created in the layout of the parameter and in `state_dtype(parameter)`, and a
state that is loaded keeps that dtype (torch casts loaded states to the dtype of the parameter, which would round the
fp32 moments of a bf16 parameter at each resume). `state["step"]` is a Python int, also when the saved one is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from deepspeed.utils.argument_checks import real

# A parameter and its gradient.
Pair = tuple[torch.Tensor, torch.Tensor]

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_SUPPORTED = (torch.float32, torch.float64, *_LOW_PRECISION)


class StateOptimizer(Optimizer):
    """Base of `FusedAdam`, `DeepSpeedCPUAdam` and the like.

    Args:
        params: parameters, or parameter groups.
        defaults: default values of the groups.
        fp32_optimizer_states: keep the states of fp16 and bf16 parameters in fp32; otherwise states have the dtype of
            their parameter.
        set_grad_none: what `zero_grad()` does when it is not told.
    """

    # Attributes that are no group values; torch pickles and copies defaults, state and groups only.
    _extra_attributes: ClassVar[tuple[str, ...]] = ("fp32_optimizer_states", "set_grad_none")
    # Devices the class accepts; None: all.
    _only_device: ClassVar[str | None] = None

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, fp32_optimizer_states: bool, set_grad_none: bool = True
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        self.set_grad_none = set_grad_none
        _check_hyperparameters(type(self).__name__, defaults)
        super().__init__(params, defaults)

    def state_dtype(self, param: torch.Tensor) -> torch.dtype:
        """The dtype of the states of this parameter."""
        return torch.float32 if self.fp32_optimizer_states and param.dtype in _LOW_PRECISION else param.dtype

    def new_state(self, param: torch.Tensor) -> torch.Tensor:
        """Zeros of the shape and layout of the parameter, in the dtype of its states."""
        return torch.zeros_like(param, dtype=self.state_dtype(param), memory_format=torch.preserve_format)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):  # else torch names the type
            _check_hyperparameters(f"{type(self).__name__}, group {len(self.param_groups)}", param_group)
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    def check_param(self, param: torch.Tensor) -> None:
        """Refuse a parameter that the update rule cannot handle; called when its state is made.

        Raises:
            RuntimeError: dtype, device or a sparse gradient that is not supported.
        """
        where = f"{type(self).__name__}: parameter of shape {tuple(param.shape)}"
        if param.dtype not in _SUPPORTED:
            raise RuntimeError(f"{where} has dtype {param.dtype}; supported are {', '.join(map(str, _SUPPORTED))}")
        if self._only_device is not None and param.device.type != self._only_device:
            raise RuntimeError(
                f"{where} is on {param.device}, but this optimizer updates parameters on {self._only_device} only; "
                "move the parameters there (`offload_optimizer.device: cpu`) or use the fused optimizer of the device"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        saved_ids = (i for group in state_dict["param_groups"] for i in group["params"])
        params = (p for group in self.param_groups for p in group["params"])
        for saved_id, param in zip(saved_ids, params, strict=True):
            for key, value in state_dict["state"].get(saved_id, {}).items():
                if key == "step":
                    self.state[param][key] = int(value)
                elif torch.is_tensor(value) and value.is_floating_point() and value.shape == param.shape:
                    self.state[param][key] = self.new_state(param).copy_(value)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._extra_attributes}}


def refuse_legacy_step_arguments(optimizer: Optimizer, **arguments: Any) -> None:
    """Raise a RuntimeError if a caller uses the calling form of early mixed-precision libraries.

    There `step` took the gradients, their scale and the half precision copies; here it takes none of them.
    """
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() got {given}: gradients are read from the parameters and have to be "
            "unscaled and clipped before; call step() without arguments, as for a torch.optim optimizer"
        )


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure, computed with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def gradients(params: Iterable[torch.Tensor]) -> Iterator[Pair]:
    """Pairs of a parameter and its gradient, for those of `params` that have one."""
    for param in params:
        grad = param.grad
        if grad is not None:
            yield param, grad


def _check_hyperparameters(owner: str, defaults: dict[str, Any]) -> None:
    _check_types(owner, defaults)
    limits: dict[str, Callable[[Any], bool]] = {
        "lr": lambda v: v >= 0,
        "eps": lambda v: v >= 0,
        "weight_decay": lambda v: v >= 0,
        "betas": lambda v: all(0 <= b < 1 for b in v),
        "momentum": lambda v: 0 <= v < 1,
    }
    wanted = {"betas": "two numbers in [0, 1)", "momentum": "a number in [0, 1)"}
    for name, is_valid in limits.items():
        if name in defaults and not is_valid(defaults[name]):
            raise ValueError(f"{owner}: {name} = {defaults[name]!r}; expected {wanted.get(name, 'a number >= 0')}")


_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "max_coeff", "min_coeff", "max_grad_norm")


def _check_types(owner: str, values: dict[str, Any]) -> None:
    """Refuse texts and the like: they compare with numbers, if at all, only in the middle of a step."""
    for name in _NUMBERS:
        if name in values and not real(values[name]):
            raise TypeError(f"{owner}: {name} = {values[name]!r} ({type(values[name]).__name__}); expected a number")
    betas = values.get("betas", (0.0, 0.0))
    listed = list(betas) if isinstance(betas, Iterable) and not isinstance(betas, str) else []
    if len(listed) != 2 or not all(map(real, listed)):
        raise TypeError(f"{owner}: betas = {betas!r}; expected two numbers in [0, 1)")
