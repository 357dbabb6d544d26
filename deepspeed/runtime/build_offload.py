"""From the offload sections of the config to what the ZeRO core is told, with the host memory it needs checked first.

Part of the composition root (``build.py``); nothing else reads these keys.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from deepspeed import comm as dist
from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.fused_adam import FusedAdam
from deepspeed.ops.row_optimizer import RowOptimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import AUTO
from deepspeed.runtime.precision import PrecisionPolicy
from deepspeed.runtime.swap_tensor.disk_speed import measure_disk
from deepspeed.runtime.swap_tensor.host_store import HostMemory, is_apart
from deepspeed.runtime.swap_tensor.mapped_files import MappedFiles
from deepspeed.runtime.swap_tensor.nvme_store import NvmeStore
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from deepspeed.runtime.zero.fused_update import rows_of
from deepspeed.runtime.zero.options import OffloadOptions, ZenFlowOptions
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils.host_memory import available_memory, total_memory
from deepspeed.utils.logging import log_dist

if TYPE_CHECKING:
    from deepspeed.runtime.zero.optimizer import ZeroOptimizer

_HERE = "zero_optimization.offload_optimizer"
_ZENFLOW = "zero_optimization.zenflow"
_AUTO_SELECT_STEPS = 100
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
        ValueError: ``buffer_count`` is less than the optimizer's update of states in files needs.
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
    zenflow = zenflow_options(config, basic)
    if zenflow is None and not on_disk and not is_apart(device):
        log_dist(f"{_HERE}.device {section.device}: this device's memory is the host's; nothing moves", ranks=[0])
        return None
    if first is not None:
        numel = sum(param.numel() for param in trainable)
        states = 0 if on_disk else (1 + _STATES) * precision.master_dtype(first).itemsize
        width = states + precision.accum_dtype(first).itemsize
        if zenflow is not None:
            width += _zenflow_width(zenflow, first.element_size(), precision.accum_dtype(first).itemsize)
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
        disk=_store_maker(config, basic) if on_disk else None,
        speculate=section.super_offload,
        zenflow=zenflow,
    )


def zenflow_options(config: DeepSpeedConfig, basic: torch.optim.Optimizer) -> ZenFlowOptions | None:
    """What the config asks of ZenFlow; None without it. Epochs are counted in steps later: :func:`start_zenflow`.

    Raises:
        ValueError: ``basic`` is not one of our Adam optimizers, which is what ZenFlow can divide.
    """
    flow = config.zero_config.zenflow
    if flow is None:
        return None
    if rows_of(basic) is None or not isinstance(basic, (DeepSpeedCPUAdam, FusedAdam)):
        raise ValueError(
            f"{_ZENFLOW}: the optimizer is {type(basic).__name__}; ZenFlow divides the update of DeepSpeedCPUAdam. "
            "Name Adam or AdamW in optimizer.type (without torch_adam), pass deepspeed.ops.adam.DeepSpeedCPUAdam, or "
            f"remove {_ZENFLOW}"
        )
    if any(group.get("amsgrad") for group in basic.param_groups):
        raise ValueError(f"{_ZENFLOW}: optimizer.params.amsgrad true cannot be divided; set it to false")
    threads = torch.get_num_threads()
    return ZenFlowOptions(
        topk=float(flow.topk_ratio),
        select_steps=int(flow.select_interval) if flow.select_strategy == "step" else None,
        update_interval=None if flow.update_interval == AUTO else int(flow.update_interval),
        overlap=flow.overlap_step,
        offload=flow.offload,
        auto_ratio=float(flow.auto_ratio),
        warm_up=flow.full_warm_up_rounds,
        threads=max(1, round(threads * (1 - flow.pt_reserved_cores_perc))) if flow.overlap_step else None,
    )


def start_zenflow(config: DeepSpeedConfig, optimizer: ZeroOptimizer | None, loader: Any, accumulation: int) -> None:
    """Tell ZenFlow, where it is on, how many steps lie between two choices; one line says what it will do.

    Steps of an epoch: ``zenflow.steps_per_epoch``, else those of the data loader that ``initialize`` made.

    Raises:
        ValueError: ``select_strategy`` is epoch, and neither is there.
    """
    flow = config.zero_config.zenflow
    if flow is None or optimizer is None or optimizer.executors.zenflow is None:
        return
    running = optimizer.executors.zenflow
    if running.select_steps is None:
        epochs = 1 if flow.select_interval == AUTO else int(flow.select_interval)
        running.select_steps = max(1, epochs * _steps_of_epoch(flow, loader, accumulation))
    window = "a number of steps that adapts" if flow.update_interval == AUTO else f"{flow.update_interval} steps"
    beside = ", beside training" if flow.overlap_step else ""
    log_dist(
        f"{_ZENFLOW}: {100 * flow.topk_ratio:g} % of the columns of each weight are updated at once, the rest once in "
        f"{window}{beside}; columns are chosen every {running.select_steps} steps",
        ranks=[0],
    )


def _steps_of_epoch(flow: ZenFlowConfig, loader: Any, accumulation: int) -> int:
    if flow.steps_per_epoch is not None:
        return flow.steps_per_epoch
    if loader is not None and hasattr(loader, "__len__"):
        with contextlib.suppress(TypeError):  # data without a length
            return len(loader) // accumulation
    if flow.select_strategy == "epoch":
        raise ValueError(
            f"{_ZENFLOW}.select_strategy is epoch, and nobody says how many steps an epoch has: set "
            f"{_ZENFLOW}.steps_per_epoch, pass training_data with a length, or use select_strategy step"
        )
    return _AUTO_SELECT_STEPS


def _zenflow_width(flow: ZenFlowOptions, model: int, accum: int) -> int:
    """Bytes of host memory per element that ZenFlow takes in addition; see docs/offload.md."""
    sums = 0 if flow.update_interval == 1 else 4
    return model + sums + ((sums + accum) if flow.overlap else 0)


def _store_maker(config: DeepSpeedConfig, basic: torch.optim.Optimizer) -> Callable[[int], NvmeStore]:
    """What makes the files and buffers for masters and states once the size of a unit is known."""
    section = config.zero_config.offload_optimizer
    assert section is not None
    assert section.nvme_path is not None
    folder, pin, count = section.nvme_path, section.pin_memory, section.buffer_count
    if section.pipeline and "buffer_count" not in section.model_fields_set:
        count = _PIPELINED * (1 + _STATES)

    names = basic.state_names() if isinstance(basic, RowOptimizer) else ()  # of others: seen in the first update
    if count < 1 + len(names):
        raise ValueError(
            f"{_HERE}.buffer_count is {count}; {type(basic).__name__} needs {1 + len(names)}: one for the weights "
            f"and one for each of its states ({', '.join(names)})"
        )

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
