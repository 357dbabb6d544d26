"""Checks of plain arguments of public calls: what Python would take in silence is refused by the argument's name.

``bool("no")`` is True and ``int(1.5)`` is 1, so a wrong value would decide something else than it says.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any

__all__ = ["flag", "real", "whole"]


def flag(value: Any, where: str) -> bool:
    """True, False, 1 or 0 as a bool. ``where`` names call and argument in the TypeError for anything else."""
    if isinstance(value, bool) or (isinstance(value, numbers.Integral) and value in (0, 1)):
        return bool(value)
    if type(value).__name__ in ("bool", "bool_"):  # numpy's, which is no bool
        return bool(value)
    raise TypeError(f"{where}: expected True or False, found {_shown(value)}")


def whole(value: Any, call: str, name: str, *, minimum: int) -> int:
    """A whole number (also as 1e6) of at least ``minimum``. TypeError for another type, ValueError below it."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, (bool, float)) or not hasattr(value, "__index__"):
        raise TypeError(f"{call}: expected {name} >= {minimum}, a whole number, found {_shown(value)}")
    number = operator.index(value)
    if number < minimum:
        raise ValueError(f"{call}: expected {name} >= {minimum}, found {number}")
    return number


def real(value: Any) -> bool:
    """Whether the value is a number: Python's, numpy's or a tensor of one element; no bool, no text."""
    if isinstance(value, numbers.Real):
        return not isinstance(value, bool)
    return hasattr(value, "numel") and value.numel() == 1 and value.is_floating_point()


def _shown(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})" if value is not None else "None"
