"""Reports of memory in use, on demand."""

from __future__ import annotations

import gc

import psutil
import torch
import torch.distributed as torch_dist

from deepspeed.accelerator.real_accelerator import get_accelerator

__all__ = [
    "empty_cache",
    "get_ma_status",
    "get_tensor_bytes",
    "memory_status",
    "see_memory_usage",
    "torch_max_memory_reserved",
    "torch_memory_reserved",
]

_GIB = 2**30

# Figures of the last `memory_status`, for its deltas.
_last_allocated = 0
_last_cached = 0


def _rank() -> int:
    return torch_dist.get_rank() if torch_dist.is_available() and torch_dist.is_initialized() else 0


def get_tensor_bytes(item: torch.Tensor) -> int:
    """Bytes of the elements of a tensor (the storage may be larger)."""
    return item.numel() * item.element_size()


def empty_cache() -> None:
    """Give unused memory of the device's allocator and its peak counters back."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def torch_memory_reserved(device_index: int | None = None) -> int:
    """Bytes that the allocator of a device holds; None is the current one."""
    return get_accelerator().memory_reserved(device_index)


def torch_max_memory_reserved(device_index: int | None = None) -> int:
    """Largest number of bytes that the allocator of a device has held; None is the current one."""
    return get_accelerator().max_memory_reserved(device_index)


def get_ma_status() -> int:
    """Bytes in use on the device; 0 on ranks other than 0."""
    return get_accelerator().memory_allocated() if _rank() == 0 else 0


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print device and host memory on rank 0 and start new peak measurements.

    Nothing happens without ``force=True``, so that calls may stay in place. Garbage is collected first, so that the
    figures show what is really held. MA = memory allocated, CA = cached (held by the allocator).
    """
    if not force or _rank() != 0:
        return
    gc.collect()
    accelerator = get_accelerator()
    figures = (
        ("MA", accelerator.memory_allocated()),
        ("Max_MA", accelerator.max_memory_allocated()),
        ("CA", accelerator.memory_reserved()),
        ("Max_CA", accelerator.max_memory_reserved()),
    )
    host = psutil.virtual_memory()
    print(message)
    print("         ".join(f"{label} {nbytes / _GIB:.2f} GB" for label, nbytes in figures))
    print(f"CPU Virtual Memory:  used = {host.used / _GIB:.2f} GB, percent = {host.percent}%", flush=True)
    accelerator.reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Print one line with the device memory of this rank and the change since the last call.

    Args:
        msg: label.
        print_rank: rank that prints; -1 for all.
        reset_max: start new peak measurements first.
    """
    global _last_allocated, _last_cached
    rank = _rank()
    if print_rank not in (-1, rank):
        return
    accelerator = get_accelerator()
    accelerator.synchronize()
    if reset_max:
        accelerator.reset_peak_memory_stats()
    allocated, cached = accelerator.memory_allocated(), accelerator.memory_reserved()
    largest, largest_cached = accelerator.max_memory_allocated(), accelerator.max_memory_reserved()
    print(
        f"RANK={rank} MEMSTATS {msg} device={accelerator.current_device_name()} "
        f"current alloc={allocated / _GIB:0.4f}GB (delta={(allocated - _last_allocated) / _GIB:0.4f}GB "
        f"max={largest / _GIB:0.4f}GB) current cache={cached / _GIB:0.4f}GB "
        f"(delta={(cached - _last_cached) / _GIB:0.4f}GB max={largest_cached / _GIB:0.4f}GB)",
        flush=True,
    )
    _last_allocated, _last_cached = allocated, cached
