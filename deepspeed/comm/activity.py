"""What this process is doing, in words, and how the answers of many ranks become a few lines.

Owns: the list of waits under way in this process, the description of the main thread's place, and the summary.
Does not own: asking the other ranks (`watch.py`). Pure but for `sys._current_frames`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as torch_dist

# Longest text of one rank that travels through the store, in characters.
MAX_TEXT = 600
# Distinct answers that an error lists before it only counts the rest.
MAX_LINES = 12
NO_ANSWER = "no answer (its process has ended or is stuck in native code)"

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB_FOLDER = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


class Facts(Protocol):
    """The part of `group_facts.GroupFacts` that a description needs."""

    rank: int
    size: int
    name: str
    calls: int


class Waiter(Protocol):
    """A wait under way (`pending.Pending`)."""

    name: str
    nbytes: int
    sequence: int

    @property
    def facts(self) -> Facts:
        """The group of the call."""

    def describe_what(self) -> str:
        """What the collective is for; may be empty; lines after the first are advice."""


# Waits under way, innermost last. Appended and removed by `Pending.wait`, read by the watch thread.
waiting: list[Waiter] = []


def describe_call(waiter: Waiter) -> str:
    """One phrase: the collective, which call of its group it is, size and purpose."""
    facts = waiter.facts
    group = "the default group" if facts.name == "default" else f"group {facts.name!r}"
    call = f"call {waiter.sequence} of {group}" if waiter.sequence else group
    text = f"{waiter.name} ({call}, {facts.size} ranks"
    if waiter.nbytes:
        text += f", {format_bytes(waiter.nbytes)}"
    text += ")"
    what = waiter.describe_what().split("\n", 1)[0]
    return f"{text} of {what}" if what else text


def advice_of(waiter: Waiter) -> str:
    """The lines of `what` after the first: what the caller recommends when this call cannot finish."""
    lines = waiter.describe_what().split("\n", 1)
    return lines[1] if len(lines) > 1 else ""


def own_activity() -> str:
    """What this process does now: the collective it waits in, or the place its main thread has reached."""
    place = main_thread_place()
    try:
        waiter = waiting[-1]
    except IndexError:
        return f"is at {place}"[:MAX_TEXT]
    return f"waits in {describe_call(waiter)}, called at {place}"[:MAX_TEXT]


def main_thread_place() -> str:
    """`file:line (function)` of the innermost user frame of the main thread, and the library function it is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "an unknown place"
    innermost = frame
    user: FrameType | None = frame
    while user is not None and _is_library(user.f_code.co_filename):
        user = user.f_back
    if user is None:
        user = innermost
    text = f"{user.f_code.co_filename}:{user.f_lineno} ({user.f_code.co_name})"
    if user is not innermost and not innermost.f_code.co_filename.startswith(_PACKAGE_FOLDER):
        text += f", inside {innermost.f_code.co_name} ({os.path.basename(innermost.f_code.co_filename)})"
    return text


def torch_collective_place() -> str | None:
    """Where the main thread is inside a collective of `torch.distributed` that the program called itself, or None.

    Such calls leave no trace here, and their errors do not come our way. Our own calls of torch do not count.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    name = None
    while frame is not None and _is_library(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_PACKAGE_FOLDER):
            return None
        if frame.f_code.co_filename == torch_dist.distributed_c10d.__file__:
            name = frame.f_code.co_name  # the outermost one is what the program called
        frame = frame.f_back
    if name is None or frame is None:
        return None
    return f"torch.distributed.{name}, called at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _is_library(path: str) -> bool:
    if path.startswith((_PACKAGE_FOLDER, _TORCH_FOLDER, "<")):
        return True
    return path.startswith(_STDLIB_FOLDER) and "site-packages" not in path and "dist-packages" not in path


def summarise(answers: Mapping[int, str], missing: Iterable[int] = ()) -> list[str]:
    """One line per distinct answer, most frequent last so that the odd rank stands first; at most MAX_LINES lines."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(answers):
        by_text.setdefault(answers[rank], []).append(rank)
    silent = sorted(missing)
    if silent:
        by_text.setdefault(NO_ANSWER, []).extend(silent)
    ordered = sorted(by_text.items(), key=lambda item: (len(item[1]), item[1][0]))
    lines = [f"{format_ranks(ranks)}: {text}" for text, ranks in ordered[:MAX_LINES]]
    rest = ordered[MAX_LINES:]
    if rest:
        count = sum(len(ranks) for _, ranks in rest)
        lines.append(f"{count} more ranks in {len(rest)} other places")
    return lines


def format_ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-7, 9`: sorted ranks as ranges."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans[:MAX_LINES])
    if len(spans) > MAX_LINES:
        shown += ", ..."
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def format_bytes(nbytes: float) -> str:
    """Bytes as text with a binary unit: `64.0 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
