"""The way every public collective takes: membership, handle, log, bounded wait.

Owns: `Handle`, and what the log keywords of public collectives become. Does not own: what is started (`comm.py`,
`p2p.py`) nor the wait itself (`pending.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist

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

    __slots__ = ("log_always", "log_name", "work")

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

    def get_future(self) -> Any:
        """torch's future of the last underlying call."""
        return None if self.work is None else self.work.get_future()

    def result(self) -> Any:
        """torch's list of output tensors of the last underlying call."""
        return None if self.work is None else self.work.result()


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
