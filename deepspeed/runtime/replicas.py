"""Making sure all data-parallel ranks start alike: same settings, same parameters, same values."""

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


class SettingsDiffer(ValueError):
    """Ranks were given different configs."""


def agree_on_start(module: nn.Module, settings: list[str], group: Any) -> None:
    """Raise on all ranks when they do not start alike. One small all-reduce; details travel only when they differ.

    settings: a line for every setting that has to be the same (``config_alike.py``).

    Raises:
        SettingsDiffer: lines of ``settings`` differ.
        ModelsDiffer: names, shapes or dtypes of parameters differ, or which are trainable, or their order.
    """
    described = [
        f"{name} {tuple(param.shape)} {param.dtype} {'trainable' if param.requires_grad else 'frozen'}"
        for name, param in module.named_parameters()
    ]
    own = [_digest(settings), _digest(described)]
    # All are alike where the largest is the smallest: exact for any number of ranks, which sums are not.
    extremes = torch.tensor([*own, *(-digest for digest in own)], dtype=torch.int64, device=_comm_device(module))
    collectives.all_reduce(extremes, group, op="max", what="comparing the ranks' settings and models").wait()
    largest, least = extremes[:2].tolist(), (-extremes[2:]).tolist()
    if largest[0] != least[0]:
        raise SettingsDiffer(
            f"the ranks have different configs. {_compared(settings, group, 'config', 'setting')}. Give every rank the "
            "same config: only paths, pinned memory, reports and micro-batch sizes may be a rank's own"
        )
    if largest[1] != least[1]:
        raise ModelsDiffer(
            f"the ranks hold different models. {_compared(described, group, 'model', 'parameter')}. Build the same "
            "model on every rank (same config, same freezing, same order of construction) before deepspeed.initialize"
        )


def _digest(lines: list[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")


def _compared(lines: list[str], group: Any, whole: str, part: str) -> str:
    """What this rank has in another way than the first of the group. Collective."""
    theirs: list[Any] = [lines if dist.get_rank(group) == 0 else None]
    source = dist.get_global_rank(group, 0)
    dist.broadcast_object_list(theirs, src=source, group=group)
    for index in range(max(len(theirs[0]), len(lines))):
        left = theirs[0][index] if index < len(theirs[0]) else f"no {part}"
        right = lines[index] if index < len(lines) else f"no {part}"
        if left != right:
            return f"rank {dist.get_rank()}: {part} {index} is [{right}], on rank {source} it is [{left}]"
    return f"rank {dist.get_rank()} has the {whole} of rank {source}"


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
