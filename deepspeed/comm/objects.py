"""Collectives of Python objects: pickled, then moved as bytes by the bounded collectives.

Owns: the encoding. Only for ranks that trust each other: unpickling runs code, as in torch.distributed.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.comm import collectives
from deepspeed.comm.group_facts import Group, facts_of
from deepspeed.comm.pending import What

__all__ = ["all_gather_object", "broadcast_object_list"]


def all_gather_object(object_list: list[Any], obj: Any, group: Group | None = None, *, what: What = "objects") -> None:
    """Fill `object_list` (one entry per rank) with every rank's `obj`."""
    facts = facts_of(group)
    if len(object_list) != facts.size:
        raise ValueError(f"all_gather_object: the list has {len(object_list)} entries, the group {facts.size} ranks")
    if facts.size == 1:
        object_list[0] = _copy(obj)
        return
    device = _device(group)
    payload = _encode(obj, device)
    sizes = torch.zeros(facts.size, dtype=torch.int64, device=device)
    own_size = torch.tensor([payload.numel()], dtype=torch.int64, device=device)
    collectives.all_gather(sizes, own_size, group, what=what)
    counts = sizes.tolist()
    longest = max(counts)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: payload.numel()] = payload
    everything = torch.empty(longest * facts.size, dtype=torch.uint8, device=device)
    collectives.all_gather(everything, padded, group, what=what)
    host = everything.cpu()
    for rank, count in enumerate(counts):
        object_list[rank] = _decode(host[rank * longest : rank * longest + count])


def broadcast_object_list(
    object_list: list[Any],
    src: int,
    group: Group | None = None,
    device: torch.device | None = None,
    *,
    what: What = "objects",
) -> None:
    """Replace the entries of `object_list` on all ranks by those of global rank `src`."""
    facts = facts_of(group)
    if facts.size == 1:
        return
    device = device if device is not None else _device(group)
    source = torch_dist.get_group_rank(group, src) if group is not None else src
    mine = facts.rank == source
    payload = _encode(list(object_list), device) if mine else torch.empty(0, dtype=torch.uint8, device=device)
    size = torch.tensor([payload.numel()], dtype=torch.int64, device=device)
    collectives.broadcast(size, source, group, what=what)
    if not mine:
        payload = torch.empty(int(size), dtype=torch.uint8, device=device)
    collectives.broadcast(payload, source, group, what=what)
    if not mine:
        received: Sequence[Any] = _decode(payload.cpu())
        if len(received) != len(object_list):
            raise ValueError(
                f"broadcast_object_list: rank {src} sent {len(received)} objects, the list here has {len(object_list)}"
            )
        object_list[:] = received


def _encode(obj: Any, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(device)


def _decode(payload: torch.Tensor) -> Any:
    return pickle.loads(payload.numpy().tobytes())


def _copy(obj: Any) -> Any:
    return pickle.loads(pickle.dumps(obj))


def _device(group: Group | None) -> torch.device:
    """A device whose tensors the group can move: the host if it can, else the current accelerator device."""
    pg: Any = group if group is not None else torch_dist.group.WORLD
    if any(device.type == "cpu" for device in pg._device_types):
        return torch.device("cpu")
    return torch.device(get_accelerator().current_device_name())
