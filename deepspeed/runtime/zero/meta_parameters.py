"""Parameters on the meta device: shapes without values, which stage 3 shards without ever having them whole.

Each becomes a parameter whose data is one NaN expanded to its shape, so it costs no memory until its shard is cut from
it. The shards hold NaN until weights are loaded: what is forgotten shows in the first loss.
"""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.utils.logging import log_dist


def take_off_meta(module: nn.Module, device: torch.device, stage: int, *, sharded: bool) -> None:
    """Give every meta parameter of ``module`` a place on ``device``; objects keep their identity.

    ``sharded``: they will be sharded; else (stage 3 on one rank) they get whole tensors of NaN. Raises ValueError below
    stage 3, and for a meta buffer, whose values nobody could load.
    """
    found = [(name, param) for name, param in module.named_parameters() if param.is_meta]
    if not found:
        return
    if stage < 3:
        raise ValueError(
            f"parameter {found[0][0]!r} is on the meta device and has no values; at zero_optimization.stage {stage} "
            "every rank trains whole parameters. Build the model on a real device, or use stage 3"
        )
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"buffer {name!r} is on the meta device and has no values. Give it some before deepspeed.initialize, "
                "for instance by building the model under deepspeed.zero.Init instead of torch.device('meta')"
            )
    for _, param in found:
        value = float("nan") if param.is_floating_point() or param.is_complex() else 0
        data = torch.full((), value, dtype=param.dtype, device=device).expand(param.shape)
        fresh = nn.Parameter(data if sharded else data.clone(), requires_grad=param.requires_grad)
        fresh.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, fresh)
    log_dist(
        f"{len(found)} parameters were on the meta device ({found[0][0]} ...): they hold NaN until weights are loaded "
        "(load_checkpoint, load_state_dict, or GatheredParameters(modifier_rank=0) around your initialisation)",
        ranks=[0],
    )


def is_one_value(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a single element expanded to its shape."""
    return tensor.numel() > 1 and not any(tensor.stride())
