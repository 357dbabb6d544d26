"""What is wrong with a config, as data, and the one error that carries all of it.

Owns `Problem` (one line: where, found, expected, what to change), `DeepSpeedConfigError`, and the search for the
nearest known key. Does not know any section. Invariant: a problem always names a full key path.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

SECRET = "api_key"
"""Keys of this name hold a secret: their values are never printed."""


@dataclass(frozen=True)
class Problem:
    """One thing to change in a config."""

    path: str
    """Full dotted key path as the user wrote it."""
    detail: str
    """What was found and what is allowed."""
    change: str = ""
    """What to do about it."""
    keys: tuple[str, ...] = ()
    """Canonical paths it depends on: a check over a value that is itself wrong is not reported a second time."""
    wrong_type: bool = False
    """The reference raises TypeError here."""

    def __str__(self) -> str:
        """`path: detail; change`."""
        return f"{self.path}: {self.detail}" + (f"; {self.change}" if self.change else "")


class DeepSpeedConfigError(ValueError, AssertionError):
    """Every problem of one config, a line each.

    Code written against the reference catches several classes for config mistakes, so this one is a ValueError
    (communication dtype, allreduce op, autocast, duplicate JSON keys, undecodable base64, and pydantic's
    ValidationError, which is a ValueError and cannot be subclassed) and an AssertionError (batch triple, fp16 with
    bf16, master weights, deprecated key beside its new name, writer words, autotuning folders, curriculum). Where the
    reference raises TypeError ("auto" left in a batch key, a section that is no mapping, a source that is neither
    mapping nor text) the class raised is `DeepSpeedConfigTypeError`. AttributeError (a null or text for a dict-style
    section) is not imitated: it would be swallowed by `hasattr`.

    `problems` holds the lines as data; it is empty for an error raised with a plain message.
    """

    def __init__(self, message: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[Problem, ...] = tuple(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep `problems` when the error travels between processes."""
        return type(self), (str(self), self.problems)


class DeepSpeedConfigTypeError(DeepSpeedConfigError, TypeError):
    """A config error that the reference reports as TypeError."""


def config_error(problems: Sequence[Problem], origin: str) -> DeepSpeedConfigError:
    """One error for `problems` of the config that came from `origin` ("dict", a path, ...)."""
    count = f"{len(problems)} problem" + ("s" if len(problems) != 1 else "")
    message = "\n".join([f"DeepSpeed config ({origin}) has {count}:", *(f"  {problem}" for problem in problems)])
    kind = DeepSpeedConfigTypeError if any(problem.wrong_type for problem in problems) else DeepSpeedConfigError
    return kind(message, problems)


def show(value: Any, limit: int = 60) -> str:
    """A value as the user would write it in JSON, with its type: `"2" (string)`, `2.5 (number)`."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    if isinstance(value, dict):
        kind = "mapping"
    elif isinstance(value, (list, tuple)):
        kind = "list"
    else:
        kind = kinds.get(type(value), type(value).__name__)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    return text if value is None else f"{text} ({kind})"


def edit_distance(left: str, right: str, limit: int) -> int:
    """Optimal string alignment distance (insert, delete, replace, swap neighbours), cut off above `limit`."""
    if abs(len(left) - len(right)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        new = [i]
        for j, b in enumerate(right, 1):
            cost = min(row[j] + 1, new[j - 1] + 1, row[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            new.append(cost)
        if min(new) > limit:
            return limit + 1
        before, row = row, new
    return row[-1]


def _plain(key: str) -> str:
    return key.strip().lower().replace("-", "_").replace(" ", "_")


def near_miss(key: str, known: Iterable[str]) -> str | None:
    """The known key that `key` was meant to be, by one or two edits; None when nothing is that close.

    Short names are close to many words, so up to 3 letters only case, blanks and dashes may differ, up to 7 letters
    one edit, else two.
    """
    text = _plain(key)
    best: tuple[int, str] | None = None
    for name in known:
        shorter = min(len(text), len(name))
        limit = 0 if shorter <= 3 else 1 if shorter <= 7 else 2
        distance = edit_distance(text, _plain(name), limit)
        if distance <= limit and (best is None or distance < best[0]):
            best = (distance, name)
    return best[1] if best else None


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The most similar known key, however far within reason: a hint, not a verdict.

    A key that is the first words of one known key alone (`topk` of `topk_ratio`) means that one.
    """
    names = list(known)
    close = near_miss(key, names)
    if close:
        return close
    longer = [name for name in names if _plain(name).startswith(_plain(key) + "_")]
    if len(longer) == 1:
        return longer[0]
    import difflib  # only on the way to an error

    found = difflib.get_close_matches(_plain(key), names, n=1, cutoff=0.6)
    return found[0] if found else None
