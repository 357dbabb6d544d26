"""What the hot path needs to know about a process group, looked up once per group.

Owns: rank, size, backend kind, time limit, call counters, staging buffers and link of a group. Nothing here outlives
the group: the table holds weak references, so destroying a group, by whichever library, frees its facts and buffers.
Does not own: the group itself, and which collective is used (`collectives.py`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as torch_dist

from deepspeed.comm import watch
from deepspeed.comm.ledger import Page

# torch's ProcessGroup is a pybind class and a subclass of it per backend; `None` means the default group.
Group: TypeAlias = Any

# Backends that reduce on the CPU through tensors we see: for these we sum ourselves, in a fixed order.
_LOCAL_SUM_BACKENDS = frozenset({"gloo"})
# Backends whose Work.wait blocks the calling thread; elsewhere it only makes the device stream wait.
_HOST_WAIT_BACKENDS = frozenset({"gloo", "mpi", "ucc", "fake"})
# Backends that know the AVG reduction.
_AVERAGE_BACKENDS = frozenset({"nccl"})


# Name of the default group.
DEFAULT = "default"


class GroupFacts:
    """Facts and buffers of one process group. Built by `facts_of`; treat the fields as read-only."""

    __slots__ = (
        "__weakref__",
        "_free",
        "_kinds",
        "_peer_splits",
        "announced",
        "bytes_sent",
        "calls",
        "link",
        "name",
        "page",
        "rank",
        "ref",
        "size",
        "timeout_s",
    )

    def __init__(self, group: Group | None) -> None:
        self.ref: weakref.ref[Any] | None = None if group is None else weakref.ref(group, _forget(id(group)))
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        # torch numbers default groups through the life of a process.
        self.name: str = DEFAULT if group is None or group is torch_dist.group.WORLD else group.group_name
        self.timeout_s = 0.0
        self.calls = 0  # collectives started on this group; equal on all ranks of a healthy run
        self.announced = 0  # number of the last one announced; above `calls` until it has started
        self.bytes_sent = 0  # bytes this rank put on the wire (see `collectives` for the convention)
        self.link: Any = None  # see `same_host.py`; None: nobody has asked yet
        self.page: Page | None = None  # see `ledger.py`; None for one rank, and where no ledger can be had
        self._kinds: dict[str, str] = {}
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._peer_splits: tuple[int, list[int]] = (-1, [])

    def backend(self, device: torch.device) -> str:
        """Backend name used for tensors of `device` ("gloo", "nccl", ...). A group may hold one per device type."""
        kind = self._kinds.get(device.type)
        if kind is None:
            group = self.ref() if self.ref is not None else None
            if group is None:
                return "none"
            kind = group._get_backend(torch.device(device.type)).name().lower()
            self._kinds[device.type] = kind
        return kind

    def sums_locally(self, device: torch.device) -> bool:
        """Whether reductions of `device` tensors are an exchange plus our own sum in rank order."""
        return self.backend(device) in _LOCAL_SUM_BACKENDS

    def blocks_host(self, device: torch.device) -> bool:
        """Whether waiting for a collective of `device` tensors blocks the calling thread."""
        return self.backend(device) in _HOST_WAIT_BACKENDS

    def includes_rank_0(self) -> bool:
        """Whether rank 0 of the job is a member of the group."""
        group = self.ref() if self.ref is not None else None
        return group is not None and 0 in torch_dist.get_process_group_ranks(group)

    def knows_average(self, device: torch.device) -> bool:
        """Whether the backend offers the AVG reduction."""
        return self.backend(device) in _AVERAGE_BACKENDS

    def peer_splits(self, numel: int) -> list[int]:
        """Split sizes that send `numel` elements to the other rank of a two-rank group and none to oneself."""
        cached, splits = self._peer_splits
        if cached != numel:
            splits = [numel, 0] if self.rank == 1 else [0, numel]
            self._peer_splits = (numel, splits)
        return splits

    def take_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat staging buffer of at least `numel` elements. Slice it, and hand the whole back after use."""
        free = self._free.get((dtype, device))
        if free:
            buffer = free.pop()
            if buffer.numel() >= numel:
                return buffer
            # Too small: dropped, so that growing requests leave one buffer behind and not a series.
        with torch.inference_mode(False):  # else a buffer born in an evaluation could never be written in training
            return torch.empty(numel, dtype=dtype, device=device)

    def give_buffer(self, buffer: torch.Tensor) -> None:
        """Return a buffer of `take_buffer` for the next call."""
        self._free.setdefault((buffer.dtype, buffer.device), []).append(buffer)

    def release_buffers(self) -> int:
        """Drop the idle staging buffers; returns the bytes freed."""
        freed = sum(b.nbytes for buffers in self._free.values() for b in buffers)
        self._free.clear()
        return freed if self.link is None else freed + int(self.link.release_buffers())


_table: dict[int, GroupFacts] = {}
_ALONE = GroupFacts(None)


def facts_of(group: Group | None) -> GroupFacts:
    """Facts of `group` (None: the default group; without an initialised torch.distributed a group of one rank)."""
    if group is None:
        group = torch_dist.group.WORLD
        if group is None:
            return _ALONE
    facts = _table.get(id(group))
    # An id may be used again by a new object before the old one's callback has run.
    if facts is None or facts.ref is None or facts.ref() is not group:
        facts = _add(group)
    return facts


def all_facts() -> list[GroupFacts]:
    """Facts of every group this process has used so far and that still exists."""
    return list(_table.values())


def _add(group: Group) -> GroupFacts:
    if not isinstance(group, torch_dist.ProcessGroup):
        raise TypeError(
            f"expected a torch.distributed process group of which this rank is a member, found {group!r}. "
            "torch.distributed.new_group returns a non-member marker on ranks outside the group: "
            "do not call collectives of that group there."
        )
    facts = GroupFacts(group)
    facts.timeout_s = group_timeout(group).total_seconds()
    _table[id(group)] = facts
    if facts.size > 1:
        watch.ensure_started()
        ranks = torch_dist.get_process_group_ranks(group)
        facts.page = watch.ledger_page(group, facts.name, ranks, facts.rank)
    return facts


def forget(group: Group) -> None:
    """Drop the facts of a group that is about to be destroyed."""
    facts = _table.get(id(group))
    if facts is not None and facts.ref is not None and facts.ref() is group:
        _drop(id(group), facts)


def _drop(key: int, facts: GroupFacts) -> None:
    del _table[key]
    if facts.page is not None:
        facts.page.clear()
    if facts.link is not None:
        facts.link.close()


def group_timeout(group: Group) -> timedelta:
    """Time limit of the group's collectives, as given when it was made."""
    for device_type in ("cpu", "cuda"):
        try:
            backend = group._get_backend(torch.device(device_type))
        except RuntimeError:  # no backend of this group serves the device type
            continue
        options = getattr(backend, "options", None)
        limit = getattr(options, "_timeout", None)
        if isinstance(limit, timedelta):
            return limit
    return timedelta(minutes=30)  # torch's own default


def _forget(key: int, finalizing: Callable[[], bool] = sys.is_finalizing) -> Any:
    """The callback of a weak reference to a group: drops its facts.

    Does nothing while the interpreter shuts down: a group that lives until then outlives the globals that the work
    would need, and the end of the process gives back the memory anyway.
    """

    def drop(ref: weakref.ref[Any]) -> None:
        if finalizing():
            return
        facts = _table.get(key)
        if facts is not None and facts.ref is ref:
            _drop(key, facts)

    return drop
