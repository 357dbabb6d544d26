"""The historical names around loading one parameter from a universal folder, and the class its files may name.

``engine.load_checkpoint`` does not need them: it plans and checks a whole folder (``universal/reader.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import trusted
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.universal.patterns import SubparamShape, cut
from deepspeed.ops.optimizer_base import StateOptimizer
from deepspeed.utils.tensor_fragment import _must_own, _name

if TYPE_CHECKING:
    from deepspeed.runtime.zero.shard_group import BoundFragment

__all__ = ["SubparamShape", "enable_universal_checkpoint", "load_hp_checkpoint_state"]


def enable_universal_checkpoint(param_list: Iterable[nn.Parameter]) -> None:
    """Give every parameter the method :func:`load_hp_checkpoint_state`."""
    for param in param_list:
        param.load_hp_checkpoint_state = MethodType(load_hp_checkpoint_state, param)  # type: ignore[attr-defined]


@torch.no_grad()
def load_hp_checkpoint_state(
    self: nn.Parameter, folder: str, tp_rank: int, tp_world_size: int, ep_rank: int = 0, ep_size: int = 1
) -> float | None:
    """Copy this rank's elements of a parameter's master and states from its ``folder`` (``<universal>/zero/<name>``).

    Returns the step count in the folder, None without one. The weights are not renewed: that is
    ``optimizer.publish_masters()``, once, after all parameters. Raises ValueError for a parameter without an engine,
    CheckpointError for a missing master, a folder of other shapes, or experts that are spread over ranks.
    """
    owner = _must_own(self, "load_hp_checkpoint_state")
    step: float | None = None
    trusted.load_file(Path(folder) / f"{keys.FP32_WEIGHT_KEY}.pt")  # its absence is an error that names it
    for path in sorted(Path(folder).glob("*.pt")):
        entry: Any = trusted.load_file(path)
        if not isinstance(entry, dict):
            entry = {keys.PARAM: entry}
        if entry.get(keys.EP_IS_EXPERT_PARAM) and ep_size > 1:
            raise CheckpointError(f"{path} holds experts, which cannot be spread over {ep_size} ranks here")
        value = entry[keys.PARAM]
        if value.dim() == 0 and path.stem == "step":
            step = float(value)
        if value.numel() == self.numel() and value.dim() <= 1:
            value = value.reshape(self.shape)
        elif value.dim():
            value = cut(_name(owner, self), entry, self.shape, tp_rank, tp_world_size)
        for bound in owner.bound_to(self):
            _put(owner.optimizer, bound, path.stem, value)
            owner.settle_states([bound])
    return step


def _put(base: torch.optim.Optimizer, bound: BoundFragment, key: str, value: torch.Tensor) -> None:
    leaf, part = bound.leaf, bound.fragment
    if key == "step" and value.dim() == 0:
        base.state[leaf][key] = int(value) if isinstance(base, StateOptimizer) else value.clone()
        return
    own = value.reshape(-1)[part.param_start : part.param_start + part.numel].reshape(leaf.shape)
    if key == keys.FP32_WEIGHT_KEY:
        leaf.detach().copy_(own)
    else:
        base.state[leaf][key] = own.to(leaf.device, copy=True)
