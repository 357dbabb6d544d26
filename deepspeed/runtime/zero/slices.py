"""One update of one large leaf, a slice at a time, so that the cast copy of its gradient fits a small scratch.

Owns: how a base optimizer is shown a slice of a leaf and of the leaf's states as if it were a parameter. Does not own:
when that is needed (``stepper.py``). Only for optimizers whose update of an element looks at that element alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def can_slice(base: torch.optim.Optimizer, leaf: nn.Parameter) -> bool:
    """Whether the states of ``leaf`` exist (the optimizer makes them whole) and can be cut like the leaf."""
    if leaf not in base.state or not leaf.is_contiguous():
        return False
    state = base.state[leaf]
    return bool(state) and all(value.is_contiguous() for value in state.values() if _follows(value, leaf))


@torch.no_grad()
def step_in_slices(
    base: torch.optim.Optimizer, leaf: nn.Parameter, grad: torch.Tensor, scratch: torch.Tensor, scale: float
) -> None:
    """Update ``leaf`` by ``base`` from ``scale * grad``; no other parameter of ``base`` may have a gradient.

    grad: the shape of ``leaf``, contiguous, any float dtype; left as it is. scratch: 1D, dtype of ``leaf``,
    whole cache lines (as a workspace's are): kernels round the elements beyond their last full vector in another way,
    so that a slice may end within a vector only where the leaf does.
    """
    entry, place = _find(base, leaf)
    state = base.state.pop(leaf)
    whole = {key: value for key, value in state.items() if _follows(value, leaf)}
    flat, flat_grad, after = leaf.detach().view(-1), grad.reshape(-1), {}
    try:
        for start in range(0, leaf.numel(), scratch.numel()):
            numel = min(scratch.numel(), leaf.numel() - start)
            piece = nn.Parameter(flat.narrow(0, start, numel))
            piece.grad = scratch[:numel].copy_(flat_grad.narrow(0, start, numel)).mul_(scale)
            views = {key: value.view(-1).narrow(0, start, numel) for key, value in whole.items()}
            base.state[piece] = {key: views[key] if key in views else _own(value) for key, value in state.items()}
            entry["params"][place] = piece
            try:
                base.step()
            finally:
                after = base.state.pop(piece)
            for key, view in views.items():
                if after[key] is not view:  # an optimizer that replaces a state in place of writing to it
                    view.copy_(after[key])
    finally:
        entry["params"][place] = leaf
        base.state[leaf] = state
    state.update({key: value for key, value in after.items() if key not in whole})


def _follows(value: Any, leaf: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == leaf.shape


def _own(value: Any) -> Any:
    """A step count of its own: every slice begins at the same one."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _find(base: torch.optim.Optimizer, leaf: nn.Parameter) -> tuple[dict[str, Any], int]:
    for entry in base.param_groups:
        for place, param in enumerate(entry["params"]):
            if param is leaf:
                return entry, place
    raise KeyError("the leaf is in no group of the optimizer")
