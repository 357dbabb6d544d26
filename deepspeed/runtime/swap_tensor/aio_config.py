"""Section `aio`: how files on nvme are read and written. Sizes are bytes."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from deepspeed.runtime.config_types import Flag, Integer, Size
from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class AioConfig(DeepSpeedConfigModel):
    """`aio`: asynchronous file access for offload to nvme."""

    keeps_unknown_keys = True

    block_size: Annotated[Size, Field(gt=0)] = 1_048_576
    """[offload to nvme] Bytes of one request. Example: 1048576."""

    queue_depth: Annotated[Integer, Field(gt=0)] = 8
    """[offload to nvme] Requests in flight. Example: 16."""

    intra_op_parallelism: Annotated[Integer, Field(gt=0)] = 1
    """[offload to nvme] Threads that share one transfer. Example: 4."""

    single_submit: Flag = False
    """[offload to nvme] Submit requests one at a time. Example: true."""

    overlap_events: Flag = True
    """[offload to nvme] Submit without waiting for completions. Example: false."""

    use_gds: Flag = False
    """[offload to nvme] GPUDirect Storage (CUDA only). Example: true."""


AIO_DEFAULT_DICT: dict[str, Any] = AioConfig().model_dump()


def get_aio_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The `aio` section of a config dictionary, defaults filled in."""
    return AioConfig(**(param_dict.get("aio") or {})).model_dump()
