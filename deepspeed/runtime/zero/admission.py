"""What must hold before a model enters the ZeRO core: nobody else holds it, and nothing in it is beyond the core.

Said before the first step instead of in the middle of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from deepspeed.utils.logging import log_dist


def take_over(params: Iterable[nn.Parameter]) -> None:
    """Destroy every live optimizer of an earlier engine that still hooks or shards one of ``params``.

    Two of them would take each other's gradients. The earlier engine raises from then on. Collective where parameters
    are sharded.
    """
    owners = {}
    for param in params:
        reference = getattr(param, "_ds_zero_owner", None)
        owner = reference() if reference is not None else None
        if owner is not None:
            owners[id(owner)] = owner
    for owner in owners.values():
        sharding = owner.sharding
        owner.destroy()
        if sharding is not None:
            sharding.destroy()
    if owners:
        log_dist("the model still belonged to an earlier engine, which is given up now; engine.destroy() ends one", [0])


def refuse_unsuited(base: torch.optim.Optimizer, names: Mapping[int, str], *, sharded: bool) -> None:
    """Raise ValueError, the same on every rank, when ``base`` or a trainable parameter of its groups cannot work.

    ``names`` maps ``id(parameter)`` to its name. ``sharded``: optimizer state is cut over several ranks.
    """
    kind = type(base).__name__
    closure = inspect.signature(base.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer {kind}: its step() needs a closure that runs forward and backward again, which a window of "
            "accumulated and reduced gradients cannot do. Use an optimizer that steps from gradients alone, e.g. AdamW"
        )
    if sharded and isinstance(base, torch.optim.SparseAdam):
        raise ValueError(
            f"optimizer {kind}: it takes sparse gradients only, and sharded gradients are dense. Use "
            "zero_optimization.stage 0, or Adam"
        )
    for group in base.param_groups:
        for param in group["params"]:
            if param.requires_grad and param.is_complex():
                raise ValueError(
                    f"parameter {names.get(id(param), '?')!r} is {param.dtype}: complex parameters are not supported. "
                    "Hold it as real numbers with a last dimension of 2 and use torch.view_as_complex in forward"
                )
