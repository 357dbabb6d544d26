"""Groups for one purpose each, such as the gathers of an engine, and their use by one engine after the other.

Owns: which of them were made in this world, and which are free. Does not own: which ranks form one (`mesh.py`).
Invariants: a group belongs to one mesh at a time, and all its ranks give the same one. Groups are kept rather than
destroyed: ending one while another rank is in its last call would break that call.

A group gets free in two ways. An engine is destroyed, which all ranks do at the same point (`retire`). Or a mesh is
collected as garbage together with its engine, which each rank does when it pleases (`drop`): such a group is used again
once all its ranks have dropped it, which they ask each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as torch_dist

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.comm.activity import format_ranks
from deepspeed.comm.group_facts import Group, group_timeout
from deepspeed.comm.pending import blocking

Key = tuple[tuple[int, ...], str]
"""Ranks and purpose."""
Numbered = tuple[int, Group]
"""A group, and how many of its key were made before it: the same number on all its ranks."""


class GroupPool:
    """The groups with a purpose of one world, shared by all meshes that follow each other in it."""

    def __init__(self) -> None:
        self._made: dict[Key, int] = {}
        self._idle: dict[Key, list[Numbered]] = {}
        self._dropped: dict[Key, dict[int, Group]] = {}

    def take(self, key: Key, ordinary: Callable[[], Group]) -> Numbered:
        """A group that nobody uses, made if need be. All its ranks must call; ``ordinary``: their group for talking."""
        idle = self._idle.get(key)
        if idle:
            return idle.pop()
        made = self._made.get(key, 0)
        number = self._dropped_by_all(key, made, ordinary) if made else None
        if number is not None:
            return number, self._dropped[key].pop(number)
        self._made[key] = made + 1
        ranks, purpose = key
        with blocking("new_group", lambda: format_ranks(sorted(ranks))):
            group = torch_dist.new_group(
                list(ranks),
                timeout=group_timeout(torch_dist.group.WORLD),
                use_local_synchronization=True,
                group_desc=purpose,
            )
        return made, group

    def retire(self, taken: dict[Key, Numbered]) -> None:
        """The user of ``taken`` is gone on all ranks."""
        for key, numbered in taken.items():
            self._idle.setdefault(key, []).append(numbered)
        taken.clear()

    def drop(self, taken: dict[Key, Numbered]) -> None:
        """The user of ``taken`` is gone here; the other ranks will follow."""
        for key, (number, group) in taken.items():
            self._dropped.setdefault(key, {})[number] = group
        taken.clear()

    def _dropped_by_all(self, key: Key, made: int, ordinary: Callable[[], Group]) -> int | None:
        mine = self._dropped.get(key, {})
        device = get_accelerator().current_device_name()
        free = torch.tensor([number in mine for number in range(made)], dtype=torch.int32, device=device)
        group = ordinary()
        with blocking("all_reduce", lambda: "asking which groups of engines that are gone are free"):
            torch_dist.all_reduce(free, op=torch_dist.ReduceOp.MIN, group=group)
        return next((number for number, is_free in enumerate(free.tolist()) if is_free), None)
