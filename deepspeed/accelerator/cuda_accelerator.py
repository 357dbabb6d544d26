"""NVIDIA (CUDA) and AMD (ROCm) GPUs; torch presents both as ``cuda``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from typing import Any

import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.utils.logging import warning_once

__all__ = ["CUDA_Accelerator"]

# cudaHostRegisterPortable: the registration counts for all contexts of the process.
_HOST_REGISTER_PORTABLE = 1
_NO_ERROR = 0


@functools.cache
def _nvtx_package() -> Any:
    """NVIDIA's ``nvtx`` package, which knows domains; None when it is not installed."""
    try:
        return importlib.import_module("nvtx")
    except ImportError:
        return None


class CUDA_Accelerator(DeepSpeedAccelerator):
    """See the module docstring."""

    def __init__(self) -> None:
        self._name = "cuda"
        # RCCL presents itself as nccl, too.
        self._communication_backend_name = "nccl"
        self._compile_backend = "inductor"

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def unavailable_reason(self) -> str:
        if torch.version.cuda is None and torch.version.hip is None:
            return f"torch {torch.__version__} is built without CUDA and ROCm"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        return "torch finds no usable GPU or driver" + (f"; CUDA_VISIBLE_DEVICES={hidden!r}" if hidden == "" else "")

    def is_synchronized_device(self) -> bool:
        return False

    def device(self, device_index: int | None = None) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if device_index is None else torch.cuda.device(device_index)

    def set_device(self, device_index: int) -> None:
        torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        torch.cuda.synchronize(device_index)

    def lazy_call(self, callback: Any) -> Any:
        return torch.cuda._lazy_call(callback)

    def communication_backend_version(self) -> Any:
        """Version of NCCL (or RCCL), as torch reports it."""
        return torch.cuda.nccl.version()

    # Random numbers

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        torch.cuda.init()  # the tuple is empty before
        return torch.cuda.default_generators[device_index]

    # Streams, events, graphs

    @property
    def Stream(self) -> Any:
        return torch.cuda.Stream

    @property
    def Event(self) -> Any:
        return torch.cuda.Event

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.default_stream(device_index)

    def create_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> contextlib.AbstractContextManager:
        return torch.cuda.graph(graph, pool=pool, stream=stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def is_current_stream_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    # Memory

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return torch.cuda.memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        index = torch.cuda.current_device() if device_index is None else device_index
        return torch.cuda.get_device_properties(index).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        """Free on the device plus what the allocator holds without use."""
        free, _ = torch.cuda.mem_get_info(device_index)
        return free + self.memory_reserved(device_index) - self.memory_allocated(device_index)

    def _torch_pin(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            return tensor.pin_memory()
        except RuntimeError as problem:
            # Some systems (WSL, tight RLIMIT_MEMLOCK) refuse page-locking where plain memory would do.
            warning_once(
                "host memory could not be pinned (%s); plain memory is used, transfers will be slower",
                str(problem).splitlines()[0],
            )
            return tensor

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        if not torch.cuda.is_initialized():
            # Registration needs a context; a launcher-side or data-worker process must not create one.
            return False
        status = torch.cuda.cudart().cudaHostRegister(address, num_bytes, _HOST_REGISTER_PORTABLE)
        return int(status) == _NO_ERROR

    def unregister_host_memory(self, address: int) -> bool:
        return int(torch.cuda.cudart().cudaHostUnregister(address)) == _NO_ERROR

    # Number formats

    def _is_rocm(self) -> bool:
        return torch.version.hip is not None

    def _compute_capability(self) -> int:
        """Major compute capability of the current device."""
        return torch.cuda.get_device_properties(torch.cuda.current_device()).major

    def is_bf16_supported(self) -> bool:
        return self.is_available() and torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """From compute capability 7 (6 with ``DS_ALLOW_DEPRECATED_FP16=1``); always with ROCm."""
        if self._is_rocm():
            return True
        lowest = 6 if os.environ.get("DS_ALLOW_DEPRECATED_FP16", "0") == "1" else 7
        return self.is_available() and self._compute_capability() >= lowest

    def is_triton_supported(self) -> bool:
        return self.is_available() and (self._is_rocm() or self._compute_capability() >= 8)

    # Profiler ranges

    @property
    def supports_nvtx_domain(self) -> bool:
        return _nvtx_package() is not None

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        nvtx = _nvtx_package()
        if nvtx is not None and domain is not None:
            return nvtx.push_range(msg, domain=domain, category=category)
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> Any:
        nvtx = _nvtx_package()
        if nvtx is not None and domain is not None:
            return nvtx.pop_range(domain=domain)
        return torch.cuda.nvtx.range_pop()

    # Environment of worker processes

    def export_envs(self) -> list[str]:
        return ["NCCL", "LD_LIBRARY", "PATH"]

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]
