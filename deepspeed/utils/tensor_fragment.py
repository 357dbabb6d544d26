"""Reading and writing fp32 weights, gradients and optimizer state of a parameter, wherever its shards are.

``full`` functions are collective: every rank of the data-parallel group calls them with the same parameter, in the same
order, and gets (or gives) the whole tensor. ``local`` functions touch only this rank's elements. All of them work at
every stage; a parameter without an owner (frozen, or not under an engine) gives None, and a write to it is an error.

Gradients are the true ones: averaged over ranks, loss scale undone. Reading or writing them finishes the reductions of
the current window, so do it between the last backward of a window and ``engine.step()``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepspeed.checkpoint.constants import ZENFLOW_TENSORS
from deepspeed.comm import collectives

if TYPE_CHECKING:
    from deepspeed.runtime.zero.optimizer import ZeroOptimizer
    from deepspeed.runtime.zero.shard_group import BoundFragment, ShardGroup


@dataclass
class fragment_address:
    """``numel`` elements from ``start``. The class path stands in checkpoint files."""

    numel: int
    start: int


Pick = Callable[["BoundFragment"], "torch.Tensor | None"]


def _owner(param: nn.Parameter) -> ZeroOptimizer | None:
    reference = getattr(param, "_ds_zero_owner", None)
    owner: ZeroOptimizer | None = reference() if reference is not None else None
    if owner is not None:
        owner.hold_still()
    return owner


def _must_own(param: nn.Parameter, call: str) -> ZeroOptimizer:
    owner = _owner(param)
    if owner is None:
        raise ValueError(
            f"{call}: this parameter of shape {tuple(param.shape)} belongs to no engine (frozen, destroyed, "
            "or not passed to deepspeed.initialize); write to the parameter itself"
        )
    return owner


def _locate(param: nn.Parameter) -> tuple[ZeroOptimizer, ShardGroup, list[BoundFragment]] | None:
    owner = _owner(param)
    if owner is None:
        return None
    group, position = owner.find(param)
    group.absorb_edits(position)
    return owner, group, owner.bound_to(param)


# ---- whole tensors -------------------------------------------------------------------------------------------------


@torch.no_grad()
def _assemble(param: nn.Parameter, pick: Pick, *, call: str = "", key: str | None = None) -> torch.Tensor | None:
    """The whole tensor in fp32 from every rank's fragments, in ``param``'s shape; None when no rank has any.

    Raises ValueError where it is the optimizer state ``key``, and states there are, but none of that name.
    """
    found = _locate(param)
    if found is None:
        return None
    owner, group, fragments = found
    # Behind the elements: whether a rank has some; has states of the parameter; knows the name, of any parameter.
    flat = torch.zeros(param.numel() + 3, dtype=torch.float32, device=param.device)
    for bound in fragments:
        value = pick(bound)
        if value is not None:
            start = bound.fragment.param_start
            flat[start : start + bound.fragment.numel] = value.reshape(-1).float()
            flat[-3] = 1.0
        elif key is not None and owner.optimizer.state.get(bound.leaf):
            flat[-2] = 1.0
    if key is not None and (key in _state_names(owner) or key in ZENFLOW_TENSORS):  # there for parts of a window
        flat[-1] = 1.0
    if group.sharded:
        # Every element has one owner, so the sum is a gather that needs no sizes exchanged.
        collectives.all_reduce(flat, owner.shards.group, op="sum", what=f"whole tensor of {_name(owner, param)}").wait()
    found_some, has_others, known = flat[-3:].tolist()
    if key is not None and has_others and not known:  # on all ranks alike, also on those that own none of it
        raise ValueError(f"{call}: {_unknown_state(owner, param, key)}")
    return flat[:-3].view(param.shape) if found_some else None


@torch.no_grad()
def _scatter(param: nn.Parameter, value: torch.Tensor, call: str, pick: Pick, key: str | None = None) -> None:
    """Write the whole tensor ``value`` into this rank's fragments."""
    owner = _must_own(param, call)
    _check_numel(owner, param, value, call)
    flat = value.detach().reshape(-1)
    for bound in owner.bound_to(param):
        target = pick(bound)
        if target is None:
            raise _nothing_to_set(owner, param, bound, call, key)
        start = bound.fragment.param_start
        target.copy_(flat[start : start + bound.fragment.numel].view(target.shape))


def _check_numel(owner: ZeroOptimizer, param: nn.Parameter, value: torch.Tensor, call: str) -> None:
    if value.numel() != param.numel():
        raise ValueError(
            f"{call}: parameter {_name(owner, param)} has shape {tuple(param.shape)}, the value {tuple(value.shape)}"
        )


def _name(owner: ZeroOptimizer, param: nn.Parameter) -> str:
    return repr(owner.names.get(id(param), "?"))


def _master(bound: BoundFragment) -> torch.Tensor:
    return bound.leaf.detach()


def _state(owner: ZeroOptimizer, key: str) -> Pick:
    def pick(bound: BoundFragment) -> torch.Tensor | None:
        value = owner.optimizer.state.get(bound.leaf, {}).get(key)
        return value if isinstance(value, torch.Tensor) else None  # a step count may be a number

    return pick


def _state_names(owner: ZeroOptimizer) -> set[str]:
    """Names of all states on this rank that are tensors, or None: known and unused (SGD without momentum)."""
    states = owner.optimizer.state.values()
    return {name for state in states for name, value in state.items() if isinstance(value, (torch.Tensor, type(None)))}


def _lacks(owner: ZeroOptimizer, bound: BoundFragment, key: str) -> bool:
    """Whether this fragment has states and no parameter can have one of this name, as far as this rank can tell:
    groups may differ in their states (Muon beside Adam), so each has to have some here."""
    states = owner.optimizer.state
    if not states.get(bound.leaf) or key in _state_names(owner):
        return False
    return all(any(states.get(leaf) for leaf in group["params"]) for group in owner.optimizer.param_groups)


def _unknown_state(owner: ZeroOptimizer, param: nn.Parameter, key: object) -> str:
    names = ", ".join(sorted(map(str, _state_names(owner)))) or "none on this rank"
    base = type(owner.optimizer).__name__
    return f"parameter {_name(owner, param)} has no optimizer state tensor {key!r}; {base} keeps: {names}"


def _nothing_to_set(
    owner: ZeroOptimizer, param: nn.Parameter, bound: BoundFragment, call: str, key: str | None
) -> ValueError:
    if key is not None and _lacks(owner, bound, key):
        return ValueError(f"{call}: {_unknown_state(owner, param, key)}")
    return ValueError(f"{call}: parameter {_name(owner, param)} has no such tensor yet (before the first step?)")


def _gradient(owner: ZeroOptimizer, param: nn.Parameter) -> Pick:
    owner.reduce_now()
    group, _ = owner.find(param)
    return group.grad_of


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The master weights of ``param``, whole, fp32, in its shape. Collective."""
    return _assemble(param, _master)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the master weights of ``param``; its own weights follow on this rank at once. Same ``value`` on all ranks."""
    owner = _must_own(param, "safe_set_full_fp32_param")
    _check_numel(owner, param, value, "safe_set_full_fp32_param")
    group, position = owner.find(param)
    # First the weights, which may be rounded and which the masters follow, then the masters as given.
    with torch.no_grad():
        param.detach().copy_(value.view(param.shape))
    group.absorb_edits(position)
    group.versions[position] = param._version
    _scatter(param, value, "safe_set_full_fp32_param", _master)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """State ``optim_state_key`` (``exp_avg``, ``momentum_buffer`` ...) of ``param``, whole, fp32; None before the first
    step. Collective. Raises ValueError, on all ranks, for a name that the optimizer's states have not."""
    owner = _owner(param)
    if owner is None:
        return None
    call = "safe_get_full_optimizer_state"
    return _assemble(param, _state(owner, optim_state_key), call=call, key=optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set one optimizer state of ``param``. Same ``value`` on all ranks; ValueError before the state exists."""
    owner = _must_own(param, "safe_set_full_optimizer_state")
    call = f"safe_set_full_optimizer_state({optim_state_key!r})"
    _scatter(param, value, call, _state(owner, optim_state_key), optim_state_key)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient of ``param``, averaged over ranks, unscaled, whole, fp32; None when there is none. Collective."""
    owner = _owner(param)
    if owner is None:
        return param.grad
    grad = _assemble(param, _gradient(owner, param))
    return grad if grad is None else grad * owner.unscale()


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient of ``param``: norm, clipping and step use ``value``, the same on every rank. Collective."""
    owner = _must_own(param, "safe_set_full_grad")
    pick = _gradient(owner, param)
    owner.expect_gradient(param)
    _scatter(param, value / owner.unscale(), "safe_set_full_grad", pick)


def safe_update_full_grad_vectorized(
    param_list: list[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """``grad = update_func(grad, param)`` for every parameter that has one. Collective."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


# ---- this rank's elements ------------------------------------------------------------------------------------------


def _local(param: nn.Parameter, pick: Pick) -> torch.Tensor | None:
    found = _locate(param)
    if found is None:
        return None
    parts = [value.reshape(-1) for bound in found[2] if (value := pick(bound)) is not None]
    if not parts:
        return torch.empty(0, device=param.device) if not found[2] else None
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.no_grad()
def _set_local(param: nn.Parameter, value: torch.Tensor, call: str, pick: Pick, key: str | None = None) -> None:
    owner = _must_own(param, call)
    fragments = owner.bound_to(param)
    held = sum(bound.fragment.numel for bound in fragments)
    if value.numel() != held:
        raise ValueError(
            f"{call}: this rank owns {held} elements of parameter {_name(owner, param)}; the value has {value.numel()}"
        )
    flat, offset = value.detach().reshape(-1), 0
    for bound in fragments:
        target = pick(bound)
        if target is None:
            raise _nothing_to_set(owner, param, bound, call, key)
        target.copy_(flat[offset : offset + bound.fragment.numel].view(target.shape))
        offset += bound.fragment.numel


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's elements of the master weights.  # 1D, may be empty"""
    return _local(param, _master)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's elements of the master; the weights follow on all ranks. Collective (all ranks set theirs)."""
    owner = _must_own(param, "safe_set_local_fp32_param")
    owner.absorb_edits()  # of other parameters: publishing writes the masters of all of them into the weights
    _set_local(param, value, "safe_set_local_fp32_param", _master)
    owner.publish_masters()


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's elements of one optimizer state; ValueError for a name it has not.  # 1D, may be empty"""
    owner = _owner(param)
    if owner is None:
        return None
    if any(_lacks(owner, bound, optim_state_key) for bound in owner.bound_to(param)):
        raise ValueError(f"safe_get_local_optimizer_state: {_unknown_state(owner, param, optim_state_key)}")
    return _local(param, _state(owner, optim_state_key))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    owner = _must_own(param, "safe_set_local_optimizer_state")
    call = f"safe_set_local_optimizer_state({optim_state_key!r})"
    _set_local(param, value, call, _state(owner, optim_state_key), optim_state_key)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's elements of the averaged, unscaled gradient. Finishes the window's reductions (collective)."""
    owner = _owner(param)
    if owner is None:
        return param.grad
    grad = _local(param, _gradient(owner, param))
    return grad if grad is None else grad.float() * owner.unscale()


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's elements of the gradient. Finishes the window's reductions (collective)."""
    owner = _must_own(param, "safe_set_local_grad")
    pick = _gradient(owner, param)
    owner.expect_gradient(param)
    _set_local(param, value / owner.unscale(), "safe_set_local_grad", pick)


# ---- historical names ----------------------------------------------------------------------------------------------


def get_full_hp_param(self: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
    return (
        safe_get_full_fp32_param(self)
        if optim_state_key is None
        else safe_get_full_optimizer_state(self, optim_state_key)
    )


def set_full_hp_param(self: nn.Parameter, value: torch.Tensor, optim_state_key: str | None = None) -> None:
    if optim_state_key is None:
        safe_set_full_fp32_param(self, value)
    else:
        safe_set_full_optimizer_state(self, value, optim_state_key)


def get_full_hp_grad(self: nn.Parameter) -> torch.Tensor | None:
    return safe_get_full_grad(self)


def set_full_hp_grad(self: nn.Parameter, value: torch.Tensor) -> None:
    safe_set_full_grad(self, value)
