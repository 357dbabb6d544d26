"""`MuonWithAuxAdam`: the optimizer that the config type "Muon" builds.

Owns: the choice of the Adam half. Does not own: the update rules (`original_muon.py`, `ops/adam`).
Invariant: both halves share the parameter groups and the state of this object, so learning rates set on
`param_groups`, saved states and loaded states are those in use.

It communicates nothing: inside the ZeRO core each rank holds whole parameters and updates its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from deepspeed.ops.optimizer_base import run_closure
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.utils.logging import logger


class MuonWithAuxAdam(original_muon.MuonWithAuxAdam):
    """Muon for groups with `use_muon=True`, Adam for the others.

    Args:
        param_groups: as in `original_muon.SingleDeviceMuonWithAuxAdam`.
        adam_optimizer: class (or callable) that makes the optimizer of the Adam groups from (groups, **kwargs);
            None: the built-in fused Adam.
        adam_optimizer_kwargs: further arguments for it.
        adam_w_mode: decoupled weight decay in the built-in Adam.
        fallback_to_inline: when `adam_optimizer` cannot be made, say so and take the built-in Adam.
        fp32_optimizer_states: False keeps momentum and moments in the dtype of the parameter.
    """

    _extra_attributes = (*original_muon.MuonWithAuxAdam._extra_attributes, "adam_w_mode", "adam_optimizer")

    def __init__(
        self,
        param_groups: Any,
        adam_optimizer: Callable[..., Optimizer] | None = None,
        adam_optimizer_kwargs: dict[str, Any] | None = None,
        adam_w_mode: bool = True,
        fallback_to_inline: bool = False,
        *,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(param_groups, fp32_optimizer_states=fp32_optimizer_states)
        self.adam_w_mode = adam_w_mode
        self.adam_optimizer: Optimizer | None = None
        adam_groups = self._adam_groups()
        if adam_optimizer is None or not adam_groups:
            return
        try:
            self.adam_optimizer = adam_optimizer(adam_groups, **(adam_optimizer_kwargs or {}))
        except (RuntimeError, ImportError, NotImplementedError) as error:
            if not fallback_to_inline:
                raise
            logger.warning(f"Muon: {adam_optimizer!r} is not available ({error}); using the built-in Adam")
        else:
            self._share_with_adam()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, step_id: int | None = None) -> Any:
        """One update from the parameters' `grad`; returns the loss of `closure`. `step_id` is for callers that
        number their steps and changes nothing.
        """
        loss = run_closure(closure)
        for group in self.param_groups:
            if group["use_muon"]:
                self._muon_group(group, group["params"])
            elif self.adam_optimizer is None:
                self._adam_group(group)
        if self.adam_optimizer is not None:
            # Groups may have been added or replaced since the last step.
            self._share_with_adam()
            self.adam_optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both halves; `state_dict` is that of this optimizer (all groups in one list)."""
        super().load_state_dict(state_dict)
        if self.adam_optimizer is not None:
            self._share_with_adam()
            _steps_as_tensors(self, self._adam_groups())

    def _adam_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["use_muon"]]

    def _share_with_adam(self) -> None:
        assert self.adam_optimizer is not None
        defaults = self.adam_optimizer.defaults
        for group in self._adam_groups():
            for key, value in defaults.items():
                group.setdefault(key, value)
        self.adam_optimizer.param_groups = self._adam_groups()
        self.adam_optimizer.state = self.state


def _steps_as_tensors(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """torch's Adam counts steps in 0-dim fp32 tensors, on the CPU unless it is capturable or fused."""
    for group in groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if "step" in state and not torch.is_tensor(state["step"]):
                on_device = group.get("capturable") or group.get("fused")
                device = param.device if on_device else torch.device("cpu")
                state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device=device)
