"""The bases of every optimizer the engine hands out: an ``isinstance`` contract for clients.

A :class:`DeepSpeedOptimizer` is a ``torch.optim.Optimizer``, so torch schedulers accept it; it owns no parameters of
its own and forwards ``param_groups``, ``state`` and ``defaults`` to the optimizer it wraps. Torch's constructor is
deliberately not run: it would register the parameters a second time.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """Marker base. ``optimizer`` is the wrapped torch optimizer; a subclass of a client may set it later."""

    optimizer: torch.optim.Optimizer

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        if optimizer is not None:
            self.optimizer = optimizer
        # What torch's constructor would have made, as far as its methods and the schedulers look at it.
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_state_dict_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_state_dict_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_load_state_dict_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._zero_grad_profile_name = f"Optimizer.zero_grad#{type(optimizer).__name__}.zero_grad"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        return self.optimizer.state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or deep-copied: it holds process groups and shards. "
            "Use engine.save_checkpoint, or state_dict()."
        )


class ZeROOptimizer(DeepSpeedOptimizer):
    """Base of optimizers whose state, gradients or parameters may be sharded."""
