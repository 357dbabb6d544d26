"""The boundary's one pass over a unit: read the gradient, unscale and clip it, update, round into the model's dtype.

Optimizers of ours with kernels (``ops/row_optimizer.py``) offer ``update_from(rows, scale)``: each element is read and
written once, with no cast gradients and no second pass over the masters. Everything else goes through ``base.step()``
(``stepper.py``); both ways give the same bits.

Owns: whether a base optimizer may be driven so, the rows of a unit, and the staging memory through which offloaded
units travel to the device. Does not own: the order of units, publishing.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.host_store import HostMemory

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stepper import Unit

# (leaf, its gradient in any float dtype, where the new value goes rounded)
Row = tuple[nn.Parameter, torch.Tensor, torch.Tensor | None]


class TakesRows(Protocol):
    """An optimizer that updates leaves from gradients that are not on them."""

    def takes_rows(self, rows: Sequence[Row]) -> bool: ...
    def update_from(self, rows: Sequence[Row], scale: float) -> None: ...


def rows_of(base: torch.optim.Optimizer) -> TakesRows | None:
    """``base`` if it may be driven by rows; None for one that cannot, or whose ``step`` was hooked or overridden."""
    hooked = base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks
    kind: Any = type(base)
    return base if _has_own_update(kind) and not hooked else None  # type: ignore[return-value]


@functools.cache
def _has_own_update(kind: type) -> bool:
    """Whether no class has changed ``step`` since ``update_from`` was defined to do the same.

    torch puts a wrapped ``step`` into the class of every optimizer that is made, so functions are compared unwrapped.
    """
    if not hasattr(kind, "update_from"):
        return False
    step = inspect.unwrap(kind.step)  # type: ignore[attr-defined]
    order = kind.__mro__
    steps = [i for i, cls in enumerate(order) if inspect.unwrap(cls.__dict__.get("step", object)) is step]
    return next(i for i, cls in enumerate(order) if "update_from" in cls.__dict__) <= max(steps)


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Copies of the hyper-parameters of a parameter group.

    A rate may be a tensor, which schedulers write into: what they write is not for an update that has begun.
    """
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for key, value in group.items()
        if key != "params"
    }


class FusedUpdate:
    """Updates units by rows where that is possible."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self._stages: dict[int, _Stages] = {}  # of each host memory's groups

    def update(self, unit: Unit, touched: bytes, scale: float) -> bool:
        """Update ``unit`` and put the new values into the model; False: not possible, nothing was done."""
        driven = rows_of(self.base)
        if driven is None:
            return False
        group = unit.group
        staged = self._stage(unit) if group.offloaded and group.model_home is None else None
        rows: list[Row] = []
        for bound in unit.fragments:
            grad = group.grad_of(bound) if touched[bound.position] else None
            out: torch.Tensor | None = None if group.aliased else bound.model
            if staged is not None:
                out = unit.part(bound, staged)
            if grad is not None:
                rows.append((bound.leaf, grad, out))
            elif staged is not None and out is not None:
                out.copy_(bound.leaf.detach())
        if rows:
            if not driven.takes_rows(rows):
                return False
            driven.update_from(rows, scale)
        if staged is not None:
            send(unit, staged)
            self._stages[id(group.host)].sent()
        return True

    # ---- offloaded units -------------------------------------------------------------------------------------------

    def _stage(self, unit: Unit) -> torch.Tensor:
        """Host memory for the new values of ``unit`` in the model's dtype, laid out as its masters are.  # 1D"""
        host = unit.group.host
        assert host is not None
        stages = self._stages.setdefault(id(host), _Stages(host))
        staged = stages.take(unit.numel, unit.group.dtype, unit.group.device)
        if sum(bound.fragment.numel for bound in unit.fragments) < unit.numel:
            staged.zero_()  # padding
        return staged


def send(unit: Unit, staged: torch.Tensor) -> None:
    """Start to copy the new values of ``unit``, in host memory and the model's dtype, into the model."""
    group = unit.group
    if group.sharded:
        for segment in unit.segments:
            piece = staged.narrow(0, segment.shard_start - unit.shard_start, segment.piece_numel)
            group.model_piece(segment).copy_(piece, non_blocking=True)
    else:
        for bound in unit.fragments:
            bound.model.copy_(unit.part(bound, staged), non_blocking=True)


class _Stages:
    """Two buffers of locked host memory in turn: one is filled while the other travels."""

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._events: list[Any] = [None, None]
        self._turn = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The buffer whose turn it is, once what was in it has arrived.  # 1D, uninitialised"""
        event, self._events[self._turn] = self._events[self._turn], None
        if event is not None:
            event.synchronize()
        nbytes = numel * dtype.itemsize
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[self._turn] = self._host.zeros(nbytes, torch.uint8, device)
        return buffer.narrow(0, 0, nbytes).view(dtype)

    def sent(self) -> None:
        """The copies out of the buffer are on their way."""
        accelerator = get_accelerator()
        if not accelerator.is_synchronized_device():
            event = accelerator.Event()
            event.record()
            self._events[self._turn] = event
        self._turn = 1 - self._turn
