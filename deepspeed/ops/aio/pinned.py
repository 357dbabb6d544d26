"""Host tensors made for file access: whole pages, touched, page-locked for the accelerator where there is one.

Owns: which tensors were handed out, and giving their memory back. Invariant: memory goes when it was freed here and no
tensor refers to it any more, so that a tensor kept by mistake is never a read of freed memory.
"""

from __future__ import annotations

import threading

import torch

from deepspeed.utils.host_buffer import HostBuffer

__all__ = ["PinnedTensors", "pin_handle"]


class PinnedTensors:
    """A table of the tensors handed out, by address."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[HostBuffer, int]] = {}
        self._lock = threading.Lock()

    def new(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros.  # 1D (numel,), host, starts on a page. Raises OSError when there is no memory."""
        buffer = HostBuffer(for_device=True, private=True)
        nbytes = numel * dtype.itemsize
        tensor = buffer.room(max(nbytes, 1))[:nbytes].view(dtype)
        with self._lock:
            self._held[tensor.data_ptr()] = (buffer, nbytes)
        return tensor

    def free(self, address: int) -> bool:
        """Whether there was such a tensor."""
        with self._lock:
            found = self._held.pop(address, None)
        if found is None:
            return False
        found[0].release()
        return True

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies inside one of ours."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return False
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        with self._lock:
            return any(base <= start and end <= base + nbytes for base, (_, nbytes) in self._held.items())


class pin_handle:
    """Pinned host tensors without file access (historical name: the object `PinMemoryBuilder().load()` makes)."""

    def __init__(self) -> None:
        self._pinned = PinnedTensors()

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """``num_elem`` zeros of the dtype of ``example_tensor``.  # 1D, host"""
        if num_elem < 0:
            raise ValueError(f"new_cpu_locked_tensor: expected num_elem >= 0, found {num_elem}")
        return self._pinned.new(int(num_elem), example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Forget the tensor; False for one that is not of this handle."""
        return self._pinned.free(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """The same by the address of the first element."""
        return self._pinned.free(int(address))

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether the tensor is pinned by this handle or by torch."""
        return self._pinned.holds(buffer) or (torch.cuda.is_available() and buffer.is_pinned())
