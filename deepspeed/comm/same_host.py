"""Do all ranks of a group share this host, so that its CPU tensors travel through shared memory instead of gloo?

Owns: the meeting of a group's ranks, the decision, and `channel_of`, which the collectives ask. Does not own: the
transport (`shm_channel.py`). `DS_SHM=0` in the environment of any rank turns it off for the groups of that rank.

The decision is the same on all ranks, also where one of them has no compiler or another setting, because all take it
from the same data; and nobody waits for a rank that has not yet come, because the data travel beside the first calls:

    first call of a group    goes by gloo; with it travel what every rank says of itself and of its block of memory
    second call              goes by gloo; before it, ranks of one host map each other's blocks; how that went travels
    third call and later     through shared memory if all have mapped all

Groups of more than `MAX_RANKS` ranks, of other backends and of systems without memfd never meet.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import socket
import struct
import sys
from typing import Any, ClassVar

import torch
import torch.distributed as torch_dist

from deepspeed.comm import shm_channel
from deepspeed.comm.group_facts import Group, GroupFacts, all_facts, facts_of
from deepspeed.comm.pending import Pending, WaitMode, What
from deepspeed.comm.shm_channel import Channel
from deepspeed.native.build import SOURCES, NativeUnavailable
from deepspeed.utils.logging import logger

__all__ = ["MAX_RANKS", "channel_of", "describe", "host_identity", "in_background"]

MAX_RANKS = 64
# A wait looks around this long before it sleeps: longer than two ranks are usually apart, shorter than a sleep costs.
SPIN_US = 20

# What a rank says of itself: transport version, host (digests), pid, its start time, descriptor, nonce, willing.
_CARD = struct.Struct("=16s16sqQiQB")


@functools.cache
def host_identity() -> bytes:
    """Equal for processes that can open each other's memory: machine, boot, namespaces and user."""
    facts = [socket.gethostname(), str(os.getuid() if hasattr(os, "getuid") else -1)]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/user", "/proc/self/ns/net"):
        try:
            if "/ns/" in path:
                facts.append(os.readlink(path))
            else:
                with open(path, encoding="ascii") as boot:
                    facts.append(boot.read().strip())
        except OSError:
            facts.append(secrets.token_hex(8))  # unknown: equal to nobody's
    return hashlib.sha256("\0".join(facts).encode()).digest()[:16]


@functools.cache
def _version() -> bytes:
    """Equal for processes whose blocks have the same layout."""
    mixed = hashlib.sha256()
    for source in sorted(SOURCES.glob("transport*")):
        mixed.update(source.read_bytes())
    return mixed.digest()[:16]


def _start_time() -> int:
    """Of this process, in clock ticks since boot."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])


def _refusal() -> str:
    """Why this rank cannot or must not use shared memory; empty when it can."""
    if os.environ.get("DS_SHM", "").strip().lower() in ("0", "false", "no", "off"):
        return f"DS_SHM={os.environ['DS_SHM']} is set"
    try:
        shm_channel.library()
    except NativeUnavailable as problem:
        return str(problem)
    return ""


class _Exchange(Pending):
    """The wait for what the ranks said with an earlier call. Not one of the calls that are counted."""

    __slots__ = ()
    counts: ClassVar[bool] = False


class Meeting:
    """The ranks of one group find out about each other, beside their first calls."""

    __slots__ = ("_cards", "_handle", "_nonce", "_stage", "_status", "_work", "why_not")

    def __init__(self) -> None:
        self.why_not = ""
        self._stage = 0
        self._handle: int | None = None
        self._nonce = secrets.randbits(63)
        self._work: Any = None
        self._cards: list[torch.Tensor] = []
        self._status: list[torch.Tensor] = []

    def advance(self, facts: GroupFacts, name: str, what: What, nbytes: int) -> Channel | None:
        """One more call of the group is about to start: its channel, or None for gloo."""
        pg: Any = facts.ref() if facts.ref is not None else None
        self._stage += 1
        if self._stage == 1:
            self._introduce(pg, facts)
            return None
        exchange = _Exchange((self._work,), None, facts, name, what, nbytes, WaitMode.SLICES)
        exchange.sequence = facts.calls + 1
        exchange.started = 0.0  # not a call for the log
        exchange.wait()
        if self._stage == 2:
            self._attach(pg, facts)
            return None
        return self._conclude(facts)

    def close(self) -> None:
        """Give the block back. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            shm_channel.library().ds_shm_leave(handle)

    def forget(self) -> None:
        """In a forked child: the block is the parent's."""
        self._handle = None

    def _introduce(self, pg: Any, facts: GroupFacts) -> None:
        self.why_not = _refusal()
        descriptor = -1
        if not self.why_not:
            library = shm_channel.library()
            spin_us = SPIN_US if facts.size <= len(os.sched_getaffinity(0)) else 0
            self._handle = library.ds_shm_open(facts.rank, facts.size, self._nonce, spin_us)
            if self._handle is None:
                self.why_not = "no memory or no descriptor for a shared block"
            else:
                descriptor = library.ds_shm_fd(self._handle)
        card = _CARD.pack(
            _version(), host_identity(), os.getpid(), _start_time(), descriptor, self._nonce, not self.why_not
        )
        own = torch.frombuffer(bytearray(card), dtype=torch.uint8)
        self._cards = [torch.empty_like(own) for _ in range(facts.size)]
        self._work = pg.allgather([self._cards], [own])

    def _attach(self, pg: Any, facts: GroupFacts) -> None:
        """Everybody knows everybody: without a chance this is the end of it, on all ranks alike."""
        cards = [_CARD.unpack(bytes(card.tolist())) for card in self._cards]
        self._cards = []
        mine = cards[facts.rank]
        ranks = torch_dist.get_process_group_ranks(pg)
        unwilling = [ranks[place] for place, card in enumerate(cards) if not card[-1]]
        if any(card[1] != mine[1] for card in cards):
            self.why_not = self.why_not or "its ranks are on several hosts"
        elif unwilling:
            self.why_not = self.why_not or f"rank {unwilling[0]} does not use it"
        elif any(card[0] != mine[0] for card in cards):
            self.why_not = "its ranks run different versions of the library"
        if self.why_not:
            self._end(facts)
            return
        library = shm_channel.library()
        for place, (_, _, pid, start, descriptor, nonce, _) in enumerate(cards):
            if place != facts.rank and library.ds_shm_attach(self._handle, place, pid, start, descriptor, nonce):
                self.why_not = f"the memory of rank {ranks[place]} cannot be opened here"
        own = torch.tensor([not self.why_not])
        self._status = [torch.empty_like(own) for _ in range(facts.size)]
        self._work = pg.allgather([self._status], [own])

    def _conclude(self, facts: GroupFacts) -> Channel | None:
        group = facts.ref() if facts.ref is not None else None
        ranks = torch_dist.get_process_group_ranks(group)
        failed = [rank for rank, status in zip(ranks, self._status, strict=True) if not bool(status)]
        if failed or self._handle is None:
            self.why_not = self.why_not or f"rank {failed[0]} cannot open the memory of another"
            logger.warning(f"group {facts.name!r} uses gloo instead of shared memory: {self.why_not}")
            self._end(facts)
            return None
        handle, self._handle = self._handle, None
        shm_channel.library().ds_shm_close_fd(handle)
        channel = Channel(handle, facts.rank, ranks, facts.timeout_s)
        facts.link = channel
        return channel

    def _end(self, facts: GroupFacts) -> None:
        self.close()
        facts.link = Refused(self.why_not)


class Refused:
    """The link of a group that uses its backend, and why."""

    __slots__ = ("why_not",)

    def __init__(self, why_not: str) -> None:
        self.why_not = why_not

    def advance(self, facts: GroupFacts, name: str, what: What, nbytes: int) -> None:
        """Never a channel."""

    def close(self) -> None:
        """Nothing is held."""

    forget = close


_HOST = torch.device("cpu")


def channel_of(facts: GroupFacts, tensor: torch.Tensor | None, name: str, what: What, nbytes: int) -> Channel | None:
    """The channel for a call on the group that is about to start, or None: then its backend carries it.

    All ranks of the group must ask before the same calls. `tensor`: one of the call's; None: it has none.

    Raises:
        CollectiveError: the ranks' meeting has failed, for the reasons a wait fails.
    """
    if tensor is not None and not tensor.is_cpu:
        return None
    link = facts.link
    if link.__class__ is Channel:
        return link
    if link is None:
        link = facts.link = _first_link(facts)
    found: Channel | None = link.advance(facts, name, what, nbytes)
    return found


def _first_link(facts: GroupFacts) -> Meeting | Refused:
    """By facts that are the same on all ranks."""
    if not sys.platform.startswith("linux"):
        return Refused("it needs Linux")
    if facts.size > MAX_RANKS:
        return Refused(f"the group has more than {MAX_RANKS} ranks")
    if facts.size == 1:
        return Refused("the group has one rank")
    return Meeting() if facts.sums_locally(_HOST) else Refused("the group's backend for CPU tensors is not gloo")


def in_background(works: tuple[Any, ...]) -> None:
    """The caller will not wait for these at once: they go on meanwhile."""
    for work in works:
        if isinstance(work, shm_channel.ShmWork):
            work.channel.background()


def describe(group: Group | None = None) -> str:
    """What carries the CPU tensors of the group (None: the default group), in words."""
    facts = facts_of(group)
    if facts.link.__class__ is Channel:
        return "shared memory"
    if facts.size == 1:
        return "nothing: the group has one rank"
    if isinstance(facts.link, Refused):
        return f"{facts.backend(_HOST)}, because {facts.link.why_not}"
    return f"{facts.backend(_HOST)}: the ranks have not met"


def _after_fork() -> None:
    shm_channel.forget_all()
    for facts in all_facts():
        if facts.link is not None:
            facts.link.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
