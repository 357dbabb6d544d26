"""Which ranks of a group share a host, so that CPU tensors travel between them through shared memory instead of gloo?

Owns: the meeting of a group's ranks, the decision, and `channel_of`, which the collectives ask. Does not own: the
transports (`shm_channel.py` on one host, `across_hosts.py` on several) and the connections between hosts
(`host_peers.py`). `DS_SHM=0` in the environment of any rank turns it off for the groups of that rank.

The decision is the same on all ranks, also where one of them has no compiler or another setting, because all take it
from the same data; and nobody waits for a rank that has not yet come, because the data travel beside the first calls:

    first call of a group    goes by gloo; with it travel what every rank says of itself and of its block of memory
    second call              goes by gloo; before it, ranks of one host map each other's blocks; how that went travels
    third call and later     through shared memory if all have mapped all

Where hosts have several ranks each, there is one call more: at the second the ranks at one place of every host begin to
connect; at the third, by gloo too, they tell how mapping and connecting went; the fourth is the first through both.

Groups of other backends and of systems without memfd never meet.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as torch_dist

from deepspeed.comm import shm_channel
from deepspeed.comm.across_hosts import ONE_ON_EACH, HostLayout, HostsChannel, layout_of
from deepspeed.comm.group_facts import Group, GroupFacts, all_facts, facts_of
from deepspeed.comm.host_peers import PeersToBe
from deepspeed.comm.host_work import HostWork
from deepspeed.comm.pending import Pending, WaitMode, What
from deepspeed.comm.shm_channel import Channel
from deepspeed.native.build import SOURCES, NativeUnavailable
from deepspeed.utils.logging import logger

__all__ = ["MAX_RANKS", "AnyChannel", "channel_of", "describe", "host_identity", "in_background", "sums_in_order"]

AnyChannel: TypeAlias = Channel | HostsChannel

MAX_RANKS = 64  # of one host
# A wait looks around this long before it sleeps: longer than two ranks are usually apart, shorter than a sleep costs.
SPIN_US = 20

# What a rank says of itself: transport version, host (digests), pid, its start time, descriptor, nonce, willing.
_CARD = struct.Struct("=16s16sqQiQB")


@functools.cache
def host_identity() -> bytes:
    """Equal for processes that can open each other's memory: machine, boot, namespaces and user.

    Raises:
        OSError: for a reason that is this process's own, such as no descriptor being left.
    """
    facts = [socket.gethostname(), str(os.getuid() if hasattr(os, "getuid") else -1)]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/user", "/proc/self/ns/net"):
        try:
            if "/ns/" in path:
                facts.append(os.readlink(path))
            else:
                with open(path, encoding="ascii") as boot:
                    facts.append(boot.read().strip())
        except (FileNotFoundError, PermissionError, NotADirectoryError):
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

    __slots__ = ("_cards", "_handle", "_layout", "_next", "_nonce", "_peers", "_status", "_work", "why_not")

    def __init__(self) -> None:
        self.why_not = ""
        self._next: Callable[[Any, GroupFacts], AnyChannel | None] = self._introduce
        self._handle: int | None = None
        self._nonce = secrets.randbits(63)
        self._work: Any = None
        self._cards: list[torch.Tensor] = []
        self._status: list[torch.Tensor] = []
        self._layout: HostLayout | None = None  # of a group on several hosts
        self._peers: PeersToBe | None = None

    def advance(self, facts: GroupFacts, name: str, what: What, nbytes: int) -> AnyChannel | None:
        """One more call of the group is about to start: its channel, or None for gloo."""
        pg: Any = facts.ref() if facts.ref is not None else None
        if self._work is not None:
            exchange = _Exchange((self._work,), None, facts, name, what, nbytes, WaitMode.SLICES)
            exchange.sequence = facts.calls + 1
            exchange.started = 0.0  # not a call for the log
            exchange.wait()
            self._work = None  # it holds the group, and with it the job's store
        return self._next(pg, facts)

    def close(self) -> None:
        """Give the block and the connections back. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            shm_channel.library().ds_shm_leave(handle)
        # Its next step is a cycle, so what is left here lives until the garbage collector comes: the group's store,
        # for one, where the next group of these ranks would read what this one has written.
        self._peers = self._work = None
        self._cards, self._status = [], []

    def forget(self) -> None:
        """In a forked child: the block is the parent's."""
        self._handle = self._peers = None

    def release_buffers(self) -> int:
        """Nothing is kept."""
        return 0

    # The steps, each at the start of a call of the group.

    def _introduce(self, pg: Any, facts: GroupFacts) -> None:
        self.why_not = _refusal()
        self._show_card(pg, facts, facts.rank, facts.size)
        self._next = self._look_around

    def _show_card(self, pg: Any, facts: GroupFacts, rank: int, size: int) -> None:
        """Tell all where this rank's block is, made for the rank `rank` of `size` that will share it."""
        descriptor, version, host, started = -1, bytes(16), bytes(16), 0
        try:
            version, host, started = _version(), host_identity(), _start_time()
        except OSError as problem:  # no descriptor is left, say: the others wait for a card all the same
            self.why_not = self.why_not or f"what a rank says of itself cannot be found out: {problem}"
        if not self.why_not:
            library = shm_channel.library()
            spin_us = SPIN_US if size <= len(os.sched_getaffinity(0)) else 0
            self._handle = library.ds_shm_open(rank, size, self._nonce, spin_us)
            if self._handle is None:
                self.why_not = "no memory or no descriptor for a shared block"
            else:
                descriptor = library.ds_shm_fd(self._handle)
        card = _CARD.pack(version, host, os.getpid(), started, descriptor, self._nonce, not self.why_not)
        own = torch.frombuffer(bytearray(card), dtype=torch.uint8)
        self._cards = [torch.empty_like(own) for _ in range(facts.size)]
        self._work = pg.allgather([self._cards], [own])

    def _look_around(self, pg: Any, facts: GroupFacts) -> None:
        """Everybody knows everybody: without a chance this is the end of it, on all ranks alike."""
        cards = [_CARD.unpack(bytes(card.tolist())) for card in self._cards]
        unwilling = [rank for rank, card in zip(_ranks_of(pg), cards, strict=True) if not card[-1]]
        layout = layout_of([card[1] for card in cards], facts.rank)
        if unwilling:  # it may not even know its host
            self.why_not = self.why_not or f"rank {unwilling[0]} does not use it"
        elif isinstance(layout, str):
            self.why_not = layout
            if facts.rank == 0 and layout != ONE_ON_EACH:
                logger.info(f"group {facts.name!r} uses gloo also inside its hosts: {layout}")
        elif any(card[0] != cards[facts.rank][0] for card in cards):
            self.why_not = "its ranks run different versions of the library"
        elif layout.local > MAX_RANKS:
            self.why_not = f"more than {MAX_RANKS} of its ranks are on one host"
        if self.why_not or isinstance(layout, str):
            self._end(facts)
        elif layout.hosts == 1:
            self._attach(pg, facts)
        else:
            self._layout = layout
            self._peers = PeersToBe(layout, token=cards[0][-2], timeout_s=facts.timeout_s)
            self._give_block_back()
            self._show_card(pg, facts, layout.place, layout.local)
            self._next = self._attach

    def _give_block_back(self) -> None:
        """The one shown first was for a group on one host."""
        handle, self._handle = self._handle, None
        shm_channel.library().ds_shm_leave(handle)

    def _attach(self, pg: Any, facts: GroupFacts) -> None:
        """Map the blocks of the ranks on this host, and tell all how that, and connecting to other hosts, went."""
        cards = [_CARD.unpack(bytes(card.tolist())) for card in self._cards]
        self._cards = []
        ranks, mine = self._on_this_host(cards, facts), self._own_place(facts)
        names = self._on_this_host(_ranks_of(pg), facts)
        for place, (_, _, pid, start, descriptor, nonce, _) in enumerate(ranks):
            if self._handle is None or place == mine:
                continue
            if shm_channel.library().ds_shm_attach(self._handle, place, pid, start, descriptor, nonce):
                self.why_not = f"the memory of rank {names[place]} cannot be opened here"
        if self._peers is not None and (problem := self._peers.problem()):
            self.why_not = self.why_not or problem
        own = torch.tensor([not self.why_not])
        self._status = [torch.empty_like(own) for _ in range(facts.size)]
        self._work = pg.allgather([self._status], [own])
        self._next = self._conclude

    def _on_this_host(self, of_all: Sequence[Any], facts: GroupFacts) -> Sequence[Any]:
        layout = self._layout
        return of_all if layout is None else of_all[layout.host * layout.local :][: layout.local]

    def _own_place(self, facts: GroupFacts) -> int:
        return facts.rank if self._layout is None else self._layout.place

    def _conclude(self, pg: Any, facts: GroupFacts) -> AnyChannel | None:
        ranks = _ranks_of(pg)
        failed = [rank for rank, status in zip(ranks, self._status, strict=True) if not bool(status)]
        if failed or self._handle is None:
            others = "cannot open the memory of another" if self._layout is None else "cannot reach all of its peers"
            self.why_not = self.why_not or f"rank {failed[0]} {others}"
            logger.warning(f"group {facts.name!r} uses gloo instead of shared memory: {self.why_not}")
            self._end(facts)
            return None
        handle, self._handle = self._handle, None
        shm_channel.library().ds_shm_close_fd(handle)
        found: AnyChannel
        found = local = Channel(handle, self._own_place(facts), self._on_this_host(ranks, facts), facts.timeout_s)
        if self._layout is not None:
            assert self._peers is not None
            found = HostsChannel(self._layout, local, self._peers.take(), pg, facts.timeout_s)
        facts.link = found
        return found

    def _end(self, facts: GroupFacts) -> None:
        self.close()
        facts.link = Refused(self.why_not)


def _ranks_of(pg: Any) -> list[int]:
    return list(torch_dist.get_process_group_ranks(pg))


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

    def release_buffers(self) -> int:
        """Nothing is kept."""
        return 0


_HOST = torch.device("cpu")


def channel_of(facts: GroupFacts, tensor: torch.Tensor | None, name: str, what: What, nbytes: int) -> AnyChannel | None:
    """The channel for a call on the group that is about to start, or None: then its backend carries it.

    All ranks of the group must ask before the same calls. `tensor`: one of the call's; None: it has none.

    Raises:
        CollectiveError: the ranks' meeting has failed, for the reasons a wait fails.
    """
    if tensor is not None and not tensor.is_cpu:
        return None
    link = facts.link
    if link.__class__ is Channel or link.__class__ is HostsChannel:
        return link
    if link is None:
        link = facts.link = _first_link(facts)
    found: AnyChannel | None = link.advance(facts, name, what, nbytes)
    return found


def _first_link(facts: GroupFacts) -> Meeting | Refused:
    """By facts that are the same on all ranks."""
    if not sys.platform.startswith("linux"):
        return Refused("it needs Linux")
    if facts.size == 1:
        return Refused("the group has one rank")
    return Meeting() if facts.sums_locally(_HOST) else Refused("the group's backend for CPU tensors is not gloo")


def in_background(works: tuple[Any, ...]) -> None:
    """The caller will not wait for these at once: they go on meanwhile."""
    for work in works:
        if isinstance(work, HostWork):
            work.channel.background()


def sums_in_order(facts: GroupFacts, tensor: torch.Tensor) -> bool:
    """Whether every reduction of the tensor has an order of sums of ours by itself, and all ranks get equal bits."""
    return tensor.is_cpu and facts.link.__class__ in (Channel, HostsChannel)


def describe(group: Group | None = None) -> str:
    """What carries the CPU tensors of the group (None: the default group), in words."""
    facts = facts_of(group)
    if facts.link.__class__ is Channel:
        return "shared memory"
    if isinstance(facts.link, HostsChannel):
        return f"shared memory in each of {facts.link.layout.hosts} hosts, gloo between them"
    if facts.size == 1:
        return "nothing: the group has one rank"
    if isinstance(facts.link, Refused):
        return f"{facts.backend(_HOST)}, because {facts.link.why_not}"
    return f"{facts.backend(_HOST)}: the ranks have not met"


def _after_fork() -> None:
    shm_channel.forget_all()
    for facts in all_facts():
        facts.page = None  # the marks there are the parent's: others would take ours for its next call
        if facts.link is not None:
            facts.link.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
