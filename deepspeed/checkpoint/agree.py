"""All ranks or none: doing a part of a save or load together, and hearing of each other's failures.

Invariant: after :func:`together` either every rank goes on, or every rank has raised the same error. Waiting is
bounded by the process group's timeout (``deepspeed.comm``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.comm import comm, objects

T = TypeVar("T")


def gather(value: Any, what: str) -> list[Any]:
    """Every rank's ``value``, by global rank."""
    everyone: list[Any] = [value]
    if comm.is_initialized() and comm.get_world_size() > 1:
        everyone = [None] * comm.get_world_size()
        objects.all_gather_object(everyone, value, what=what)
    return everyone


def together(
    doing: str,
    work: Callable[[], T],
    share: Callable[[T], Any] | None = None,
    gather: Callable[[Any, str], list[Any]] = gather,
) -> tuple[T, list[Any]]:
    """Run ``work`` on every rank. Returns its result here, and what ``share`` makes of the result on each rank.

    ``gather``: how the ranks hear of each other.

    Raises CheckpointError, the same on all ranks, when ``work`` raised anywhere; its cause is this rank's own error.
    """
    result: Any = None
    shared: Any = None
    error: Exception | None = None
    try:
        result = work()
        shared = share(result) if share is not None else None
    except Exception as caught:  # whatever it was: the other ranks must hear of it before it is raised
        error = caught
    reports = gather((_text(error), shared), doing)
    failures = {rank: text for rank, (text, _) in enumerate(reports) if text is not None}
    if failures:
        raise CheckpointError(_summary(doing, failures, len(reports))) from error
    return result, [shared for _, shared in reports]


def _text(error: Exception | None) -> str | None:
    if error is None:
        return None
    return (
        str(error) if isinstance(error, (CheckpointError, ValueError, OSError)) else f"{type(error).__name__}: {error}"
    )


def _summary(doing: str, failures: dict[int, str], world: int) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, text in failures.items():
        by_text.setdefault(text, []).append(rank)
    lines = []
    for text, ranks in by_text.items():
        if len(ranks) == world:
            lines.append(text)
        else:
            lines.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}")
    return f"{doing}: " + "; ".join(lines)
