"""The CPU as accelerator: float32, bfloat16 and float16, gloo, as many ranks as the user starts.

Memory figures are those of this process (resident set), since torch's CPU allocator keeps no counters.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.host_queue import HostEvent, HostStream
from deepspeed.utils import host_memory
from deepspeed.utils.numa import get_numa_cores

__all__ = ["CPU_Accelerator"]


class CPU_Accelerator(DeepSpeedAccelerator):
    """See the module docstring."""

    def __init__(self) -> None:
        self._name = "cpu"
        self._communication_backend_name = "gloo"
        self._compile_backend = "inductor"
        self._stream = HostStream()
        # Largest resident set seen by our own calls, for systems whose kernel cannot restart its peak counter.
        self._sampled_peak: int | None = None

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        # All ranks of a machine share the one "cpu"; an index would make torch devices that compare unequal.
        return "cpu"

    def device(self, device_index: int | None = None) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        # Nothing to choose.
        return None

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        """Ranks of this machine if a launcher started us, else one for each NUMA node with cores."""
        for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
            value = int(os.environ.get(name, 0) or 0)
            if value > 0:
                return value
        return max(1, sum(1 for cores in get_numa_cores() if cores))

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    # Random numbers

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    # Streams and events

    @property
    def Stream(self) -> type[HostStream]:
        return HostStream

    @property
    def Event(self) -> type[HostEvent]:
        return HostEvent

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> HostStream:
        return self._stream

    def default_stream(self, device_index: int | None = None) -> HostStream:
        return self._stream

    # Memory

    def empty_cache(self) -> None:
        return None

    def get_rss(self) -> int:
        """Resident set of this process, bytes."""
        rss = host_memory.resident_memory()
        if self._sampled_peak is not None:
            self._sampled_peak = max(self._sampled_peak, rss)
        return rss

    def reset_rss(self) -> int:
        """Start a new peak measurement; returns the resident set now."""
        kernel_counts = host_memory.reset_peak_resident_memory()
        self._sampled_peak = None if kernel_counts else 0
        return self.get_rss()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self.get_rss()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        if self._sampled_peak is None:
            return host_memory.peak_resident_memory()
        self.get_rss()
        return self._sampled_peak

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self.reset_rss()

    def total_memory(self, device_index: int | None = None) -> int:
        return host_memory.total_memory()

    def available_memory(self, device_index: int | None = None) -> int:
        return host_memory.available_memory()

    # Number formats

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    @property
    def BFloat16Tensor(self) -> Any:
        return torch.BFloat16Tensor

    @property
    def ByteTensor(self) -> Any:
        return torch.ByteTensor

    @property
    def DoubleTensor(self) -> Any:
        return torch.DoubleTensor

    @property
    def FloatTensor(self) -> Any:
        return torch.FloatTensor

    @property
    def HalfTensor(self) -> Any:
        return torch.HalfTensor

    @property
    def IntTensor(self) -> Any:
        return torch.IntTensor

    @property
    def LongTensor(self) -> Any:
        return torch.LongTensor

    # Ops

    def create_op_builder(self, op_name: str) -> Any:  # the historical name of the argument here
        return super().create_op_builder(op_name)

    # Environment of worker processes

    def visible_devices_envs(self) -> list[str]:
        # Cores are given to ranks by binding (numactl), not by a variable.
        return []
