"""Model-parallel facts from an ``mpu`` object, whichever spelling of the methods it has.

Megatron generations name the same thing differently (tensor-model-parallel, model-parallel, slice-parallel); each
function tries them in that order. Without an ``mpu`` there is no model parallelism: size 1, rank 0, group None.
"""

from typing import Any

__all__ = [
    "bwc_pipeline_parallel_group",
    "bwc_pipeline_parallel_world_size",
    "bwc_tensor_model_parallel_group",
    "bwc_tensor_model_parallel_rank",
    "bwc_tensor_model_parallel_world_size",
]


def _first(mpu: Any, names: tuple[str, ...], default: Any) -> Any:
    if mpu is None:
        return default
    for name in names:
        method = getattr(mpu, name, None)
        if method is not None:
            return method()
    return default


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """Rank of this process in its tensor-parallel group."""
    names = ("get_tensor_model_parallel_rank", "get_model_parallel_rank", "get_slice_parallel_rank")
    return _first(mpu, names, 0)


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """Size of the tensor-parallel group of this process."""
    names = ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size", "get_slice_parallel_world_size")
    return _first(mpu, names, 1)


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """Tensor-parallel process group of this process, or None."""
    names = ("get_tensor_model_parallel_group", "get_model_parallel_group", "get_slice_parallel_group")
    return _first(mpu, names, None)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """Number of pipeline stages."""
    names = ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size")
    return _first(mpu, names, 1)


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """Pipeline process group of this process, or None."""
    return _first(mpu, ("get_pipeline_model_parallel_group", "get_pipe_parallel_group"), None)
