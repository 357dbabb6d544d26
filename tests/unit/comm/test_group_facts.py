"""Facts of a group go with the group, and stay out of the way when the interpreter ends."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed.comm import group_facts


class Closed:
    def __init__(self) -> None:
        self.count = 0

    def close(self) -> None:
        self.count += 1


@pytest.mark.parametrize(("finalizing", "closed"), ((False, 1), (True, 0)))
def test_a_group_that_dies_with_the_interpreter_is_left_alone(finalizing: bool, closed: int) -> None:
    class Facts:
        page = None
        link = Closed()
        ref: Any = None

    class Reference: ...

    facts, key = Facts(), -17
    facts.link = Closed()
    facts.ref = Reference()
    group_facts._table[key] = facts  # type: ignore[assignment]
    try:
        group_facts._forget(key, lambda: finalizing)(facts.ref)
        assert facts.link.count == closed
    finally:
        group_facts._table.pop(key, None)
