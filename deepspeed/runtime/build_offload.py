"""From the offload sections of the config to what the ZeRO core is told, with the host memory it needs checked first.

Part of the composition root (``build.py``); nothing else reads these keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from deepspeed import comm as dist
from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision import PrecisionPolicy
from deepspeed.runtime.swap_tensor.disk_speed import measure_disk
from deepspeed.runtime.swap_tensor.host_store import HostMemory, is_apart
from deepspeed.runtime.swap_tensor.mapped_files import MappedFiles
from deepspeed.runtime.swap_tensor.nvme_store import NvmeStore
from deepspeed.runtime.zero.fused_update import rows_of
from deepspeed.runtime.zero.options import OffloadOptions
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils.host_memory import available_memory, total_memory
from deepspeed.utils.logging import log_dist

_HERE = "zero_optimization.offload_optimizer"
_STATES = 2  # per parameter, as Adam keeps them; others keep fewer
_PIPELINED = 3  # units in memory where one is read, one is updated and one is written
_GIB = 1 << 30


def offloads_optimizer(config: DeepSpeedConfig) -> bool:
    """Whether masters and states are to live in host memory."""
    section = config.zero_config.offload_optimizer
    return int(config.zero_config.stage) >= 1 and section is not None and section.device != "none"


def offloads_parameters(config: DeepSpeedConfig, device: torch.device) -> bool:
    """Whether the shards of parameters live off ``device`` between uses."""
    section = config.zero_config.offload_param
    if int(config.zero_config.stage) < 3 or section is None or section.device == "none":
        return False
    return section.device == "nvme" or is_apart(device)


def parameter_home(config: DeepSpeedConfig, device: torch.device) -> HostMemory | None:
    """Where the shards of parameters live between uses; None: on the device."""
    section = config.zero_config.offload_param
    if section is None or not offloads_parameters(config, device):
        return None
    if section.device == "nvme":
        assert section.nvme_path is not None
        return MappedFiles(section.nvme_path, rank=dist.get_rank())
    return HostMemory(pin=section.pin_memory)


def takes_host_optimizer(config: DeepSpeedConfig) -> bool:
    """Whether the config's optimizer is made for host memory alone. With a ratio below 1 it serves the device too."""
    section = config.zero_config.offload_optimizer
    return section is not None and offloads_optimizer(config) and section.ratio == 1.0


def offload_options(
    config: DeepSpeedConfig, basic: torch.optim.Optimizer, precision: PrecisionPolicy, shards: int
) -> OffloadOptions | None:
    """What the core is told; None without offload.

    Args:
        basic: the optimizer that will update what is offloaded; it still holds the model's parameters.
        shards: ranks that states are spread over.

    Raises:
        ZeRORuntimeException: ``zero_force_ds_cpu_optimizer: true`` is written in the config, and ``basic`` is another
            optimizer.
        MemoryError: the host, or the container this process runs in, has too little memory for it at all.
    """
    section = config.zero_config.offload_optimizer
    if section is None or not offloads_optimizer(config):
        return None
    _look_at_optimizer(config, basic)
    trainable = [param for group in basic.param_groups for param in group["params"] if param.requires_grad]
    first = trainable[0] if trainable else None
    device = first.device if first is not None else torch.device("cpu")
    on_disk = section.device == "nvme"
    if not on_disk and not is_apart(device):
        log_dist(f"{_HERE}.device {section.device}: this device's memory is the host's; nothing moves", ranks=[0])
        return None
    if first is not None:
        numel = sum(param.numel() for param in trainable)
        states = 0 if on_disk else (1 + _STATES) * precision.master_dtype(first).itemsize
        width = states + precision.accum_dtype(first).itemsize
        away = int(numel * section.ratio) // shards
        check_host_memory(away * width)
        if on_disk:
            _tell_disk_speed(config, away * (1 + _STATES) * precision.master_dtype(first).itemsize)
    asked = "sub_group_size" in config.zero_config.model_fields_set
    unit = min(OffloadOptions.unit_numel, config.zero_config.sub_group_size) if asked else OffloadOptions.unit_numel
    return OffloadOptions(
        pin=section.pin_memory,
        ratio=float(section.ratio),
        unit_numel=max(1, unit),
        disk=_store_maker(config) if on_disk else None,
        speculate=section.super_offload,
    )


def _store_maker(config: DeepSpeedConfig) -> Callable[[int], NvmeStore]:
    """What makes the files and buffers for masters and states once the size of a unit is known."""
    section = config.zero_config.offload_optimizer
    assert section is not None
    assert section.nvme_path is not None
    folder, pin, count = section.nvme_path, section.pin_memory, section.buffer_count
    if section.pipeline and "buffer_count" not in section.model_fields_set:
        count = _PIPELINED * (1 + _STATES)

    def make(nbytes: int) -> NvmeStore:
        pinned = pin and get_accelerator().device_name() != "cpu"
        aio, rank = config.sections.aio, dist.get_rank()
        return NvmeStore(folder, rank=rank, aio=aio, pin=pinned, buffer_count=count, buffer_nbytes=max(nbytes, 1))

    return make


def _look_at_optimizer(config: DeepSpeedConfig, basic: torch.optim.Optimizer) -> None:
    if rows_of(basic) is not None:
        return
    name = type(basic).__name__
    if config.zero_force_ds_cpu_optimizer and "zero_force_ds_cpu_optimizer" in config.sections.model_fields_set:
        raise ZeRORuntimeException(
            f"zero_force_ds_cpu_optimizer: true, and the optimizer is {name}. Pass DeepSpeedCPUAdam, DeepSpeedCPULion "
            "or DeepSpeedCPUAdagrad (deepspeed.ops), name the optimizer in the config, or set the key to false: "
            "its own step costs one more pass over gradients and weights"
        )
    log_dist(
        f"{_HERE}: {name} updates host memory with its own step: an additional pass over gradients and weights, and no "
        "overlap with copies. DeepSpeedCPUAdam (deepspeed.ops.adam) does it in one pass",
        ranks=[0],
    )


def _tell_disk_speed(config: DeepSpeedConfig, nbytes: int) -> None:
    """One line on rank 0: what its disk does, and what reading and writing its states costs every step."""
    section = config.zero_config.offload_optimizer
    if dist.get_rank() != 0 or section is None or section.nvme_path is None:
        return
    try:
        speed = measure_disk(section.nvme_path, config.sections.aio)
    except OSError:
        return  # the store that is made next says what is wrong
    log_dist(f"{_HERE}: {speed.describe(nbytes, nbytes)} per rank", ranks=[0])


def check_host_memory(nbytes: int) -> None:
    """Refuse a need per rank that the ranks of this host cannot have, before anything is allocated.

    Raises:
        MemoryError: more than this machine, or the container, has. A need above what is free now is a line in the log.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    need, total, free = nbytes * ranks, total_memory(), available_memory()
    facts = (
        f"{_HERE}: masters, states and gradients of {ranks} ranks need {need / _GIB:.1f} GiB of host memory"
    )
    if need > total:
        raise MemoryError(
            f"{facts}; the host (or its container) has {total / _GIB:.1f} GiB. Use more hosts, stage 3 with device "
            "nvme, or half-width states (bf16.bf16_master_weights_and_grads with bf16.bf16_optimizer_states)"
        )
    if need > free:
        log_dist(f"{facts}; {free / _GIB:.1f} GiB are free now", ranks=[0])
