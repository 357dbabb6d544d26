"""Optimizers whose update of an element looks at that element alone, run by a native kernel over all tensors at once.

Owns: `RowOptimizer`: which tensors go to the kernel, their states and step counts, the table of rows, `update_from`.
Does not own: the arithmetic (`native/csrc/update_rules.h`; `_update_pairs` of each class in torch, which is both the
reference and the fallback), hyper-parameters.
Invariants: kernel and torch give the same bits in fp32. All tensors the kernel can take are updated in one parallel
region, over all groups. What it cannot take (fp64, strided, sparse, other devices, subclasses of tensors) goes to
torch, in the same step. A tensor written by the kernel gets a new autograd version, as if torch had written it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from deepspeed.native.build import NativeUnavailable
from deepspeed.ops import native_kernels
from deepspeed.ops.native_kernels import KINDS
from deepspeed.ops.optimizer_base import Pair, StateOptimizer, gradients, run_closure
from deepspeed.utils.logging import warning_once

__all__ = ["Row", "RowOptimizer"]

# (leaf, its gradient in fp32, bf16 or fp16, where the new value goes rounded)
Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
_PLAIN = (torch.Tensor, nn.Parameter)


class RowOptimizer(StateOptimizer):
    """Base of the optimizers with a native kernel; subclasses say what the rule is."""

    # Name of the op in the registry.
    _op: ClassVar[str]
    # The kernel: None before the first use, False where there is none.
    _native: Any = None

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the states, in the order of the kernel's row."""
        raise NotImplementedError

    def _rule(self, group: dict[str, Any], step: int) -> tuple[float, ...]:
        """The kernel's eight numbers for parameters of this group at this step."""
        raise NotImplementedError

    def _update_pairs(self, group: dict[str, Any], pairs: Iterable[Pair]) -> None:
        """The update in torch of parameters of this group from the gradients beside them."""
        raise NotImplementedError

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update from the parameters' `grad`; returns the loss of `closure`."""
        with torch.no_grad():
            loss = run_closure(closure)
            self._update_all()
        return loss

    # ---- the boundary of ZeRO --------------------------------------------------------------------------------------

    def takes_rows(self, rows: Sequence[Row]) -> bool:
        """Whether the native kernel can do all of `rows` (see `update_from`) as they are."""
        if self._kernel() is None:
            return False
        return all(
            _fits(leaf) and _fits(grad) and grad.numel() == leaf.numel()
            and (out is None or (_fits(out) and out.numel() == leaf.numel()))
            and self._state_fits(leaf)
            for leaf, grad, out in rows
        )  # fmt: skip

    @torch.no_grad()
    def update_from(self, rows: Sequence[Row], scale: float) -> None:
        """Update leaves from gradients that lie elsewhere, and put the new values, rounded to nearest even, elsewhere.

        rows: (leaf, grad, out). leaf: a parameter of this optimizer. grad: fp32, bf16 or fp16, as many elements as
        the leaf and in its order, any shape; left as it is. out: None, or a contiguous tensor of as many elements.
        scale: factor of the gradients, applied in fp32.

        The result equals `leaf.grad = grad.float() * scale`, `step()`, `out.copy_(leaf)` to the last bit; one pass
        over memory and one parallel region where `takes_rows(rows)`.

        Raises:
            KeyError: a leaf is in no group of this optimizer.
        """
        groups = self._groups_by_leaf(rows)
        kernel = self._kernel()
        if kernel is None or not self.takes_rows(rows):
            self._update_from_torch(rows, scale, groups)
            return
        table = _Table(self)
        for leaf, grad, out in rows:
            table.add(groups[id(leaf)], leaf, grad, out)
        table.run(kernel, scale)

    def _update_from_torch(self, rows: Sequence[Row], scale: float, groups: dict[int, dict[str, Any]]) -> None:
        for leaf, grad, out in rows:
            scaled = grad.reshape(leaf.shape).to(torch.float32, copy=True).mul_(scale)
            self._update_pairs(groups[id(leaf)], [(leaf, scaled)])
            if out is not None:
                out.view(-1).copy_(leaf.reshape(-1))

    def _groups_by_leaf(self, rows: Sequence[Row]) -> dict[int, dict[str, Any]]:
        found = {id(param): group for group in self.param_groups for param in group["params"]}
        missing = next((leaf for leaf, _, _ in rows if id(leaf) not in found), None)
        if missing is not None:
            raise KeyError(
                f"{type(self).__name__}.update_from: a leaf of shape {tuple(missing.shape)} is in no parameter group; "
                "add it with add_param_group"
            )
        return found

    def _state_fits(self, leaf: torch.Tensor) -> bool:
        if leaf not in self.state:
            return self.state_dtype(leaf) in KINDS
        return all(_fits(value) for key, value in self.state[leaf].items() if key != "step")

    # ---- all parameters --------------------------------------------------------------------------------------------

    def _kernel(self) -> Any:
        """The native kernel, or None; the first time there is none, one line says why."""
        if self._native is None:
            try:
                self._native = native_kernels.kernel(self._op)
            except NativeUnavailable as problem:
                self._native = False
                warning_once(f"{type(self).__name__} uses torch's kernels: {problem}")
        return self._native or None

    def _update_all(self) -> None:
        kernel = self._kernel()
        if kernel is None:
            for group in self.param_groups:
                self._update_pairs(group, gradients(group["params"]))
            return
        table = _Table(self)
        for group in self.param_groups:
            others: list[Pair] = []
            for param, grad in gradients(group["params"]):
                if _fits(param) and _fits(grad) and self._state_fits(param):
                    table.add(group, param, grad, None)
                else:
                    others.append((param, grad))
            if others:
                self._update_pairs(group, others)
        table.run(kernel, 1.0)


class _Table:
    """Rows of one call of the kernel, and the tensors they point into."""

    def __init__(self, optimizer: RowOptimizer) -> None:
        self.optimizer = optimizer
        self.rows: list[int] = []
        self.rules: list[float] = []
        self.written: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []
        self.numbers: dict[tuple[int, int], int] = {}  # (group, step) -> rule

    def add(self, group: dict[str, Any], leaf: torch.Tensor, grad: torch.Tensor, out: torch.Tensor | None) -> None:
        optimizer = self.optimizer
        state = optimizer.state[leaf]
        keys = optimizer._state_keys(group)
        if not state:
            optimizer.check_param(leaf)
            state["step"] = 0
            for key in keys:
                state[key] = optimizer.new_state(leaf)
        state["step"] = step = int(state["step"]) + 1
        rule = self.numbers.get((id(group), step))
        if rule is None:
            rule = self.numbers[(id(group), step)] = len(self.numbers)
            self.rules += optimizer._rule(group, step)
        kinds = KINDS[leaf.dtype] | KINDS[grad.dtype] << 4
        addresses = [leaf.data_ptr(), grad.data_ptr(), 0, 0, 0, 0]
        for place, key in enumerate(keys):
            value = state[key]
            addresses[2 + place] = value.data_ptr()
            kinds |= KINDS[value.dtype] << 8 + 4 * place
        if out is not None:
            addresses[5] = out.data_ptr()
            kinds |= KINDS[out.dtype] << 20
            self.written.append(out)
        self.rows += (*addresses, leaf.numel(), kinds, rule, 0)
        self.written.append(leaf)
        self.kept.append(grad)

    def run(self, kernel: Any, scale: float) -> None:
        if self.rows:
            native_kernels.run(kernel, self.rows, self.rules, scale)
            torch.autograd.graph.increment_version(self.written)


def _fits(tensor: torch.Tensor) -> bool:
    """Whether a kernel may walk the memory of this tensor."""
    return (
        type(tensor) in _PLAIN
        and tensor.dtype in KINDS
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )
