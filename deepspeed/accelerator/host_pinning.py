"""Page-locked host buffers made by the operating system's own calls (mmap, mlock), without torch's pinned allocator.

Owns: the buffers, their locks and their registration with a device. Chosen by ``DS_PIN_MEMORY_BACKEND=native``; the
default ``torch`` uses torch's allocator, which rounds each request up to a power of two.

Invariants: a buffer starts on a page; it is unregistered before it is unmapped, and unmapped when the last tensor on
it is gone; a lock that the system refuses costs one warning, never the buffer.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepspeed.utils.logging import warning_once
from deepspeed.utils.pin_memory_tracker import track_pinned_memory

if TYPE_CHECKING:
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

__all__ = ["NativePinnedMemory", "native_backend_selected"]

_BACKENDS = ("torch", "native")


def native_backend_selected() -> bool:
    """Tell whether ``DS_PIN_MEMORY_BACKEND`` asks for native buffers; ValueError for an unknown value."""
    backend = os.environ.get("DS_PIN_MEMORY_BACKEND", "torch").lower()
    if backend not in _BACKENDS:
        raise ValueError(
            f"environment variable DS_PIN_MEMORY_BACKEND={backend!r}: expected one of {', '.join(_BACKENDS)}"
        )
    return backend == "native"


def _lock_pages(address: int, nbytes: int) -> bool:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    except (OSError, AttributeError):
        return False
    return failed == 0


def _unlock_pages(address: int, nbytes: int) -> None:
    ctypes.CDLL(None, use_errno=True).munlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


@dataclass(frozen=True)
class _Buffer:
    address: int
    nbytes: int
    locked: bool
    registered: bool


def _release(accelerator: DeepSpeedAccelerator, buffers: dict[int, _Buffer], address: int) -> None:
    buffer = buffers.pop(address, None)
    if buffer is None:
        return
    if buffer.registered:
        accelerator.unregister_host_memory(buffer.address)
    if buffer.locked:
        _unlock_pages(buffer.address, buffer.nbytes)
    track_pinned_memory(-buffer.nbytes)


class NativePinnedMemory:
    """The native page-locked buffers of one accelerator."""

    def __init__(self, accelerator: DeepSpeedAccelerator) -> None:
        self._accelerator = accelerator
        self._buffers: dict[int, _Buffer] = {}

    def _new_buffer(self, nbytes: int) -> torch.Tensor:
        """1D uint8 tensor of at least ``nbytes``, rounded up to the alignment."""
        alignment = self._accelerator.pin_memory_alignment()
        size = max(1, math.ceil(nbytes / alignment)) * alignment
        memory = (ctypes.c_uint8 * size).from_buffer(mmap.mmap(-1, size))
        address = ctypes.addressof(memory)
        locked = _lock_pages(address, size)
        if not locked:
            warning_once(
                "host memory could not be page-locked (limit RLIMIT_MEMLOCK, `ulimit -l`, or no support); "
                "unlocked memory is used, transfers will be slower"
            )
        register = os.environ.get("DS_PIN_MEMORY_REGISTER_DEVICE", "1") != "0"
        registered = register and self._accelerator.register_host_memory(address, size)
        self._buffers[address] = _Buffer(address, size, locked, registered)
        track_pinned_memory(size)
        # The tensor's storage holds `memory`, which holds the mapping: this runs before the pages go away.
        weakref.finalize(memory, _release, self._accelerator, self._buffers, address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def pin_empty(self, example: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Page-locked tensor of undefined values: dtype of ``example``, the given shape."""
        numel = math.prod(shape)
        buffer = self._new_buffer(numel * example.element_size())
        return buffer.view(example.dtype)[:numel].view(shape)

    def pin(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Page-locked copy of a host tensor (``make_copy=False``: same shape and dtype, values undefined).

        ``match_shape=False`` returns the whole buffer as a 1D tensor; its first ``tensor.numel()`` elements are the
        tensor's.
        """
        whole = self._new_buffer(tensor.numel() * tensor.element_size()).view(tensor.dtype)
        pinned = whole[: tensor.numel()].view(tensor.shape)
        if make_copy:
            pinned.copy_(tensor)
        return pinned if match_shape else whole

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Tell whether ``tensor`` lies in one of these buffers and its pages are locked."""
        buffer = self._buffers.get(tensor.untyped_storage().data_ptr())
        return buffer is not None and (buffer.locked or buffer.registered)

    def unpin(self, tensor: torch.Tensor) -> bool:
        """Unlock the buffer of ``tensor`` now; its values stay valid. False when it is none of ours."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._buffers:
            return False
        _release(self._accelerator, self._buffers, address)
        return True
