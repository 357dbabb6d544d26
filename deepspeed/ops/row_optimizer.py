"""Optimizers whose update of an element looks at that element alone, run by a kernel over all tensors at once.

Owns: `RowOptimizer`: which tensors go to which kernel, their states and step counts, `update_from`. Does not own: the
arithmetic (`native/csrc/update_rules.h` for host memory, `multi_tensor_triton.py` for GPUs; `_update_pairs` of each
class in torch, which is both the reference and the fallback), hyper-parameters, the kernels' tables
(`native_kernels.py`, `multi_tensor.py`).
Invariants: the kernel of a device and torch on a CPU give the same bits in fp32. All tensors a kernel can take are
updated in one parallel region or one launch, over all groups. What none can take (fp64, strided, sparse, other devices,
subclasses of tensors) goes to torch, in the same step. A tensor written by a kernel gets a new autograd version, as if
torch had written it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, ClassVar

import torch

from deepspeed.native.build import NativeUnavailable
from deepspeed.ops import multi_tensor, native_kernels
from deepspeed.ops.multi_tensor import DeviceTable
from deepspeed.ops.native_kernels import KINDS
from deepspeed.ops.optimizer_base import Pair, StateOptimizer, run_closure
from deepspeed.utils.logging import warning_once

__all__ = ["Row", "RowOptimizer"]

_Table = native_kernels.Table | DeviceTable
# (leaf, its gradient in fp32, bf16 or fp16, where the new value goes rounded)
Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class RowOptimizer(StateOptimizer):
    """Base of the optimizers with a native kernel; subclasses say what the rule is."""

    # Name of the op in the registry.
    _op: ClassVar[str]
    # The kernel for host memory: None before the first use, False where there is none.
    _native: Any = None
    # Whether the kernels for GPUs are used, None before the first use; tables of earlier steps.
    _on_device: bool | None = None
    _cache: multi_tensor.Cache | None = None
    _places: _Places | None = None

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the states, in the order of the kernel's row."""
        raise NotImplementedError

    def _rule(self, group: dict[str, Any], step: int) -> tuple[float, ...]:
        """The kernel's eight numbers for parameters of this group at this step."""
        raise NotImplementedError

    def _update_pairs(self, group: dict[str, Any], pairs: Iterable[Pair]) -> None:
        """The update in torch of parameters of this group from the gradients beside them."""
        raise NotImplementedError

    def state_names(self) -> tuple[str, ...]:
        """Names of the states that a parameter has, of the group that has most."""
        return max((self._state_keys(group) for group in self.param_groups), key=len, default=())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update from the parameters' `grad`; returns the loss of `closure`."""
        with torch.no_grad():
            loss = run_closure(closure)
            self._update_all()
        return loss

    # ---- the boundary of ZeRO --------------------------------------------------------------------------------------

    def takes_rows(self, rows: Sequence[Row]) -> bool:
        """Whether one kernel can do all of `rows` (see `update_from`) as they are."""
        table = _Tables(self).of(rows[0][0]) if rows else None
        if table is None or not _readable_rows(table, *_columns(rows)):
            return False
        if len({tensor.get_device() for row in rows for tensor in row if tensor is not None}) > 1:
            return False
        states = [self.state.get(row[0]) for row in rows]
        if not all(self.state_dtype(row[0]) in KINDS for row, state in zip(rows, states, strict=True) if not state):
            return False
        return table.readable([value for state in states if state for key, value in state.items() if key != "step"])

    @torch.no_grad()
    def update_from(self, rows: Sequence[Row], scale: float | torch.Tensor) -> None:
        """Update leaves from gradients that lie elsewhere, and put the new values, rounded to nearest even, elsewhere.

        rows: (leaf, grad, out). leaf: a parameter of this optimizer, at most once. grad: fp32, bf16 or fp16, as many
        elements as the leaf and in its order, any shape; left as it is. out: None, or a contiguous tensor of as many
        elements. scale: factor of the gradients, applied in fp32; may be a 0-dim tensor on the leaves' device.

        The result equals `leaf.grad = grad.float() * scale`, `step()`, `out.copy_(leaf)` to the last bit; one pass
        over memory and one parallel region where `takes_rows(rows)`.

        Raises:
            KeyError: a leaf is in no group of this optimizer.
        """
        tables = _Tables(self)
        for number, group_rows in self._by_group(rows).items():
            group, columns = self.param_groups[number], _columns(group_rows)
            others = group_rows
            table = tables.of(columns[0][0])
            if table is not None and _readable_rows(table, *columns):
                left = {id(leaf) for leaf, _ in self._add(table, group, *columns)}
                others = [row for row in group_rows if id(row[0]) in left] if left else ()
            for leaf, grad, out in others:
                scaled = grad.reshape(leaf.shape).to(torch.float32, copy=True).mul_(scale)
                self._update_pairs(group, [(leaf, scaled)])
                if out is not None:
                    out.view(-1).copy_(leaf.reshape(-1))
        tables.run(scale)

    def _by_group(self, rows: Sequence[Row]) -> dict[int, Sequence[Row]]:
        """The rows of each group, by the group's number."""
        places = self._places
        if places is None or not places.describe(self.param_groups):
            places = self._places = _Places(self.param_groups)
        numbers = [places.number.get(id(row[0])) for row in rows]
        if None in numbers:  # an element of a group's list may have been replaced since
            places = self._places = _Places(self.param_groups)
            numbers = [places.number.get(id(row[0])) for row in rows]
        if None in numbers:
            raise KeyError(
                f"{type(self).__name__}.update_from: a leaf of shape {tuple(rows[numbers.index(None)][0].shape)} is in "
                "no parameter group; add it with add_param_group"
            )
        distinct = set(numbers)
        if len(distinct) == 1:
            return {distinct.pop(): rows}  # type: ignore[dict-item]
        found: dict[int, Sequence[Row]] = {}
        for number, row in zip(numbers, rows, strict=True):
            found.setdefault(number, []).append(row)  # type: ignore[arg-type, attr-defined]
        return found

    # ---- all parameters --------------------------------------------------------------------------------------------

    def _kernel(self) -> Any:
        """The kernel for host memory, or None; the first time there is none, one line says why."""
        if self._native is None:
            try:
                self._native = native_kernels.kernel(self._op)
            except NativeUnavailable as problem:
                self._native = False
                warning_once(f"{type(self).__name__} uses torch's kernels: {problem}")
        return self._native or None

    def _update_all(self) -> None:
        tables = _Tables(self)
        for group in self.param_groups:
            params: list[torch.Tensor] = group["params"]
            grads: list[Any] = [param.grad for param in params]
            given = [grad is not None for grad in grads]
            if False in given:
                params, grads = list(compress(params, given)), list(compress(grads, given))
            if not params:
                continue
            others = self._add_readable(tables.of(params[0]), group, params, grads)
            if others and len({param.is_cpu for param, _ in others} | {params[0].is_cpu}) > 1:
                # A group with tensors in host memory and on a device.
                apart = [pair for pair in others if pair[0].is_cpu != params[0].is_cpu]
                others = [pair for pair in others if pair[0].is_cpu == params[0].is_cpu]
                moved, moved_grads = (list(column) for column in zip(*apart, strict=True))
                others += self._add_readable(tables.of(moved[0]), group, moved, moved_grads)
            if others:
                self._update_pairs(group, others)
        tables.run(1.0)

    def _add_readable(
        self, table: _Table | None, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor]
    ) -> list[Pair]:
        """Put what the table can take into it; returns the rest."""
        if table is not None and table.readable(params) and table.readable(grads):
            return self._add(table, group, params, grads, None)
        pairs = list(zip(params, grads, strict=True))
        if table is None:
            return pairs
        readable = [table.readable(pair) for pair in pairs]
        others = [pair for pair, good in zip(pairs, readable, strict=True) if not good]
        return others + self._add(table, group, list(compress(params, readable)), list(compress(grads, readable)), None)

    def _add(
        self,
        table: _Table,
        group: dict[str, Any],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        outs: list[torch.Tensor | None] | None,
    ) -> list[Pair]:
        """Put readable tensors of a group into the table; returns those whose states the kernel cannot take."""
        if not params:
            return []
        found = self._states_of(params)
        keys = self._state_keys(group)
        if not table.takes(len(keys)):
            return list(zip(params, grads, strict=True))
        if not all(found):
            for param, state in zip(params, found, strict=True):
                if not state:
                    self.check_param(param)
                    state["step"] = 0
                    for key in keys:
                        state[key] = self.new_state(param)
        columns = [[state[key] for state in found] for key in keys]
        others: list[Pair] = []
        if not all(map(table.readable, columns)):
            readable = list(map(table.readable, zip(*columns, strict=True)))
            others = [pair for pair, good in zip(zip(params, grads, strict=True), readable, strict=True) if not good]
            params, grads = (list(compress(column, readable)) for column in (params, grads))
            found = list(compress(found, readable))
            outs = None if outs is None else list(compress(outs, readable))
            columns = [list(compress(column, readable)) for column in columns]
        steps = [state["step"] for state in found]
        rules = {step: table.add_rule(self._rule(group, int(step) + 1)) for step in set(steps)}
        of_rows = [rules[step] for step in steps] if len(rules) > 1 else [rules[steps[0]]] * len(steps)
        table.extend(params, grads, columns, outs, of_rows)
        for state, step in zip(found, steps, strict=True):
            state["step"] = int(step) + 1
        return others

    def _states_of(self, params: list[torch.Tensor]) -> list[dict[str, Any]]:
        """The states of these parameters, by what they are and not by their hash where the order is the same."""
        states = self.state
        if len(params) == len(states) and all(map(operator.is_, params, states)):
            return list(states.values())
        return [states[param] for param in params]


class _Tables:
    """The tables of one update: one for host memory, one for GPUs, each made when a tensor asks for it."""

    def __init__(self, optimizer: RowOptimizer) -> None:
        self._optimizer = optimizer
        self._host: native_kernels.Table | None = None
        self._device: DeviceTable | None = None

    def of(self, tensor: torch.Tensor) -> _Table | None:
        """The table for tensors where this one is; None: there is no kernel."""
        optimizer = self._optimizer
        if self._device is None and (not tensor.is_cpu or optimizer._on_device):
            if optimizer._on_device is None:
                optimizer._on_device = multi_tensor.usable(optimizer._op, tensor.device.type)
            if optimizer._on_device:
                optimizer._cache = optimizer._cache or multi_tensor.Cache()
                self._device = DeviceTable(optimizer._op, optimizer._cache)
        if self._device is not None and self._device.readable([tensor]):
            return self._device
        if tensor.is_cpu and self._host is None and optimizer._kernel() is not None:
            self._host = native_kernels.Table()
        return self._host if tensor.is_cpu else None

    def run(self, scale: float | torch.Tensor) -> None:
        """Update what is in the tables."""
        if self._host is not None:
            self._host.run(self._optimizer._kernel(), float(scale))
        if self._device is not None:
            self._device.run(scale)


class _Places:
    """The number of each leaf's group; made anew when the groups or their lists are others or have grown."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.lists = [group["params"] for group in groups]
        self.lengths = [len(params) for params in self.lists]
        self.number: dict[int, int | None] = {
            id(param): number for number, params in enumerate(self.lists) for param in params
        }

    def describe(self, groups: list[dict[str, Any]]) -> bool:
        lists = [group["params"] for group in groups]
        return (
            len(lists) == len(self.lists)
            and all(map(operator.is_, lists, self.lists))
            and [len(params) for params in lists] == self.lengths
        )


def _columns(
    rows: Sequence[Row],
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor | None]]:
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def _readable_rows(
    table: _Table, leaves: list[torch.Tensor], grads: list[torch.Tensor], outs: list[torch.Tensor | None]
) -> bool:
    given = [(out, leaf) for out, leaf in zip(outs, leaves, strict=True) if out is not None]
    return (
        table.readable(leaves)
        and table.readable(grads)
        and table.readable([out for out, _ in given])
        and [leaf.numel() for leaf in leaves] == [grad.numel() for grad in grads]
        and all(out.numel() == leaf.numel() for out, leaf in given)
    )
