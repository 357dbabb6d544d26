"""A ZeRO stage is a triple of placements: where parameters, gradients and optimizer state live.

Each of the three is REPLICATED or SHARDED over a named mesh axis; nothing else in the core asks for "the stage".

    | stage | parameter  | gradient                             | master and optimizer state |
    |-------|------------|--------------------------------------|----------------------------|
    | 0     | replicated | replicated                           | replicated                 |
    | 1     | replicated | replicated, reduced at the boundary  | sharded                    |
    | 2     | replicated | sharded, reduced in every backward   | sharded                    |
    | 3     | sharded    | sharded, reduced in every backward   | sharded                    |

MiCS is the row of stage 3 over the axis ``zero_inner`` (blocks of ``mics_shard_size`` neighbours), whose gradients are
added up over ``zero_outer`` once per step. hpZ is the row of stage 3 with a second copy of released parameters, sharded
over the axis ``hpz`` (``routes.SecondaryShard``).

An axis of size 1 degenerates every row to "replicated": there is nothing to shard and nothing to send.
Source of the stages: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Spread(Enum):
    """How one kind of tensor is spread over the ranks of an axis."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


@dataclass(frozen=True, slots=True)
class Placement:
    """The triple, and the mesh axis that shards (``"zero"`` for dense parameters)."""

    parameter: Spread
    gradient: Spread
    state: Spread
    axis: str = "zero"

    @classmethod
    def for_stage(cls, stage: int, axis_size: int, axis: str = "zero", *, offload: bool = False) -> Placement:
        """The row of ``stage`` on an axis of ``axis_size`` ranks. Raises ValueError for a stage without a row.

        ``offload``: parameters live off the device, so that one rank alone has to fetch and release them, too.
        """
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_optimization.stage: no placement for stage {stage}; stages are 0, 1, 2 and 3")
        split = Spread.SHARDED if axis_size > 1 or (offload and stage >= 3) else Spread.REPLICATED
        return cls(
            parameter=split if stage >= 3 else Spread.REPLICATED,
            gradient=split if stage >= 2 else Spread.REPLICATED,
            state=split if stage >= 1 else Spread.REPLICATED,
            axis=axis,
        )

    @property
    def parameter_sharded(self) -> bool:
        return self.parameter is Spread.SHARDED

    @property
    def state_sharded(self) -> bool:
        return self.state is Spread.SHARDED

    @property
    def reduces_every_backward(self) -> bool:
        """Sharded gradients must leave the rank in each backward; replicated ones wait for the boundary."""
        return self.gradient is Spread.SHARDED
