"""Read a Megatron-style model-parallel object (`mpu`): which ranks form which axis, by its groups.

Owns: the names such objects use and how missing axes follow from the others. Does not own: making groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as torch_dist

from deepspeed.comm.group_facts import Group

# Axis -> methods that return its group, best first.
_GROUP_METHODS: dict[str, tuple[str, ...]] = {
    "tp": ("get_tensor_model_parallel_group", "get_slice_parallel_group"),
    "mp": ("get_model_parallel_group",),
    "pp": ("get_pipeline_model_parallel_group", "get_pipe_parallel_group"),
    "sp": ("get_sequence_parallel_group", "get_context_parallel_group"),
    "zero": ("get_sequence_data_parallel_group",),
    "dp": ("get_data_parallel_group",),
}


@dataclass(frozen=True)
class MpuFacts:
    """Lines of this rank per axis, and the mpu's own groups by their ranks."""

    lines: dict[str, tuple[int, ...]]
    groups: dict[tuple[int, ...], Group]
    rank: int
    world_size: int


def read_mpu(mpu: Any) -> MpuFacts:
    """Lines of every axis; axes the object does not speak of have one rank, the rest is data parallel.

    Raises:
        ValueError: the groups contradict each other.
    """
    if not torch_dist.is_initialized():
        return MpuFacts(dict.fromkeys(("pp", "dp", "sp", "tp", "zero", "mp"), (0,)), {}, 0, 1)
    rank, world = torch_dist.get_rank(), torch_dist.get_world_size()
    lines: dict[str, tuple[int, ...]] = {}
    groups: dict[tuple[int, ...], Group] = {}
    for axis, methods in _GROUP_METHODS.items():
        group = _first_group(mpu, methods)
        if group is not None:
            ranks = tuple(torch_dist.get_process_group_ranks(group))
            lines[axis] = ranks
            groups.setdefault(ranks, group)
    # Sequence-parallel helpers without tensor parallelism call their sequence group the model group.
    if "tp" not in lines and lines.get("mp") == lines.get("sp") and "mp" in lines:
        del lines["mp"]
    single = (rank,)
    lines.setdefault("sp", single)
    lines.setdefault("pp", single)
    if "tp" not in lines:
        # An old mpu says "model" for tensor parallel; with pipelines, "model" is both together.
        lines["tp"] = lines["mp"] if "mp" in lines and lines["pp"] == single else single
    lines.setdefault("mp", _product(lines["pp"], lines["tp"], rank))
    _complete_data_axes(lines, rank, world)
    return MpuFacts(lines, groups, rank, world)


def _first_group(mpu: Any, methods: Sequence[str]) -> Group | None:
    for name in methods:
        method = getattr(mpu, name, None)
        if method is None:
            continue
        group = method()
        if isinstance(group, torch_dist.ProcessGroup):
            return group
    return None


def _complete_data_axes(lines: dict[str, tuple[int, ...]], rank: int, world: int) -> None:
    """Make dp and zero (= dp x sp) from each other, or from what the other axes leave."""
    sp = lines["sp"]
    if "zero" not in lines and "dp" in lines:
        # Megatron's data group may already hold the sequence ranks.
        lines["zero"] = lines["dp"] if set(sp) <= set(lines["dp"]) else _product(lines["dp"], sp, rank)
    if "zero" not in lines:
        if len(lines["mp"]) > 1:
            raise ValueError(
                "the mpu object has model parallel groups but no get_data_parallel_group: ranks with equal parameters "
                "cannot be told"
            )
        lines["zero"] = tuple(range(world))
    zero = lines["zero"]
    if "dp" not in lines or (len(sp) > 1 and set(sp) <= set(lines["dp"])):
        lines["dp"] = _peers_of(sp, zero, rank)
    expected = len(lines["dp"]) * len(sp)
    if len(zero) != expected:
        raise ValueError(
            f"the mpu object's groups contradict each other: data {len(lines['dp'])} x sequence {len(sp)} = {expected} "
            f"ranks, but its sequence-data group has {len(zero)}"
        )


def _product(outer: Sequence[int], inner: Sequence[int], rank: int) -> tuple[int, ...]:
    """Ranks reached by a step along one line and then along the other; lines of a regular grid."""
    return tuple(sorted({a + b - rank for a in outer for b in inner}))


def _peers_of(block: Sequence[int], line: Sequence[int], rank: int) -> tuple[int, ...]:
    """Ranks of `line` at the place of `rank` in their blocks, where `block` is this rank's block of the line."""
    size = len(block)
    at = line.index(rank)
    inner = tuple(line[at // size * size : at // size * size + size])
    if inner == tuple(block):
        return tuple(line[at % size :: size])
    outer = len(line) // size
    if tuple(line[at % outer :: outer]) == tuple(block):
        return tuple(line[at // outer * outer : at // outer * outer + outer])
    raise ValueError(
        f"the sequence group {tuple(block)} is not a regular part of the sequence-data group {tuple(line)}"
    )
