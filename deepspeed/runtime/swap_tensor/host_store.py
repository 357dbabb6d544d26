"""``HostMemory``: where offloaded state lives, in large kept buffers of this host.

Owns: the allocation (page-locked if asked for, huge pages, touched once) and the question whether offload means other
memory at all. Does not own: what lies in it, and when it is copied.
Invariant: a tensor it gives stays valid as long as somebody holds it; its content starts as zeros.
"""

from __future__ import annotations

import os
import weakref

import torch

from deepspeed.utils.host_buffer import HostBuffer

APART_VARIABLE = "DS_OFFLOAD_APART"
HOST = torch.device("cpu")


class HostMemory:
    """``pin``: page-lock buffers, so that copies to and from an accelerator run at full speed and beside its work."""

    kind = "host"  # in accounts of memory

    def __init__(self, *, pin: bool = True) -> None:
        self.pin = pin
        self._buffers: list[HostBuffer] = []
        self._finalizer = weakref.finalize(self, _unlock, self._buffers)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Host memory for ``numel`` elements that will be copied from and to ``device``.  # 1D, contiguous"""
        if not numel:
            return torch.zeros(0, dtype=dtype)
        nbytes = numel * dtype.itemsize
        buffer = HostBuffer(for_device=self.pin and device.type != "cpu")
        made = buffer.room(nbytes).narrow(0, 0, nbytes).view(dtype)
        self._buffers.append(buffer)
        return made

    def release(self) -> None:
        """Unlock everything; tensors that are still held keep their (now pageable) memory."""
        _unlock(self._buffers)


def _unlock(buffers: list[HostBuffer]) -> None:
    for buffer in buffers:
        buffer.release()
    buffers.clear()


def is_apart(device: torch.device) -> bool:
    """Whether state in host memory is apart from what lies on ``device``.

    On a CPU both are the same memory: offloading would only make copies, so nothing moves. ``DS_OFFLOAD_APART=1``
    offloads all the same, which is how the path of an accelerator is tested without one.
    """
    return device.type != "cpu" or os.environ.get(APART_VARIABLE, "0") == "1"
