"""Publishing: every rank's updated piece of the flat parameter buffer goes to all ranks.

One all-gather per segment, in place: a rank's input is its own piece of the output. Segments are published as soon
as their masters are cast, so with asynchronous work handles the wire runs under the update of the next segment.
"""

from __future__ import annotations

from typing import Any, Protocol

from deepspeed.comm import collectives
from deepspeed.runtime.zero.layout import Segment
from deepspeed.runtime.zero.shard_group import ShardGroup


class Publisher(Protocol):
    """What the stepper may ask: :class:`ParamPublisher` where parameters are whole, else ``gather.ShardPublisher``."""

    def publish(self, group: ShardGroup, segment: Segment) -> None: ...
    def wait(self) -> None: ...


class ParamPublisher:
    """All-gathers updated parameters over ``process_group``; ``overlap`` leaves collectives in flight."""

    def __init__(self, process_group: Any, *, overlap: bool) -> None:
        self.process_group = process_group
        self.overlap = overlap
        self._in_flight: list[collectives.Pending] = []

    def publish(self, group: ShardGroup, segment: Segment) -> None:
        def what() -> str:
            names = [group.names[index] for index, *_ in group.layout.slots_in(segment)]
            return f"updated parameters of optimizer group {group.group_index}: {names[0]} ... {names[-1]}"

        pending = collectives.all_gather(
            group.model_segment(segment), group.model_piece(segment), self.process_group,
            what=what, async_op=self.overlap, key=segment.index + 1,
        )  # fmt: skip
        if self.overlap:
            self._in_flight.append(pending)

    def wait(self) -> None:
        """All published parameters are in place when this returns."""
        for pending in self._in_flight:
            pending.wait()
        self._in_flight.clear()
