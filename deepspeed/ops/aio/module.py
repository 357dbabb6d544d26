"""The object that `AsyncIOBuilder().load()` and `PinMemoryBuilder().load()` return.

Owns: the four historical names. Does not own: what they do (`handle.py`, `pinned.py`).
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from deepspeed.ops.aio.engine import copy_bytes, host_bytes
from deepspeed.ops.aio.handle import aio_handle
from deepspeed.ops.aio.pinned import pin_handle

__all__ = ["aio_module", "aio_read", "aio_write", "deepspeed_memcpy", "pin_memory_module"]


def aio_read(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fill the tensor from a file with a handle of its own; returns 0. Raises as `aio_handle.sync_pread`."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Write the tensor into a file with a handle of its own; returns 0. Raises as `aio_handle.sync_pwrite`."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copy bytes between two contiguous host tensors of one size; returns 0.

    Raises ValueError: sizes differ, a tensor is not contiguous or not on the host.
    """
    (target, nbytes), (source, found) = host_bytes(dest), host_bytes(src)
    if nbytes != found:
        raise ValueError(f"deepspeed_memcpy: expected {nbytes} bytes (the target), found {found}")
    copy_bytes(target, source, nbytes, min(4, torch.get_num_threads()))
    return 0


@functools.cache
def aio_module() -> ModuleType:
    """`aio_handle`, `aio_read`, `aio_write` and `deepspeed_memcpy`, as attributes of one module."""
    module = ModuleType("async_io", "Asynchronous reads and writes of tensors.")
    for value in (aio_handle, aio_read, aio_write, deepspeed_memcpy):
        setattr(module, value.__name__, value)
    return module


@functools.cache
def pin_memory_module() -> ModuleType:
    """`pin_handle`, as the attribute of one module."""
    module = ModuleType("pin_memory", "Pinned host tensors.")
    module.pin_handle = pin_handle  # type: ignore[attr-defined]
    return module
