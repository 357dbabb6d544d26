"""A sum that is waited for at once, through shared memory, in as few Python steps as there can be.

What a small all-reduce between ranks of one host costs is the Python around it: the general way (`comm.py`) makes a
handle, closures and a list of works for calls that may be asynchronous, of several tensors, of any layout.

Owns: that short way. Does not own: any call that is not a plain sum of one contiguous CPU tensor.
Invariant: the same mark, count and call of the library, in the same order, as the general way makes: some ranks of a
group may go by the one and some by the other.
"""

from __future__ import annotations

import torch
import torch.distributed as torch_dist

from deepspeed.comm import pending
from deepspeed.comm.call import Handle
from deepspeed.comm.group_facts import Group, facts_of
from deepspeed.comm.pending import WaitMode, announce
from deepspeed.comm.shm_channel import Channel, reduction_code

__all__ = ["sum_at_once"]

# Longer than ranks that compute alike are apart; after that the bounded wait of the general way takes over.
_FIRST_US = 300
_SUM = 0  # the library's number


def sum_at_once(tensor: torch.Tensor, group: Group | None) -> bool:
    """Sum `tensor` over the ranks, in place, if it can be done this way; False: nothing has been started.

    Raises:
        CollectiveError: as every wait.
    """
    if group is not None and group is torch_dist.GroupMember.NON_GROUP_MEMBER:
        return False
    facts = facts_of(group)
    channel = facts.link
    if channel.__class__ is not Channel or pending.observer is not None:
        return False
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    code = reduction_code(tensor.dtype, tensor.dtype, _SUM, False)
    if code is None:
        return False
    nbytes = tensor.nbytes
    announce(facts, "all_reduce", "", nbytes, nbytes)
    work = channel.all_reduce(tensor, code)
    if work.is_done_within(_FIRST_US):
        facts.calls += 1
    else:
        Handle((work,), None, facts, "all_reduce", nbytes, WaitMode.SLICES, (False, "")).wait()
    return True
