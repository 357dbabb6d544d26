"""Making sure all data-parallel ranks start from the same model: same parameters, same values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm import collectives
from deepspeed.runtime.zero.meta_parameters import is_one_value
from deepspeed.runtime.zero.sharded_parameter import block_of

_CHUNK_NBYTES = 16 << 20


class ModelsDiffer(ValueError):
    """Ranks built different models."""


def agree_on_model(module: nn.Module, group: Any) -> None:
    """Raise :class:`ModelsDiffer` on all ranks when parameter names, shapes, dtypes or their order differ.

    One all-reduce of a few numbers; details are exchanged only when they disagree.
    """
    described = [
        f"{name} {tuple(param.shape)} {param.dtype} {'trainable' if param.requires_grad else 'frozen'}"
        for name, param in module.named_parameters()
    ]
    digest = int.from_bytes(hashlib.sha256("\n".join(described).encode()).digest()[:3], "big")
    facts = torch.tensor([digest, digest * digest, len(described)], dtype=torch.float64)
    world = dist.get_world_size(group)
    total = facts.clone().to(_comm_device(module))
    collectives.all_reduce(total, group, op="sum", what="comparing the ranks' models").wait()
    if float(total[0]) ** 2 == float(total[1]) * world and float(total[2]) == len(described) * world:
        return
    theirs: list[Any] = [described if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(theirs, src=dist.get_global_rank(group, 0), group=group)
    difference = _first_difference(theirs[0], described)
    own = f"rank {dist.get_rank()}: {difference}" if difference else f"rank {dist.get_rank()} has the model of rank 0"
    raise ModelsDiffer(
        f"the ranks hold different models. {own}. Build the same model on every rank (same config, same freezing, same "
        "order of construction) before deepspeed.initialize"
    )


def _first_difference(reference: list[str], mine: list[str]) -> str | None:
    for index in range(max(len(reference), len(mine))):
        left = reference[index] if index < len(reference) else "no parameter"
        right = mine[index] if index < len(mine) else "no parameter"
        if left != right:
            return f"parameter {index} is [{right}], on rank 0 it is [{left}]"
    return None


@torch.no_grad()
def broadcast_module(module: nn.Module, group: Any) -> None:
    """Every rank takes rank 0's parameters and buffers, in flat chunks of up to 16 MiB per collective.

    Parameters that are sharded already are one model as they are.
    """
    seen: set[int] = set()
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if id(tensor) in seen or not tensor.numel() or tensor.is_meta or block_of(tensor) is not None:
            continue
        if not is_one_value(tensor):
            seen.add(id(tensor))
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, tensors in by_dtype.items():
        for chunk in _chunks(tensors):
            carrier = dtype if dtype is not torch.bool else torch.uint8
            flat = torch.cat([tensor.detach().reshape(-1).to(carrier) for tensor in chunk])
            collectives.broadcast(flat, 0, group, what="initial model weights").wait()
            offset = 0
            for tensor in chunk:
                tensor.detach().copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
                offset += tensor.numel()


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        if chunk and held + tensor.nbytes > _CHUNK_NBYTES:
            yield chunk
            chunk, held = [], 0
        chunk.append(tensor)
        held += tensor.nbytes
    if chunk:
        yield chunk


def _comm_device(module: nn.Module) -> torch.device:
    return next((param.device for param in module.parameters()), torch.device("cpu"))
