"""A group of all ranks for a thread beside training: its calls have an order of their own and move host bytes alone.

Training may be in any collective meanwhile, on any backend, and may even end its process groups: the connections of
this group are its own and live as long as this object.

Owns: the group and the encoding of what it moves. Does not own: threads (one at a time may call).
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm.errors import CollectiveError
from deepspeed.comm.group_facts import group_timeout

__all__ = ["SideGroup"]


class SideGroup:
    """See the module docstring. Making one is collective; a world of one rank needs no group."""

    def __init__(self, purpose: str, at_least: timedelta = timedelta(0)) -> None:
        """``at_least``: wait this long for other ranks, if the default group's limit is shorter."""
        self.size, self.rank = 1, 0
        self._group: Any = None
        if torch_dist.is_initialized() and torch_dist.get_world_size() > 1:
            self.size, self.rank = torch_dist.get_world_size(), torch_dist.get_rank()
            limit = max(group_timeout(torch_dist.group.WORLD), at_least)
            self._group = torch_dist.new_group(backend="gloo", timeout=limit, group_desc=purpose)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's ``value``, by rank. Raises CollectiveError when a rank does not answer in time or is gone."""
        if self._group is None:
            return [value]
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        try:
            counts = self._all_gather(torch.tensor([payload.numel()]))
            longest = int(max(counts))
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: payload.numel()] = payload
            found = self._all_gather(padded)
        except RuntimeError as error:
            raise CollectiveError(f"{what}: a rank has ended or does not answer ({error})") from error
        return [pickle.loads(one[: int(count)].numpy().tobytes()) for one, count in zip(found, counts, strict=True)]

    def _all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """From the group object itself: the registry of torch.distributed may have been emptied meanwhile."""
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._group.allgather([found], [own]).wait()
        return found

    def start_minimum(self, number: int) -> PendingMinimum:
        """Begin to find the smallest of all ranks' numbers."""
        value = torch.tensor([number])
        if self._group is None:
            return PendingMinimum(value, None)
        options: Any = torch_dist.AllreduceOptions()
        options.reduceOp = torch_dist.ReduceOp.MIN
        return PendingMinimum(value, self._group.allreduce([value], options))

    def close(self) -> None:
        """Leave the group. All ranks close theirs; nothing may be under way."""
        group, self._group = self._group, None
        if group is not None and torch_dist.is_initialized() and group in torch_dist.distributed_c10d._world.pg_map:
            torch_dist.destroy_process_group(group)


class PendingMinimum:
    """A reduction under way."""

    def __init__(self, value: torch.Tensor, work: Any) -> None:
        self._value, self._work = value, work

    def wait(self) -> int:
        """The result, the same on all ranks. Raises CollectiveError when a rank has ended."""
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise CollectiveError(f"a rank has ended or does not answer ({error})") from error
        return int(self._value)
