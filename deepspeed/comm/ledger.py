"""The ledger: which collective each rank of this machine has started, so that ranks that diverge are told at once.

Backends pair whatever they are handed. Two ranks that start different collectives wait for the whole time limit, or
exchange each other's bytes in silence, or, when sizes differ, gloo ends the process. So each rank writes a mark of a
collective before it starts it, and reads the marks of its neighbours: a different mark for the same call is an error
on the spot, before any data has moved.

Owns: a small shared file with one page per rank and group, and the comparison. Does not own: the error (`watch.py`).
Invariant: no false alarm. Two marks are compared only when both the package's count of calls on the group and the
backend's own agree; then they are the same call, whatever else the program did on the group (transfers between two
ranks and direct calls of torch.distributed shift one count or the other, and the comparison falls silent).

A mark is one aligned 64-bit word, so a reader sees all of it or nothing:
    16 bits count of the package, 16 bits count of the backend, 32 bits kind and size of the collective.
Cost: one store and up to eight loads per collective, about a microsecond. Ranks on other machines have pages in their
own file and are not compared.

The name of the file goes once all ranks of the machine have it open. Of a job that ended before that it stays: so each
holder keeps a shared lock, and whoever opens a ledger removes old ones that nobody holds.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
import time
import uuid
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

# Words of a page: one for the group's name, the rest a ring of marks.
_PAGE_WORDS = 64
_RING = _PAGE_WORDS - 1
_PAGES_PER_RANK = 64
_RANK_WORDS = _PAGE_WORDS * _PAGES_PER_RANK
# Neighbours in the group whose marks are read: enough for a divergence to be seen by somebody.
_MAX_PEERS = 8
# The file is sparse, 32 KiB per rank; beyond this many ranks the address space is not worth it.
_MAX_RANKS = 4096

_PREFIX = "deepspeed-ledger-"
_LEFT_OVER_S = 600.0  # ranks of a job come within this time of each other

# Kinds of collectives; the number is part of the mark, so that the other rank's kind can be named.
_KINDS = (
    "another collective",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "all_to_all",
    "barrier",
    "reduce",
    "gather",
    "scatter",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "a call that failed at its start",
)
_EMPTY_PAGE = memoryview(bytes(_PAGE_WORDS * 8)).cast("Q")
_KIND_NUMBERS = {name: number for number, name in enumerate(_KINDS)}
_FAILED = len(_KINDS) - 1 << 27


class Ledger:
    """The file of one job on this machine."""

    def __init__(self, path: str, rank: int, world_size: int) -> None:
        self.rank = rank
        self._path: str | None = path
        self._world_size = world_size
        nbytes = world_size * (1 + _RANK_WORDS) * 8
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        self._descriptor = os.open(path, flags, 0o600)
        try:
            _lock(self._descriptor, alone=False)
            os.ftruncate(self._descriptor, nbytes)
            self._map = mmap.mmap(self._descriptor, nbytes)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.words: memoryview | None = memoryview(self._map).cast("Q")
        self.words[rank] = 1  # the file starts with a word per rank: it has the file open

    def page(self, group: Any, name: str, ranks: Sequence[int], position: int) -> Page | None:
        """This rank's page of a group, or None when its place is taken by another group."""
        label = zlib.crc32(name.encode()) | 1 << 32
        place = self._world_size + label % _PAGES_PER_RANK * _PAGE_WORDS
        own = place + self.rank * _RANK_WORDS
        if self.words is None or self.words[own] not in (0, label):
            return None
        self.wipe(own)
        self.words[own] = label
        count = len(ranks)
        peers = [ranks[(position + step) % count] for step in range(1, min(count, _MAX_PEERS + 1))]
        return Page(self, group, label, own, [(peer, place + peer * _RANK_WORDS) for peer in peers])

    def wipe(self, page: int) -> None:
        """Clear the page that starts at this word."""
        if self.words is not None:
            self.words[page : page + _PAGE_WORDS] = _EMPTY_PAGE

    def unlink(self) -> None:
        """Remove the file's name; those who have it open keep it. Idempotent."""
        path, self._path = self._path, None
        if path is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(self._descriptor)  # and with it the lock

    def unlink_when_shared(self, local_size: int) -> None:
        """Remove the name once all `local_size` ranks of this machine have the file open: nothing is left by a kill."""
        words = self.words
        if self._path is not None and words is not None and sum(words[: self._world_size]) >= local_size:
            self.unlink()

    def close(self) -> None:
        """Remove the name and the mapping; pages fall silent. Idempotent."""
        self.unlink()
        words, self.words = self.words, None
        if words is not None:
            words.release()
            self._map.close()


class Page:
    """The marks of one group, of this rank and of the neighbours it compares itself with."""

    __slots__ = ("_group", "_label", "_ledger", "_own", "_peers")

    def __init__(self, ledger: Ledger, group: Any, label: int, own: int, peers: list[tuple[int, int]]) -> None:
        self._ledger = ledger
        self._label = label
        self._own = own
        self._peers = peers
        self._group = weakref.ref(group)

    def mark(self, call: int, kind: str, size: int) -> str | None:
        """Write the mark of call number `call` and compare; returns what another rank has started instead, or None.

        Args:
            call: count of collectives the package has started on the group, this one included.
            kind: name of the collective.
            size: whatever has to be equal on all ranks: bytes, root, a caller's key.
        """
        words, group = self._ledger.words, self._group()
        if words is None or group is None:
            return None
        content = _KIND_NUMBERS.get(kind, 0) << 27 | (size ^ size >> 27) & 0x7FFFFFF
        counts = (call & 0xFFFF) << 16 | group._get_sequence_number_for_group() & 0xFFFF
        word = counts << 32 | content
        place = 1 + call % _RING
        words[self._own + place] = word
        return self._compare(words, word, place, starting=True)

    def mark_failed(self, call: int) -> None:
        """This rank could not start a call that it has marked. Ranks that could are told of it in their wait."""
        words = self._ledger.words
        if words is not None:
            place = self._own + 1 + call % _RING
            words[place] = words[place] & ~0xFFFFFFFF | _FAILED

    def compare(self, call: int) -> str | None:
        """Look again at a call that has been marked: what another rank has started instead, or None."""
        words = self._ledger.words
        if words is None:
            return None
        place = 1 + call % _RING
        return self._compare(words, words[self._own + place], place)

    def _compare(self, words: memoryview, word: int, place: int, starting: bool = False) -> str | None:
        for rank, page in self._peers:
            theirs = words[page + place]
            # Equal counts, other content: the same call and another collective. A page of another group is no peer.
            if theirs != word and theirs ^ word < 1 << 32 and words[page] == self._label:
                if starting and theirs & 0xFFFFFFFF == _FAILED:
                    continue  # this rank may be about to fail in the same way
                ours, other = _KINDS[(word & 0xFFFFFFFF) >> 27], _KINDS[(theirs & 0xFFFFFFFF) >> 27]
                what = other if other != ours else f"{other} of another size or source"
                return f"rank {rank} has started {what} as the same call"
        return None

    def clear(self) -> None:
        """Forget the marks: the group has ended, and a new one may get its name."""
        self._ledger.wipe(self._own)


def remove_left_over(folder: str) -> None:
    """Remove ledgers in ``folder`` that have stood for ten minutes at least and that no process holds."""
    before = time.time() - _LEFT_OVER_S
    for entry in os.scandir(folder):
        # Of other users, gone meanwhile, or locked: it is in use.
        with contextlib.suppress(OSError):
            if entry.name.startswith(_PREFIX) and entry.stat(follow_symlinks=False).st_mtime < before:
                descriptor = os.open(entry.path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
                try:
                    _lock(descriptor, alone=True)
                    os.unlink(entry.path)
                finally:
                    os.close(descriptor)


def _lock(descriptor: int, *, alone: bool) -> None:
    """Lock an open file, shared or ``alone``, until it is closed. Raises BlockingIOError where others prevent it."""
    import fcntl  # not on every system

    fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)


def open_ledger(store: Any, rank: int, world_size: int) -> Ledger | None:
    """The ledger of the job whose default group uses `store`; None where it cannot be had."""
    if not sys.platform.startswith("linux") or world_size > _MAX_RANKS:
        return None
    try:
        # Whoever comes first names the job; nobody waits.
        token = store.compare_set("deepspeed/ledger", "", uuid.uuid4().hex).decode()
    except (RuntimeError, NotImplementedError):  # a store without this operation
        return None
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    try:
        remove_left_over(folder)
        return Ledger(os.path.join(folder, _PREFIX + token), rank, world_size)
    except OSError:
        return None
