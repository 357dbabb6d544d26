"""What a reducer of gradients is asked for, and the one of a single rank, which sends nothing.

The reducer of several ranks is ``reduce.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from deepspeed.runtime.zero.shard_group import ShardGroup


class Reducer(Protocol):
    """What hooks, stepper and optimizer may ask of ``reduce.GradReducer`` (several ranks) and :class:`LocalGrads`."""

    groups: list[ShardGroup]
    process_group: Any
    world: int
    replicas: int
    touched: list[bytearray]
    active: bool
    held_back: bool
    launched: int
    on_landed: Callable[[ShardGroup, int], None]

    def begin_backward(self, *, reduce: bool) -> None: ...
    def grad_ready(self, group_number: int, position: int) -> None: ...
    def end_backward(self) -> None: ...
    def send_complete(self, spare: list[torch.Tensor]) -> None: ...
    def finish(self) -> None: ...
    def send_all(self) -> None: ...
    def left_overs(self) -> int: ...
    def wait(self) -> None: ...
    def reset(self) -> None: ...
    def rescale_feedback(self, factor: float) -> None: ...
    def forget_feedback(self) -> None: ...


class LocalGrads:
    """The reducer of one rank: gradients stay where autograd puts them, nothing is hooked, copied or sent.

    Hooks are needed only where gradients accumulate in another dtype than the parameter's, or in host memory.
    """

    def __init__(self, groups: Sequence[ShardGroup]) -> None:
        self.groups = list(groups)
        self.process_group: Any = None
        self.world = self.replicas = 1
        self.touched = [bytearray(len(group.params)) for group in self.groups]
        self.active = self.held_back = False
        self.launched = 0
        self.on_landed: Callable[[ShardGroup, int], None] = lambda group, position: None

    def begin_backward(self, *, reduce: bool) -> None:
        self.active = True

    def grad_ready(self, group_number: int, position: int) -> None:
        group = self.groups[group_number]
        if group.offloaded:
            group.grad_to_host(position)
            self.on_landed(group, position)
        elif group.accum_dtype != group.dtype:
            accumulate_locally(group, position)

    def end_backward(self) -> None:
        self.active = False

    def send_complete(self, spare: list[torch.Tensor]) -> None:
        return None

    def finish(self) -> None:
        for number, group in enumerate(self.groups):
            if group.offloaded:
                for position, param in enumerate(group.params):
                    if param.grad is not None:  # what no hook has seen: written by the user
                        self.grad_ready(number, position)
                group.grads_to_host()
            self.touched[number] = bytearray(
                param.grad is not None or held is not None
                for param, held in zip(group.params, group.accum, strict=True)
            )

    def send_all(self) -> None:
        return None

    def left_overs(self) -> int:
        return 0

    def wait(self) -> None:
        return None

    def reset(self) -> None:
        self.active = False

    def rescale_feedback(self, factor: float) -> None:
        return None

    def forget_feedback(self) -> None:
        return None


@torch.no_grad()
def accumulate_locally(group: ShardGroup, position: int) -> None:
    """Move a local gradient into its accumulation buffer (used when that has another dtype than the parameter)."""
    param = group.params[position]
    if param.grad is None:
        return
    held = group.accum[position]
    if held is None:
        group.accum[position] = param.grad.to(group.accum_dtype)
    else:
        held.add_(param.grad)
    param.grad = None
