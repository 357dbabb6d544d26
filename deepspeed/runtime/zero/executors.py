"""``Executors``: the ways to update units that stand beside the inline one, as one thing for the optimizer to hold.

    disk          masters and states are in files, and pass through buffers         (``disk_states.py``)
    speculation   units are updated while backward still runs, and undone if need be  (``speculation.py``)
    zenflow       important columns are updated at once, the others later           (``zenflow/``)

Each is None where it is off. Owns: which of them are on, and what all of them are told: a backward begins, states are
read, loaded, given up. Does not own: the order of units in an update (``stepper.py``, which asks each of them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.runtime.zero.disk_states import DiskStates
from deepspeed.runtime.zero.options import OffloadOptions
from deepspeed.runtime.zero.shard_group import BoundFragment, ShardGroup
from deepspeed.runtime.zero.speculation import Speculation
from deepspeed.runtime.zero.zenflow import resume
from deepspeed.runtime.zero.zenflow.executor import ZenFlow

if TYPE_CHECKING:
    from deepspeed.runtime.zero.publish import Publisher
    from deepspeed.runtime.zero.routes import ShardRanks
    from deepspeed.runtime.zero.stepper import Unit


class Executors:
    """See the module docstring. ``base`` updates the leaves of ``groups``, a list that may grow before :meth:`wire`."""

    def __init__(self, base: torch.optim.Optimizer, groups: Sequence[ShardGroup], shards: ShardRanks) -> None:
        self.base, self.shards = base, shards
        self.groups: Sequence[ShardGroup] = groups
        self.disk: DiskStates | None = None
        self.speculation: Speculation | None = None
        self.zenflow: ZenFlow | None = None

    def wire(
        self,
        offload: OffloadOptions,
        units: Sequence[Unit],
        *,
        reducer: Any,
        publisher: Publisher,
        at_boundary: Callable[[], bool],
        unscale: Callable[[], float],
    ) -> None:
        """Take charge of ``units``, those of an earlier call among them, as ``offload`` says. Collective then.

        ``at_boundary`` and ``unscale`` are asked at the start of each backward.
        """
        if offload.disk is not None:
            store = offload.disk(max([unit.numel * unit.group.master_dtype.itemsize for unit in units], default=1))
            self.disk = DiskStates(store, self.base, units, self.disk)
        if offload.speculate and reducer.replicas == 1:
            if self.speculation is not None:
                self.speculation.close()
            self.speculation = Speculation(self.base, units, at_boundary=at_boundary, unscale=unscale)
            reducer.on_landed = self.speculation.landed
        if offload.zenflow is None or not any(unit.group.offloaded for unit in units):
            return
        before, steps = self.zenflow, offload.zenflow.select_steps
        if before is not None:
            before.hold_still()
            before.close()
            steps = before.select_steps
        self.zenflow = ZenFlow(self.base, self.groups, units, offload.zenflow, self.shards, publisher.publish)
        self.zenflow.select_steps = steps
        if before is not None:
            self.states_loaded(publisher, with_states=True)

    # ---- what all of them are told ---------------------------------------------------------------------------------

    def begin_backward(self, await_readers: Callable[[], None]) -> None:
        """``await_readers`` returns when states may be written to."""
        if self.speculation is not None:
            await_readers()
            self.speculation.begin()

    def roll_back(self) -> None:
        """Masters and states are those of the last step when this returns."""
        if self.speculation is not None:
            self.speculation.roll_back()

    def hold_still(self) -> None:
        """As :meth:`roll_back`, and what leaves and states of the base optimizer hold is up to date."""
        self.roll_back()
        if self.zenflow is not None:
            self.zenflow.hold_still()

    def settle_states(self, bounds: Sequence[BoundFragment]) -> None:
        """States of these fragments, just made or loaded, go where they are kept."""
        if self.disk is not None:
            self.disk.settle(bounds)
        if self.zenflow is None:
            resume.drop(self.base, self.groups, bounds)

    def states_loaded(self, publisher: Publisher, *, with_states: bool) -> None:
        """Weights and masters, and with ``with_states`` states, have been loaded on all ranks. Collective."""
        if self.zenflow is not None:
            self.zenflow.adopt(with_states=with_states)
            publisher.wait()

    @property
    def failure(self) -> Callable[[], BaseException | None] | None:
        """Asks why work beside training has failed on this rank, if it has; None where there is no such work."""
        return None if self.zenflow is None else self.zenflow.failure

    def refuse_spoilt(self) -> None:
        """Raise RuntimeError where such a failure has left states that are of no step."""
        if self.zenflow is not None:
            self.zenflow.deferred.refuse_spoilt()

    def close(self) -> None:
        """Stop threads, give back buffers and files."""
        for executor in (self.speculation, self.zenflow, self.disk):
            if executor is not None:
                executor.close()
        self.disk = self.speculation = self.zenflow = None
        self.groups = ()
