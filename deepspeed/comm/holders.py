"""Who else holds the memory of a tensor: asked before it is used for something else, or counted as free.

A collective of gloo runs on gloo's own thread, which lets go of its tensors an instant after the waiter has woken up.
Where memory is short that instant matters: the next tensor would come on top.
"""

from __future__ import annotations

import os
import time

import torch

__all__ = ["held_elsewhere", "holders", "until_let_go"]

_HOLDERS_OF_ONE = 2  # of a storage that one tensor has: the tensor itself, and the Python object looked at
_YIELDS = 20
_SLEEP_S = 50e-6
_LIMIT_S = 0.01  # then it is no instant: an error has left a collective behind


def holders(tensor: torch.Tensor) -> int:
    """How many hold the storage of ``tensor``: its tensors in any language, and the look itself."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


def held_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether anything but ``tensor`` itself holds its storage."""
    return holders(tensor) > _HOLDERS_OF_ONE


def until_let_go(tensor: torch.Tensor, held: int = _HOLDERS_OF_ONE) -> None:
    """Wait until no more than ``held`` hold the storage of ``tensor``, a finished collective's; bounded.

    ``held``: what :func:`holders` was before the collective. Only host tensors are waited for.
    """
    if tensor.device.type != "cpu":
        return
    for _ in range(_YIELDS):
        if holders(tensor) <= held:
            return
        os.sched_yield()
    deadline = time.monotonic() + _LIMIT_S
    while holders(tensor) > held and time.monotonic() < deadline:
        time.sleep(_SLEEP_S)
