"""What all learning rate schedules share: position, the writing of rates, state, values per group.

Owns: `Schedule`. Does not own: any formula (`lr_schedules.py`).
Invariant: the rates in `optimizer.param_groups` are those that `get_lr()` and `get_last_lr()` report, from the moment a
schedule is made.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from deepspeed.utils.logging import log_dist

PerGroup = float | Sequence[float]


def get_torch_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer itself, or the one in the `optimizer` attribute of a wrapper.

    Raises:
        TypeError: neither.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return inner
    raise TypeError(f"a schedule needs a torch.optim.Optimizer or a wrapper of one; found {type(optimizer).__name__}")


def update_lr(param_groups: Sequence[dict[str, Any]], lrs: Sequence[float]) -> list[float]:
    """Write one rate into each group (in place where a group holds its rate as a tensor); returns the rates."""
    for group, lr in zip(param_groups, lrs, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    return [float(group["lr"]) for group in param_groups]


class Schedule:
    """Position, writing of rates, state; subclasses say what the rates are.

    `state_dict()` is {"last_batch_iteration": int}: rates follow from it and from the arguments.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self.base_lrs: list[float] = []
        self._last_lr: list[float] = []
        self._apply()

    def _bind(self) -> None:
        """Work out the per-group values from the arguments; called when the number of groups has changed."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """The rate of each group at the current position."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rate of each group that is in force."""
        return list(self._last_lr)

    def _advance(self, position: int | None) -> None:
        self.last_batch_iteration = self.last_batch_iteration + 1 if position is None else int(position)
        self._apply()

    def _apply(self) -> None:
        groups = self.optimizer.param_groups
        if len(groups) != len(self.base_lrs):
            # Groups that are known keep their rate: `lr` is a scheduled one by now.
            joined = groups[len(self.base_lrs) :]
            own = [float(group.setdefault("initial_lr", float(group["lr"]))) for group in joined]
            self.base_lrs = self.base_lrs[: len(groups)] + own
            self._bind()
        self._last_lr = update_lr(groups, self.get_lr())

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Take over a position and write its rates into the groups."""
        self.last_batch_iteration = int(sd["last_batch_iteration"])
        self._apply()

    def _spread(self, name: str, value: PerGroup | None) -> list[float]:
        """One number per group from a number, a list, or (None) the groups' own rates."""
        if value is None:
            return list(self.base_lrs)
        count = len(self.base_lrs)
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(value) != count:
                raise ValueError(
                    f"{name}: expected {count} values, one per parameter group, or a single number; "
                    f"got {len(value)}: {list(value)}"
                )
            return [float(v) for v in value]
        if name.endswith(("max_lr", "range_test_min_lr")) and len(set(self.base_lrs)) > 1:
            warn(
                f"{type(self).__name__}: {name} is the one number {value}, so all {count} parameter groups get the "
                f"same rates although their own differ ({self.base_lrs}); give a list to keep them apart"
            )
        return [float(value)] * count


def positive_int(name: str, value: Any) -> int:
    """An integer above 0; 1e3 counts as 1000.

    Raises:
        ValueError: anything else.
    """
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer()
    if not whole or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)


def warn(message: str) -> None:
    """One line, on rank 0."""
    log_dist(message, ranks=[0], level=logging.WARNING)
