"""The error every rank raises when a collective cannot finish.

Owns: the exception class alone. Its text is written by `watch.py`, which knows what the other ranks do.
"""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """A collective failed or ran out of time on this rank, or another rank reported such a failure.

    The text names this rank, the collective, what it moved, and what every other rank was doing. The same facts are
    attributes so that a program can read them.
    """

    def __init__(self, message: str, *, rank: int = -1, collective: str = "", what: str = "", others: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.collective = collective
        self.what = what
        self.others = others

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the attributes when the error travels to another process."""
        return (_rebuild, (str(self), self.rank, self.collective, self.what, self.others))


def _rebuild(message: str, rank: int, collective: str, what: str, others: str) -> CollectiveError:
    return CollectiveError(message, rank=rank, collective=collective, what=what, others=others)
