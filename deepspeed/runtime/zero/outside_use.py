"""What this rank gathers outside of forward and backward, for the error where the others do not join in.

There every rank runs the same code; elsewhere a gather is often under an ``if rank == 0``, which no rank can see of the
others. So the use is noted with its place when it starts, and told when that gather, or a later one of the same
optimizer step that it has put out of order, cannot finish.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.comm.activity import main_thread_place

__all__ = ["OutsideUse"]


@dataclass
class OutsideUse:
    """``use``: in words, ``norm reads parameter 'w'``; ``by_hand``: by `GatheredParameters`; ``current``: now."""

    use: str
    place: str
    by_hand: bool = False
    current: bool = True

    @staticmethod
    def here(use: str, *, by_hand: bool = False) -> OutsideUse:
        """A use that the running code makes."""
        return OutsideUse(use, main_thread_place(), by_hand)

    def clause(self) -> str:
        """For the line that every rank sees."""
        return f", because {self.use} outside forward and backward" if self.current else ""

    def advice(self) -> str:
        """What to do, for the error in a gather."""
        when = "Here this rank gathers" if self.current else "Before, this rank has gathered"
        remedy = (
            "every rank must enter and leave that context"
            if self.by_hand
            else "put `with deepspeed.zero.GatheredParameters([parameter]):` around that code on all ranks, or read a "
            "copy on all ranks with deepspeed.utils.safe_get_full_fp32_param(parameter)"
        )
        return (
            f"{when} outside forward and backward: {self.use}, at {self.place}. ZeRO stage 3 gathers "
            f"on every rank or on none. Where the others do not come there (`if rank == 0:`), {remedy}"
        )
