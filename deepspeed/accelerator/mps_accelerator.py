"""Apple GPUs through Metal (torch's ``mps``): one device a machine, no streams, no float64."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.host_queue import HostStream
from deepspeed.utils import host_memory

__all__ = ["MPS_Accelerator"]


class _OneQueue(HostStream):
    """The only queue of the device."""

    def synchronize(self) -> None:
        torch.mps.synchronize()


class MPS_Accelerator(DeepSpeedAccelerator):
    """See the module docstring."""

    def __init__(self) -> None:
        self._name = "mps"
        # Nothing in torch.distributed moves Metal tensors; one rank needs no transport, more go through the host.
        self._communication_backend_name = "gloo"
        self._compile_backend = "inductor"
        self._stream = _OneQueue()

    def is_available(self) -> bool:
        return torch.backends.mps.is_available()

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return True

    def resolves_data_dependency(self) -> bool:
        # There is a single queue.
        return True

    def device(self, device_index: int | None = None) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        # There is only device 0.
        return None

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return "mps:0"

    def device_count(self) -> int:
        return torch.mps.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        torch.mps.synchronize()

    # Random numbers

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.mps.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.mps.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        torch.mps.manual_seed(seed)

    def initial_seed(self) -> int:
        return self.default_generator(0).initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.mps._get_default_mps_generator()

    # Streams and events

    @property
    def Stream(self) -> type[HostStream]:
        return HostStream

    @property
    def Event(self) -> Any:
        return torch.mps.Event

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> HostStream:
        return self._stream

    def default_stream(self, device_index: int | None = None) -> HostStream:
        return self._stream

    # Memory

    def empty_cache(self) -> None:
        torch.mps.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.mps.current_allocated_memory()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        # Metal keeps no peak; what the driver holds is the nearest it tells.
        return max(torch.mps.driver_allocated_memory(), torch.mps.current_allocated_memory())

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        return None

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.mps.driver_allocated_memory()

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.mps.recommended_max_memory()

    def available_memory(self, device_index: int | None = None) -> int:
        # Host and device share the memory.
        left = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return max(0, min(left, host_memory.available_memory()))

    # Number formats

    def is_bf16_supported(self) -> bool:
        # Metal has bfloat16 from macOS 14.
        return torch.backends.mps.is_macos_or_newer(14, 0)

    def is_fp16_supported(self) -> bool:
        return True

    def is_fp64_supported(self) -> bool:
        return False

    # Ops

    def create_op_builder(self, op_name: str) -> Any:  # the historical name of the argument here
        return super().create_op_builder(op_name)

    # Environment of worker processes

    def visible_devices_envs(self) -> list[str]:
        return []
