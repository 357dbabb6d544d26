"""The interface through which the package reaches a device.

Owns: the list of questions and commands, with defaults for devices that lack a facility. Does not own any device code
(see the concrete modules) and does not import torch when it is imported.

Conventions: ``device_index`` is the number of a device of this machine as this process sees it, None for the current
one; sizes are bytes; a *stream* or *event* of a device without queues is an object with the same methods that finds
all work already done, so callers need no branch.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from deepspeed.accelerator.host_pinning import NativePinnedMemory

__all__ = ["DeepSpeedAccelerator"]


class DeepSpeedAccelerator(abc.ABC):
    """One kind of device. Subclasses set ``_name`` (torch's device type) and ``_communication_backend_name``."""

    _name: str
    _communication_backend_name: str
    _compile_backend: str = "inductor"

    # Identity and devices

    @property
    def name(self) -> str:
        """Short name, as ``DS_ACCELERATOR`` spells it; also torch's device type."""
        return self._name

    @abc.abstractmethod
    def is_available(self) -> bool:
        """Tell whether this process can use such a device."""

    def unavailable_reason(self) -> str:
        """Why `is_available` is False, for an error message."""
        return f"the installed torch finds no {self._name} device"

    @abc.abstractmethod
    def is_synchronized_device(self) -> bool:
        """Tell whether an operation has finished when its call returns (a CPU)."""

    def use_host_timers(self) -> bool:
        """Tell whether the host's clock measures device work without events."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Tell whether the device orders dependent operations by itself, without streams."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Tell whether queued work cannot pile up more memory than the device has."""
        return self.is_synchronized_device()

    def device_name(self, device_index: int | None = None) -> str:
        """``"cuda"`` without an index, ``"cuda:1"`` with one."""
        return self._name if device_index is None else f"{self._name}:{device_index}"

    @abc.abstractmethod
    def device(self, device_index: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """Context in which ``device_index`` is the current device."""

    @abc.abstractmethod
    def set_device(self, device_index: int) -> None:
        """Make ``device_index`` the current device of this process."""

    @abc.abstractmethod
    def current_device(self) -> int:
        """Number of the current device."""

    @abc.abstractmethod
    def current_device_name(self) -> str:
        """The current device as torch spells it, such as ``"cuda:0"``."""

    @abc.abstractmethod
    def device_count(self) -> int:
        """Devices of this kind that this process sees."""

    @abc.abstractmethod
    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device has finished all queued work."""

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Tell whether ``tensor`` lives on a device of this kind."""
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """torch.distributed backend that moves this device's tensors."""
        return self._communication_backend_name

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Run ``callback`` when the device is initialized (here: now)."""
        return callback()

    # Random numbers

    def random(self) -> Any:
        """torch's module of random functions."""
        import torch

        return torch.random

    @abc.abstractmethod
    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the state (1D uint8, on the host) of the device's default generator."""

    @abc.abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """State (1D uint8, on the host) of the device's default generator."""

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> Any:
        """Seed the current device's default generator."""

    def manual_seed_all(self, seed: int) -> Any:
        """Seed the default generators of all devices."""
        return self.manual_seed(seed)

    @abc.abstractmethod
    def initial_seed(self) -> int:
        """Last seed given to the current device's default generator."""

    @abc.abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """The device's default generator."""

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        """The default generator of each device that this process sees."""
        return tuple(self.default_generator(index) for index in range(self.device_count()))

    # Streams, events, graphs

    @property
    @abc.abstractmethod
    def Stream(self) -> Any:
        """Class of queues of work."""

    @property
    @abc.abstractmethod
    def Event(self) -> Any:
        """Class of marks in a queue; ``Event(enable_timing=True)`` measures milliseconds with ``elapsed_time``."""

    @abc.abstractmethod
    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Context in which ``stream`` is the current queue (None: no change)."""

    @abc.abstractmethod
    def current_stream(self, device_index: int | None = None) -> Any:
        """Queue that takes new work."""

    @abc.abstractmethod
    def default_stream(self, device_index: int | None = None) -> Any:
        """Queue in use when none was chosen."""

    def create_graph(self) -> Any:
        """New device graph, or None where there are none."""
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> contextlib.AbstractContextManager:
        """Context that records into ``graph``."""
        return contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Run what ``graph`` recorded."""
        return

    def is_current_stream_capturing(self) -> bool:
        """Tell whether the current queue is being recorded into a graph."""
        return False

    # Memory

    @abc.abstractmethod
    def empty_cache(self) -> None:
        """Give memory that the allocator keeps but nobody uses back to the device."""

    @abc.abstractmethod
    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use now."""

    @abc.abstractmethod
    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Largest `memory_allocated` since the last reset."""

    @abc.abstractmethod
    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start new peak measurements."""

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Start a new peak measurement of memory in use."""
        self.reset_peak_memory_stats(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that the allocator holds, used or not."""
        return self.memory_allocated(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Largest `memory_reserved` since the last reset."""
        return self.max_memory_allocated(device_index)

    def memory_cached(self, device_index: int | None = None) -> int:
        """Old name of `memory_reserved`."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """Old name of `max_memory_reserved`."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """Start a new peak measurement of memory held."""
        self.reset_peak_memory_stats(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """The allocator's counters by torch's names, as far as the device has them."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(device_index),
            "allocated_bytes.all.peak": self.max_memory_allocated(device_index),
        }

    @abc.abstractmethod
    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes the device has."""

    @abc.abstractmethod
    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that can still be allocated."""

    # Pinned (page-locked) host memory

    @functools.cached_property
    def native_pinned_memory(self) -> NativePinnedMemory:
        """Page-locked buffers made without torch's allocator, registered with this device."""
        from deepspeed.accelerator.host_pinning import NativePinnedMemory

        return NativePinnedMemory(self)

    def _active_native(self) -> NativePinnedMemory | None:
        from deepspeed.accelerator.host_pinning import native_backend_selected

        return self.native_pinned_memory if native_backend_selected() else None

    def _torch_pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned copy by torch's allocator; ``tensor`` itself on devices that gain nothing from pinning."""
        return tensor

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Return a page-locked host tensor like ``tensor``.

        Args:
            tensor: host tensor.
            make_copy: copy the values; False leaves them undefined where a new buffer is made.
            match_shape: keep the shape; False allows a 1D tensor rounded up to the alignment.

        On a device that gains nothing from pinning the tensor itself comes back, and so it does, with one warning,
        when the system cannot lock the memory: slower transfers, never a failure.
        """
        native = self._active_native()
        if native is not None:
            return native.pin(tensor, make_copy=make_copy, match_shape=match_shape)
        return self._torch_pin(tensor)

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """Page-locked host tensor of undefined values."""
        import torch

        shape = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        native = self._active_native()
        if native is not None:
            return native.pin_empty(torch.empty(0, dtype=dtype), torch.Size(shape))
        return self._torch_pin(torch.empty(shape, dtype=dtype, device=device))

    def pin_empty_like(
        self, tensor: torch.Tensor, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Page-locked host tensor of undefined values with the shape (and dtype) of ``tensor``."""
        return self.pin_empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Unlock a tensor made by `pin_memory`; torch's own pinned tensors are unlocked when they are freed."""
        native = self._active_native()
        if native is not None:
            native.unpin(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Tell whether the device can copy from ``tensor`` without a staging copy."""
        native = self._active_native()
        return (native is not None and native.is_pinned(tensor)) or tensor.is_pinned()

    def pin_memory_alignment(self) -> int:
        """Bytes to which page-locked buffers are aligned."""
        return mmap.PAGESIZE

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Tell the device that host memory is page-locked; False where that means nothing."""
        return False

    def unregister_host_memory(self, address: int) -> bool:
        """Undo `register_host_memory`."""
        return False

    # Number formats

    @abc.abstractmethod
    def is_bf16_supported(self) -> bool:
        """Tell whether bfloat16 training works on this device."""

    @abc.abstractmethod
    def is_fp16_supported(self) -> bool:
        """Tell whether float16 training works on this device."""

    def is_fp64_supported(self) -> bool:
        """Tell whether the device has float64."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Floating point types a model can be trained in."""
        import torch

        optional = ((torch.half, self.is_fp16_supported()), (torch.bfloat16, self.is_bf16_supported()))
        return [torch.float, *(dtype for dtype, works in optional if works)]

    def _tensor_factory(self, dtype_name: str) -> Any:
        import torch

        return functools.partial(torch.tensor, dtype=getattr(torch, dtype_name), device=self.current_device_name())

    @property
    def BFloat16Tensor(self) -> Any:
        """Makes a bfloat16 tensor of given data on the current device."""
        return self._tensor_factory("bfloat16")

    @property
    def ByteTensor(self) -> Any:
        """Makes a uint8 tensor of given data on the current device."""
        return self._tensor_factory("uint8")

    @property
    def DoubleTensor(self) -> Any:
        """Makes a float64 tensor of given data on the current device."""
        return self._tensor_factory("float64")

    @property
    def FloatTensor(self) -> Any:
        """Makes a float32 tensor of given data on the current device."""
        return self._tensor_factory("float32")

    @property
    def HalfTensor(self) -> Any:
        """Makes a float16 tensor of given data on the current device."""
        return self._tensor_factory("float16")

    @property
    def IntTensor(self) -> Any:
        """Makes an int32 tensor of given data on the current device."""
        return self._tensor_factory("int32")

    @property
    def LongTensor(self) -> Any:
        """Makes an int64 tensor of given data on the current device."""
        return self._tensor_factory("int64")

    # Profiler ranges

    @property
    def supports_nvtx_domain(self) -> bool:
        """Tell whether ranges can be put into a named domain."""
        return False

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Open a profiler range; nothing on devices without a profiler."""
        return None

    def range_pop(self, domain: str | None = None) -> Any:
        """Close the innermost profiler range."""
        return None

    # Compilers and native ops

    def is_triton_supported(self) -> bool:
        """Tell whether Triton kernels run on this device."""
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        """Tell whether our Triton grouped matmul beats torch's on this device."""
        return False

    def get_compile_backend(self) -> str:
        """Backend handed to ``torch.compile``."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose the backend; ValueError lists the known ones."""
        import torch

        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"compile backend {backend!r} is unknown to torch; use one of {', '.join(known)}")
        self._compile_backend = backend

    def op_builder_dir(self) -> str:
        """Package whose attributes are the op builder classes."""
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """Builder class of that name, or None when this build has none."""
        try:
            package = importlib.import_module(self.op_builder_dir())
        except ModuleNotFoundError as problem:
            if problem.name is None or not self.op_builder_dir().startswith(problem.name):
                raise
            return None
        return getattr(package, class_name, None)

    def create_op_builder(self, class_name: str) -> Any:
        """Instance of the builder class of that name, or None when this build has none."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def build_extension(self) -> Any:
        """setuptools command class that compiles torch extensions."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    # Environment of worker processes

    def export_envs(self) -> list[str]:
        """Prefixes of environment variables that the launcher hands to other machines."""
        return []

    @abc.abstractmethod
    def visible_devices_envs(self) -> list[str]:
        """Environment variables that restrict the visible devices."""

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Sequence[int]) -> None:
        """Write the given device numbers into ``current_env``."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))
