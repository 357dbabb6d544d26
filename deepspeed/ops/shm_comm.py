"""What `ShareMemCommBuilder().load()` gives: the sum over ranks of generation, under its historical names.

`initialize(size, rank)`, `vector_kernel_level()` and, as torch operators once the module is loaded,
`torch.ops.deepspeed.inference_all_reduce(tensor)` and `inference_all_reduce_` (in place). They sum over the default
process group by `deepspeed.comm`: ranks of one host add up in shared memory, others by the way of their group.

Owns: these names. Does not own: the transport (`deepspeed/comm/same_host.py`), which nobody has to load.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from deepspeed.comm import comm
from deepspeed.native import isa
from deepspeed.ops.op_builder.functions import module

__all__ = ["initialize", "shm_comm_module", "vector_kernel_level"]

_LEVELS = {"avx2": 1, "avx512": 2}


def initialize(size: int, rank: int) -> None:
    """Check that this process is rank `rank` of `size`. There is nothing to prepare: ranks meet by themselves.

    Raises RuntimeError where the default process group says otherwise, or there is none and `size` is not 1.
    """
    there = (comm.get_world_size(), comm.get_rank()) if comm.is_initialized() else (1, 0)
    if there != (size, rank):
        raise RuntimeError(
            f"initialize: asked for rank {rank} of {size}, but this process is rank {there[1]} of {there[0]}. Call "
            "deepspeed.init_distributed() first, and give this function get_world_size() and get_rank()"
        )


def vector_kernel_level() -> int:
    """Width of the vector code that adds up: 0 none of these, 1 AVX2, 2 AVX-512."""
    return _LEVELS.get(isa.choose().name, 0)


@functools.cache
def shm_comm_module() -> ModuleType:
    """The module; its operators are registered with torch at the first call."""
    found = module("deepspeed_shm_comm_op", initialize, vector_kernel_level)
    library = torch.library.Library("deepspeed", "FRAGMENT")
    library.define("inference_all_reduce(Tensor self) -> Tensor")
    library.define("inference_all_reduce_(Tensor(a!) self) -> Tensor(a!)")
    library.impl("inference_all_reduce_", _sum_in_place, "CompositeExplicitAutograd")
    library.impl("inference_all_reduce", _sum, "CompositeExplicitAutograd")
    library.impl("inference_all_reduce", torch.empty_like, "Meta")
    library.impl("inference_all_reduce_", lambda tensor: tensor, "Meta")
    setattr(found, "library", library)  # noqa: B010 - the operators live as long as it
    return found


def _sum_in_place(tensor: torch.Tensor) -> torch.Tensor:
    if comm.is_initialized() and comm.get_world_size() > 1:
        comm.inference_all_reduce(tensor)
    return tensor


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    return _sum_in_place(tensor.clone())
