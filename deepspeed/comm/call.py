"""The way every public collective takes: membership, handle, log, bounded wait.

Owns: `Handle`, and what the log keywords of public collectives become. Does not own: what is started (`comm.py`,
`p2p.py`) nor the wait itself (`pending.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm.errors import CollectiveError
from deepspeed.comm.group_facts import Group, GroupFacts, facts_of
from deepspeed.comm.pending import Pending, WaitMode, announce
from deepspeed.comm.same_host import in_background
from deepspeed.comm.shm_channel import Channel

LogOptions = tuple[bool, str]
"""(record this call even if its kind is not recorded, the row of the log), as a call's `prof` and `log_name` say.

`debug`, their third companion in every public signature, is the name of the caller; the log finds it by itself.
"""


class Handle(Pending):
    """Result of a collective started with `async_op=True`; has torch's `Work` methods too."""

    __slots__ = ("_limit_s", "log_always", "log_name", "work")

    def __init__(
        self,
        works: tuple[Any, ...],
        finish: Callable[[], object] | None,
        facts: GroupFacts,
        name: str,
        nbytes: int,
        mode: WaitMode,
        log: LogOptions,
    ) -> None:
        super().__init__(works, finish, facts, name, "", nbytes, mode)
        self.work = works[-1] if works else None
        self.log_always, self.log_name = log
        self._limit_s: float | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        """As `Pending.wait`; True, as torch's. `timeout` replaces the limit of the group."""
        if timeout is not None:
            self._limit_s = timeout.total_seconds()
        super().wait()
        return True

    def limit_s(self) -> float:
        """See `Pending`."""
        return self.facts.timeout_s if self._limit_s is None else self._limit_s

    def is_completed(self) -> bool:
        """Whether the result is in place, or the call has failed: `wait` then tells how, at once.

        A result that needs a last step of this rank gets it here: whoever only polls finds it, as with torch's works.
        """
        works, finish = self._works, self._finish
        if works is None:
            return True
        if not super().is_completed():
            return False
        if finish is not None:
            try:
                self.wait()
            except CollectiveError:
                self._works, self._finish = works, finish  # for the `wait` that will tell
        return True

    def get_future(self) -> Any:
        """torch's future of the last underlying call; made when the result is there where that needs a last step."""
        if self.work is not None and self._finish is None:
            return self.work.get_future()
        future: Any = torch.futures.Future()
        try:
            self.wait()
        except CollectiveError as error:
            future.set_exception(error)
        else:
            future.set_result(self.result())
        return future

    def result(self) -> Any:
        """torch's list of output tensors of the last underlying call; empty where nothing had to travel."""
        return [] if self.work is None else self.work.result()


def require_initialized() -> None:
    """Raise unless the default group exists."""
    if not torch_dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call deepspeed.init_distributed() first")


def membership(group: Group | None) -> GroupFacts | None:
    """Facts of the group, or None when this rank is not in it."""
    require_initialized()
    return None if group is torch_dist.GroupMember.NON_GROUP_MEMBER else facts_of(group)


def enter(name: str, group: Group | None, nbytes: int = 0, root: int = 0) -> GroupFacts | None:
    """`membership`, and the announcement of a collective whose `nbytes` and `root` are equal on all ranks."""
    facts = membership(group)
    if facts is not None:
        announce(facts, name, "", nbytes, nbytes + root)
    return facts


def wait_mode(facts: GroupFacts, device: torch.device) -> WaitMode:
    """How to wait for a collective of tensors of `device`."""
    if facts.link.__class__ is Channel and device.type == "cpu":
        return WaitMode.SLICES
    return WaitMode.SLICES if facts.blocks_host(device) else WaitMode.STREAM


def begin(
    name: str,
    works: Any,
    facts: GroupFacts,
    mode: WaitMode,
    nbytes: int,
    async_op: bool,
    log: LogOptions,
    finish: Callable[[], object] | None = None,
) -> Handle | None:
    """A handle of the started `works` (one, several or None); waited for, and None, unless `async_op`."""
    if not isinstance(works, tuple):
        works = () if works is None else (works,)
    if not works:
        facts.calls += 1  # nothing has to travel, and yet it has been announced as the group's next call
    handle = Handle(works, finish, facts, name, nbytes, mode, log)
    if async_op:
        in_background(works)
        return handle
    handle.wait()
    return None
