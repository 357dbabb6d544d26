"""First cut: names the failing collective on this rank."""

from __future__ import annotations

from typing import Any

from deepspeed.comm.errors import CollectiveError

waiting: list[Any] = []


def ensure_started() -> None: ...
def waits_in_slices(work: Any) -> bool:
    return True


def aborted() -> bool:
    return False


def failure(pending: Any, cause: BaseException | None) -> CollectiveError:
    return CollectiveError(f"rank {pending.facts.rank}: {pending.name} of {pending.describe_what()} failed: {cause}")
