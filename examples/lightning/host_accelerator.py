"""A machine without GPUs under the name Lightning's DeepSpeed strategy asks for: it takes CUDA accelerators alone."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators.cuda import CUDAAccelerator


class HostAccelerator(CUDAAccelerator):
    """Each rank is a process on the CPU."""

    def setup_device(self, device: torch.device) -> None: ...

    def setup(self, trainer: Any) -> None: ...

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("cpu", index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True
