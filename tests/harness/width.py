"""Rows of the large tables that only a wide run includes: `make test ARGS=--wide`.

The daily run has every kind of row; the wide one has their whole product. Nothing is skipped in silence: pytest counts
what it deselects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def wide(*values: Any) -> Any:
    """One row of the wide run alone."""
    return pytest.param(*values, marks=pytest.mark.wide)


def product(*axes: Iterable[Any], daily: Callable[..., bool]) -> list[Any]:
    """All rows of `axes`; those for which `daily(*row)` is false belong to the wide run."""
    return [row if daily(*row) else wide(*row) for row in itertools.product(*axes)]
