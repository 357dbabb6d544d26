"""Reduce-scatters of lists of tensors, each cut evenly over the ranks.

Owns: the interleaved layout of the buffer, and what is packed. Does not own: the transport, which is
`deepspeed.comm.collectives` and `deepspeed.comm.quantized`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm import collectives, quantized
from deepspeed.comm.group_facts import Group, facts_of
from deepspeed.comm.levels import Levels
from deepspeed.comm.loco import LocoState

__all__ = ["all_to_all_loco_quant_reduce", "all_to_all_quant_reduce", "reduce_scatter_coalesced"]

# Attribute of a parameter that holds what its packed gradients have lost so far.
_LOCO_ATTRIBUTE = "_deepspeed_loco_state"


@torch.no_grad()
def reduce_scatter_coalesced(tensors: Sequence[torch.Tensor], group: Group | None = None) -> list[torch.Tensor]:
    """Average each of `tensors` over the ranks and keep this rank's piece of each.

    Args:
        tensors: any shapes, one dtype and device, equal shapes on all ranks.
        group: default: all ranks.

    Returns:
        For each tensor its elements [r*c, (r+1)*c) of the flattened average, 1D, where c = ceil(numel / N): the pieces
        of the last ranks may be shorter or empty. They are views of one buffer.
    """
    if not tensors:
        return []
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.dtype is not first.dtype or tensor.device != first.device:
            raise ValueError(
                f"reduce_scatter_coalesced: tensor {index} is {tensor.dtype} on {tensor.device}, tensor 0 is "
                f"{first.dtype} on {first.device}; all must be alike"
            )
    facts = facts_of(group)
    chunks = [-(-tensor.numel() // facts.size) for tensor in tensors]
    per_rank = sum(chunks)
    # Row r holds the pieces of rank r, one tensor after the other; pads are zero.
    rows = torch.zeros(facts.size, per_rank, dtype=first.dtype, device=first.device)
    start = 0
    for tensor, chunk in zip(tensors, chunks, strict=True):
        flat = tensor.reshape(-1)
        for rank in range(facts.size if chunk else 0):
            piece = flat[rank * chunk : (rank + 1) * chunk]
            rows[rank, start : start + piece.numel()].copy_(piece)
        start += chunk
    own = torch.empty(per_rank, dtype=first.dtype, device=first.device)
    collectives.reduce_scatter(own, rows.view(-1), group, average=True, what=f"{len(tensors)} tensors")
    pieces = []
    for tensor, chunk, piece in zip(tensors, chunks, own.split(chunks), strict=True):
        held = max(0, min(chunk, tensor.numel() - facts.rank * chunk))
        pieces.append(piece[:held])
    return pieces


@torch.no_grad()
def all_to_all_quant_reduce(tensors: Sequence[torch.Tensor], groups: Mapping[str, Group]) -> list[torch.Tensor]:
    """Average each of `tensors` over all ranks, int4 on the wire in two hops, and keep this rank's piece (qgZ).

    Args:
        tensors: fp32, bf16 or fp16, contiguous. 1D ones (norms, biases) and those that the ranks do not divide go
            unpacked, as in `reduce_scatter_coalesced`.
        groups: of `deepspeed.utils.groups._get_local_all_to_all_group`.

    Returns:
        The pieces, as `reduce_scatter_coalesced` gives them.
    """
    levels = _levels_of(groups)
    return [_average(tensor, levels, None) for tensor in tensors]


@torch.no_grad()
def all_to_all_loco_quant_reduce(
    params: Sequence[torch.Tensor], groups: Mapping[str, Group], loco_param: Mapping[str, Any] | None = None
) -> list[torch.Tensor]:
    """`all_to_all_quant_reduce` of the parameters' gradients, each with error feedback kept on its parameter.

    Args:
        loco_param: `err_beta` and `reset_T` (see `LocoState`), read when a parameter comes for the first time.
    """
    levels = _levels_of(groups)
    pieces = []
    for index, param in enumerate(params):
        if param.grad is None:
            shape = tuple(param.shape)
            raise ValueError(f"all_to_all_loco_quant_reduce: parameter {index} of shape {shape} has no grad")
        state = getattr(param, _LOCO_ATTRIBUTE, None)
        if state is None:
            state = LocoState.from_config(loco_param or {})
            setattr(param, _LOCO_ATTRIBUTE, state)
        pieces.append(_average(param.grad, levels, state))
    return pieces


def _average(tensor: torch.Tensor, levels: Levels, loco: LocoState | None) -> torch.Tensor:
    if tensor.dim() == 1 or tensor.numel() % levels.size:
        return reduce_scatter_coalesced([tensor])[0]
    piece = torch.empty(tensor.numel() // levels.size, dtype=tensor.dtype, device=tensor.device)
    flat = tensor.contiguous().view(-1)
    quantized.reduce_scatter(piece, flat, levels, average=True, what=f"tensor {tuple(tensor.shape)}", loco=loco)
    return piece


def _levels_of(groups: Mapping[str, Group]) -> Levels:
    """The two groups of this rank among `local_I` and `global_J`."""
    found = {}
    for kind in ("local", "global"):
        own = [
            group
            for name, group in groups.items()
            if name.startswith(f"{kind}_") and group is not torch_dist.GroupMember.NON_GROUP_MEMBER
        ]
        if len(own) != 1:
            raise ValueError(
                f"groups must hold one group of this rank named {kind}_*, found {len(own)} among {sorted(groups)}; "
                "make them with deepspeed.utils.groups._get_local_all_to_all_group()"
            )
        found[kind] = own[0]
    return Levels(inner=found["local"], outer=found["global"])
