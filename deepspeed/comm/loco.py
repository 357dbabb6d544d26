"""`LocoState`: what the packed reduction of one bucket has lost so far, to be sent later (LoCo error feedback).

Owns: the error buffers of a bucket, their decay and their reset. Does not own: the packing, which reads and writes them
(`blockwise.quantize`). A rank that packs the value v sends v + e instead, e being the moving average of what its
earlier packings of the same elements have lost; over many steps the losses then cancel instead of adding up.

The average is that of LoCo (Xie et al., arXiv 2407.04480), e <- (1 - beta) e + beta (v + e - what was sent), with
`err_beta` = 1 - beta, and e <- 0 every `reset_T` reductions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["LocoState"]

_HOPS = ("inner", "outer")


class LocoState:
    """Error buffers of one bucket; hand the same object to each `quantized.reduce_scatter` of it.

    Args:
        err_beta: share of the old error in the moving average; 0 keeps the last loss alone.
        reset_T: calls after which the error starts again from zero: old losses belong to old weights.
        dtype: of the buffers; default: fp32 for fp32 gradients, bf16 (fp32's range in half the memory) for others.

    Memory: as many elements as this rank sends per call.
    """

    def __init__(self, err_beta: float = 0.8, reset_T: int = 1024, *, dtype: torch.dtype | None = None) -> None:
        if not 0.0 <= err_beta < 1.0:
            raise ValueError(f"err_beta={err_beta}: the share of the old error must be at least 0 and below 1")
        if reset_T < 1:
            raise ValueError(f"reset_T={reset_T}: the error is reset after 1, 2, ... calls")
        self.err_beta = float(err_beta)
        self.reset_T = int(reset_T)
        self.dtype = dtype
        self.calls = 0
        self._errors: dict[str, torch.Tensor] = {}

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> LocoState:
        """A state with the settings of `zero_optimization.zeropp_loco_param`."""
        unknown = set(section) - {"err_beta", "reset_T"}
        if unknown:
            raise ValueError(f"zeropp_loco_param: unknown key {sorted(unknown)[0]!r}; known: err_beta, reset_T")
        return cls(**section)

    def begin_call(self, gradient_dtype: torch.dtype) -> None:
        """Count a reduction; drop the errors when their time has come."""
        if self.dtype is None:
            self.dtype = torch.float32 if gradient_dtype is torch.float32 else torch.bfloat16
        if self.calls and self.calls % self.reset_T == 0:
            self.reset()
        self.calls += 1

    def errors(self, hop: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """The buffer of a hop ("inner" or "outer"), zeros at first; written by whoever packs."""
        held = self._errors.get(hop)
        if held is None:
            with torch.inference_mode(False):
                held = torch.zeros(shape, dtype=self.dtype or torch.float32, device=device)
            self._errors[hop] = held
        if held.shape != shape:
            raise ValueError(
                f"LocoState: holds errors of {tuple(held.shape)} (peers, pieces, elements) for the {hop} hop, found "
                f"{tuple(shape)}; one state serves one bucket on one set of groups: make a state for each"
            )
        return held

    def reset(self) -> None:
        """Set all errors to zero."""
        for error in self._errors.values():
            error.zero_()

    def rescale(self, factor: float) -> None:
        """Multiply the errors, when the gradients to come are scaled by a loss scale `factor` times the old one."""
        for error in self._errors.values():
            error.mul_(factor)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(error.nbytes for error in self._errors.values())

    def state_dict(self) -> dict[str, Any]:
        """What an exact resume on the same ranks needs; tensors are the live ones."""
        return {"calls": self.calls, **self._errors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of `state_dict`."""
        self.calls = int(state["calls"])
        self._errors = {hop: state[hop].clone() for hop in _HOPS if hop in state}
