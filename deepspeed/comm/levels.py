"""`Levels`: two nested groups, for collectives that cross the slow links between nodes once.

Owns: the pair, its numbering, and the handle of a collective of two hops. Does not own: which ranks form the groups
(`mesh.py`) and what travels (`hierarchical.py`, `quantized.py`).
Numbering: with I ranks in the inner group, the rank at place i of its inner and place o of its outer group has place
o*I + i among all: inner groups are neighbours, as `ParallelMesh.levels` makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from deepspeed.comm.group_facts import Group, GroupFacts, facts_of
from deepspeed.comm.pending import Pending, WaitMode, What

__all__ = ["Levels", "TwoHops", "one_level"]


class Levels(NamedTuple):
    """Two nested groups.

    Fields:
        inner: this rank's neighbours, joined by fast links (the ranks of a node).
        outer: the ranks at this rank's place in every inner group.
    """

    inner: Group | None
    outer: Group | None

    @property
    def size(self) -> int:
        """Ranks of both levels together."""
        return facts_of(self.inner).size * facts_of(self.outer).size

    @property
    def rank(self) -> int:
        """Place of this rank among all."""
        inner = facts_of(self.inner)
        return facts_of(self.outer).rank * inner.size + inner.rank


def one_level(group: Group | Levels | None) -> Levels | tuple[Group | None]:
    """`group` if both of its levels have ranks to talk to, else `(the one group that matters,)`."""
    if not isinstance(group, Levels):
        return (group,)
    if facts_of(group.outer).size == 1:
        return (group.inner,)
    return (group.outer,) if facts_of(group.inner).size == 1 else group


class TwoHops(Pending):
    """A collective whose second hop starts when the first has arrived: in `wait`, or before it in `advance`."""

    __slots__ = ("_first", "_second", "_start_second")

    def __init__(
        self, first: Pending, start_second: Callable[[], Pending], facts: GroupFacts, name: str, what: What, nbytes: int
    ) -> None:
        # No works of its own: both hops count and are logged themselves.
        super().__init__((), None, facts, name, what, nbytes, WaitMode.PLAIN)
        self._first: Pending | None = first
        self._second: Pending | None = None
        self._start_second = start_second

    def advance(self) -> None:
        """Wait for the first hop and start the second, which then travels until `wait`. Idempotent.

        All ranks of both groups must call at the same place of their order of collectives.
        """
        first, self._first = self._first, None
        if first is not None:
            first.wait()
            self._second = self._start_second()

    def wait(self) -> None:
        """As `Pending.wait`; collectives started since by this rank must not need the second hop to finish."""
        if self._works is None:
            return
        self.advance()
        self._works = None
        if self._second is not None:
            self._second.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would return without blocking for other ranks."""
        return self._works is None or (self._second is not None and self._second.is_completed())
