"""``param._hp_mapping`` and ``param._index_in_param_group`` of stages 1 and 2: what this rank's optimizer holds of it.

Owns: the historical names. Does not own: any tensor; each call looks where the shards are at that moment
(``utils/tensor_fragment.py``). Invariant: keeps no parameter and no optimizer alive, and a copied or pickled parameter
has no link.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.utils import tensor_fragment as local
from deepspeed.utils.tensor_fragment import fragment_address

if TYPE_CHECKING:
    from deepspeed.runtime.zero.optimizer import ZeroOptimizer

__all__ = ["FragmentLink", "link_fragments", "unlink_fragments"]


class FragmentLink:
    """This rank's elements of one parameter, flat where they are only a part of it."""

    def __init__(self, param: nn.Parameter, owner: ZeroOptimizer) -> None:
        self._param = weakref.ref(param)
        self._owner = weakref.ref(owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def _held(self) -> nn.Parameter:
        param = self._param()
        if param is None:
            raise ReferenceError("_hp_mapping: the parameter no longer exists")
        return param

    def _shaped(self, value: torch.Tensor | None) -> torch.Tensor | None:
        param = self._held()
        return value.view(param.shape) if value is not None and value.numel() == param.numel() else value

    def get_lp_grad_fragment(self, index_in_param_group: int | None = None) -> torch.Tensor | None:
        """The averaged, unscaled gradient, in fp32 and in the parameter's shape if this rank holds all of it, else 1D.

        Finishes the window's reductions, as ``safe_get_local_grad`` does; None before backward. The index, which is
        ``param._index_in_param_group``, is accepted for older callers: the link knows its parameter.
        """
        return self._shaped(local.safe_get_local_grad(self._held()))

    def get_hp_fragment(self, optim_state_key: str | None = None) -> torch.Tensor | None:
        """The master weights, or one optimizer state.  # 1D"""
        if optim_state_key is None:
            return local.safe_get_local_fp32_param(self._held())
        return local.safe_get_local_optimizer_state(self._held(), optim_state_key)

    @property
    def hp_fragment(self) -> torch.Tensor | None:
        return self.get_hp_fragment()

    def get_optim_state_fragment(self, key: str) -> torch.Tensor:
        """One optimizer state.  # 1D; ValueError where there is none (yet)"""
        value = self.get_hp_fragment(key)
        if value is None:
            raise ValueError(f"{key} not found in optimizer state fragment: there are {self.get_optim_state_keys()}")
        return value

    def get_optim_state_keys(self) -> list[str]:
        """Names of the states that are tensors of this fragment's size."""
        owner = self._owner()
        bounds = owner.bound_to(self._held()) if owner is not None else []
        states = owner.optimizer.state.get(bounds[0].leaf, {}) if owner is not None and bounds else {}
        return [k for k, v in states.items() if isinstance(v, torch.Tensor) and v.numel() == bounds[0].leaf.numel()]

    def get_hp_fragment_address(self) -> fragment_address:
        """Where the (first) run of elements lies in this rank's shard of the group."""
        owner = self._owner()
        if owner is None:
            raise ReferenceError("_hp_mapping: the optimizer no longer exists")
        fragment = owner.bound_to(self._held())[0].fragment
        return fragment_address(numel=fragment.numel, start=fragment.shard_start)


def link_fragments(owner: ZeroOptimizer) -> None:
    """Give every parameter of ``owner`` its link, or None where other ranks hold all of it."""
    for group in owner.groups:
        held = {bound.position for bound in group.fragments}
        for position, param in enumerate(group.params):
            link = FragmentLink(param, owner) if position in held else None
            param._hp_mapping = link  # type: ignore[attr-defined]
            param._index_in_param_group = position  # type: ignore[attr-defined]


def unlink_fragments(param: nn.Parameter) -> None:
    """Take the names off again."""
    for name in ("_hp_mapping", "_index_in_param_group"):
        if hasattr(param, name):
            delattr(param, name)
