"""The groups that meshes have made in one world, and their use by one engine after the other.

Owns: which groups there are, and which are free. Does not own: which ranks form one (`mesh.py`).
Invariants: all ranks of a group give the same one. The common group of some ranks is shared by all meshes, as the
default group is; one with a purpose, such as the gathers of an engine, belongs to one mesh at a time. Groups are kept
rather than destroyed: ending one while another rank is in its last call would break that call.

A group with a purpose gets free in two ways. An engine is destroyed, which all ranks do at the same point (`retire`).
Or a mesh is collected as garbage together with its engine, which each rank does when it pleases (`drop`): such a group
is used again once all its ranks have dropped it, which they ask each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    """The groups of one world, for all meshes in it."""

    def __init__(self) -> None:
        self._common: dict[tuple[int, ...], Group] = {}
        self._made: dict[Key, int] = {}
        self._idle: dict[Key, list[Numbered]] = {}
        self._dropped: dict[Key, dict[int, Group]] = {}

    def common(self, ranks: tuple[int, ...]) -> tuple[Group, bool]:
        """The group of ``ranks`` without a purpose, and whether it was made now: then all its ranks must call."""
        known = self._common.get(ranks)
        if known is not None and known in torch_dist.distributed_c10d._world.pg_map:  # else the client has ended it
            return known, False
        group = self._common[ranks] = _new_group(ranks, None)
        return group, True

    def forget(self, groups: Sequence[Group]) -> None:
        """These will be destroyed."""
        self._common = {ranks: group for ranks, group in self._common.items() if group not in groups}

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
        return made, _new_group(*key)

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


def _new_group(ranks: tuple[int, ...], purpose: str | None) -> Group:
    """Only the members meet: no rank takes part in, or waits for, groups it is not in."""
    limit = group_timeout(torch_dist.group.WORLD)
    with blocking("new_group", lambda: format_ranks(sorted(ranks))):
        return torch_dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True, group_desc=purpose)
