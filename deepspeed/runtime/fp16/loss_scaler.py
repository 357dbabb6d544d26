"""Loss scaling for fp16 training: a small state machine that is fed one overflow flag per optimizer step.

Owns: the scale, its bounds, the hysteresis counter, and the counts of steps that were skipped. Does not own: finding an
overflow (the optimizer looks at its gradients), agreeing on it between ranks, or skipping the step.
Invariant: the next scale depends on this object's attributes and the flag alone, so ranks that feed the same flags hold
the same scale, and a saved and restored object continues exactly.

Rule of the dynamic scaler (``iteration`` counts every step, skipped ones too):

- overflow: one unit of hysteresis is used up; when only one is left the scale is divided by ``scale_factor``, but never
  below ``min_scale``. An overflow at ``min_scale`` with no hysteresis left means that the gradients cannot be
  represented at any allowed scale: an error, or nothing, as ``raise_error_at_min_scale`` says.
- clean step: with ``s = iteration - last_overflow_iter - 1``, the scale is multiplied by ``scale_factor`` when ``s`` is
  a positive multiple of ``scale_window``; so the first growth comes with the clean step after a full window, and then
  once a window. The hysteresis is refilled at each growth, or at each clean step with ``consecutive_hysteresis``.

The attribute names are those of the pickled objects in checkpoints, and the class paths those the pickles name.
Source: P. Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

# Keys of the `dynamic_loss_args` mapping that the fp16 section of the configuration is turned into.
INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"


class LossScaleError(RuntimeError):
    """The dynamic loss scale is at its minimum and gradients still overflow."""


def to_python_float(t: torch.Tensor | float) -> float:
    """The value of a one-element tensor, or the number itself, as a Python float."""
    return float(t.item()) if isinstance(t, torch.Tensor) else float(t)


def _has_inf_or_nan(tensor: torch.Tensor) -> bool:
    """Whether any element is not finite; looks at the stored values of sparse tensors."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return not bool(torch.isfinite(values).all())


class LossScalerBase:
    """Holds the scale and applies it. `cur_scale` is the factor the loss is multiplied by."""

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale
        self.dynamic = False

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss * loss_scale`, in the dtype of the loss."""
        return loss * self.loss_scale

    def scale_gradient(
        self, module: torch.nn.Module | None, grad_in: tuple[torch.Tensor | None, ...], grad_out: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """`grad_in` times the scale; has the signature of a module's backward hook."""
        return tuple(None if g is None else self.loss_scale * g for g in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """Tell the scaler whether the gradients of this step overflowed. A constant scale does not care."""

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backward pass of the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def state_dict(self) -> dict[str, Any]:
        """Every attribute: plain numbers, flags and a dtype."""
        return dict(self.__dict__)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the attributes of a state dict; attributes it does not name keep their values.

        Raises:
            ValueError: it names an attribute that this scaler does not have.
        """
        unknown = sorted(set(state_dict) - set(self.__dict__))
        if unknown:
            raise ValueError(
                f"loss scaler state holds {unknown}, which a {type(self).__name__} does not have "
                f"(it has {sorted(self.__dict__)}); the state was saved by another kind of scaler"
            )
        self.__dict__.update(state_dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({json.dumps(self.__dict__, default=str)})"


class LossScaler(LossScalerBase):
    """A constant scale: 1 for fp32 and bf16, `fp16.loss_scale` for fp16 with a static scale."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Always False: a constant scale is not adapted, so it does not look for overflows."""
        return False


class DynamicLossScaler(LossScalerBase):
    """A scale that shrinks at overflows and grows after clean windows; the rule stands in the module docstring.

    Args:
        init_scale: first scale.
        scale_window: clean steps between two growths.
        min_scale: lower bound of the scale.
        delayed_shift: hysteresis, the number of overflows at which the scale shrinks (1 or less: at each one).
        consecutive_hysteresis: refill the hysteresis at every clean step.
        raise_error_at_min_scale: raise `LossScaleError` when the scale would have to go below `min_scale`.
        dtype: dtype of the gradients, for the error text.

    Attributes of interest: `cur_iter` (steps seen), `last_overflow_iter` (-1: none yet), `cur_hysteresis`,
    `num_overflows` (steps skipped in all) and `consecutive_overflows` (steps skipped in a row, up to now).
    """

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = 2.0
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dynamic = True
        self.dtype = dtype
        self.num_overflows = 0
        self.consecutive_overflows = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickles of other releases do not have the counts of skipped steps.
        self.num_overflows = 0
        self.consecutive_overflows = 0
        self.__dict__.update(state)

    def has_overflow_serial(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether any gradient of `params` on this rank holds an inf or nan."""
        return any(p.grad is not None and _has_inf_or_nan(p.grad) for p in params)

    def update_scale(self, overflow: bool) -> None:
        """Advance by one step.

        Raises:
            LossScaleError: the scale is at its minimum, no hysteresis is left, and the step overflowed. The state is
                then as before the call, except for the counts of skipped steps.
        """
        if overflow:
            self.num_overflows += 1
            self.consecutive_overflows += 1
            self._shrink()
            self.last_overflow_iter = self.cur_iter
        else:
            self.consecutive_overflows = 0
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable_interval = self.cur_iter - self.last_overflow_iter - 1
            if stable_interval > 0 and stable_interval % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def _shrink(self) -> None:
        if self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
            return
        if self.cur_scale <= self.min_scale and self.raise_error_at_min_scale:
            raise LossScaleError(
                f"loss scale {self.cur_scale:g} is already at its minimum (fp16.min_loss_scale = {self.min_scale:g}) "
                f"and the {str(self.dtype).removeprefix('torch.')} gradients of step {self.cur_iter} still hold inf or "
                f"nan: {self.consecutive_overflows} steps in a row and {self.num_overflows} of {self.cur_iter + 1} "
                "steps were skipped. The loss or the model produces non-finite values whatever the scale is: look for "
                "the first layer that does, lower the learning rate, or train in bf16 (`bf16.enabled: true`)"
            )
        self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)


class LossScaleProfile(str, Enum):
    """Which historical set of defaults a wrapper without an explicit fp16 section used."""

    FUSED = "fused"
    UNFUSED = "unfused"


@dataclass(frozen=True)
class LossScaleProfileDefaults:
    """Values of one profile."""

    initial_dynamic_scale: float
    default_scale_window: int
    default_min_loss_scale: float
    scale_factor: float


LOSS_SCALE_PROFILE_DEFAULTS = {
    LossScaleProfile.FUSED: LossScaleProfileDefaults(2**32, 1000, 1, 2.0),
    LossScaleProfile.UNFUSED: LossScaleProfileDefaults(2.0**16, 1000, 0.25, 2.0),
}


class LossScaleConfig:
    """Settings of loss scaling as the historical fp16 wrappers hold them; only fp16 is scaled at all."""

    last_overflow_iter: int | None = None
    scale_factor: float | None = None
    scale_window: int | None = None
    min_loss_scale: float | None = None

    def __init__(
        self,
        low_precision_dtype: torch.dtype,
        dynamic_loss_scale: bool,
        static_loss_scale: float,
        dynamic_loss_args: Mapping[str, Any] | None,
        *,
        profile: LossScaleProfile = LossScaleProfile.FUSED,
        initial_dynamic_scale: float | None = None,
    ) -> None:
        self.use_grad_scaling = low_precision_dtype == torch.float16
        self.dynamic_loss_scale = self.use_grad_scaling and dynamic_loss_scale
        self.cur_iter = 0
        self.last_overflow_iter = None
        self.scale_factor = None
        self.scale_window = None
        self.min_loss_scale = None
        if not self.dynamic_loss_scale:
            self.cur_scale = static_loss_scale if self.use_grad_scaling else 1.0
            return
        defaults = LOSS_SCALE_PROFILE_DEFAULTS[profile]
        args = dynamic_loss_args or {}
        first = defaults.initial_dynamic_scale if initial_dynamic_scale is None else initial_dynamic_scale
        self.cur_scale = args.get(INITIAL_LOSS_SCALE, first)
        self.last_overflow_iter = -1
        self.scale_factor = defaults.scale_factor
        self.scale_window = args.get(SCALE_WINDOW, defaults.default_scale_window)
        self.min_loss_scale = args.get(MIN_LOSS_SCALE, defaults.default_min_loss_scale)


def CreateLossScaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
) -> LossScaler | DynamicLossScaler:
    """The scaler of a model of this dtype: dynamic or constant for fp16, the constant 1 for every other dtype.

    Raises:
        ValueError: dynamic scaling of fp16 without `dynamic_loss_args`.
    """
    if dtype != torch.float16:
        return LossScaler(scale=1.0)
    if not dynamic_scaling:
        return LossScaler(scale=static_loss_scale)
    if dynamic_loss_args is None:
        raise ValueError(
            "dynamic loss scaling of fp16 needs `dynamic_loss_args` with "
            f"{INITIAL_LOSS_SCALE}, {SCALE_WINDOW}, {MIN_LOSS_SCALE}, {DELAYED_SHIFT}, {CONSECUTIVE_HYSTERESIS}; "
            "found None"
        )
    return DynamicLossScaler(dtype=dtype, **dynamic_loss_args)
