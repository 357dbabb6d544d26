"""``TorchBackend``: the historical object behind the functions of ``deepspeed.comm``.

Owns: the name and its two look-ups of torch's functions. Does not own: any collective; every method is the public
function of ``deepspeed.comm`` of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed

from deepspeed.comm import comm

__all__ = ["TorchBackend"]


class TorchBackend:
    """Makes the process group unless there is one, then offers the collectives as methods."""

    all_gather = staticmethod(comm.all_gather)
    all_gather_object = staticmethod(comm.all_gather_object)
    all_reduce = staticmethod(comm.all_reduce)
    all_to_all = staticmethod(comm.all_to_all)
    barrier = staticmethod(comm.barrier)
    broadcast = staticmethod(comm.broadcast)
    broadcast_object_list = staticmethod(comm.broadcast_object_list)
    destroy_process_group = staticmethod(comm.destroy_process_group)
    gather = staticmethod(comm.gather)
    get_backend = staticmethod(comm.get_backend)
    get_global_rank = staticmethod(comm.get_global_rank)
    get_rank = staticmethod(comm.get_rank)
    get_world_group = staticmethod(comm.get_world_group)
    get_world_size = staticmethod(comm.get_world_size)
    has_all_gather_into_tensor = staticmethod(comm.has_all_gather_into_tensor)
    has_reduce_scatter_tensor = staticmethod(comm.has_reduce_scatter_tensor)
    irecv = staticmethod(comm.irecv)
    isend = staticmethod(comm.isend)
    new_group = staticmethod(comm.new_group)
    recv = staticmethod(comm.recv)
    reduce = staticmethod(comm.reduce)
    reduce_scatter = staticmethod(comm.reduce_scatter)
    scatter = staticmethod(comm.scatter)
    send = staticmethod(comm.send)

    def __init__(
        self,
        backend: str | None,
        timeout: timedelta,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        self.name, self.backend = name, backend
        comm.init_distributed(
            dist_backend=backend,
            auto_mpi_discovery=False,
            verbose=False,
            timeout=timeout,
            init_method=init_method,
            rank=rank,
            world_size=world_size,
        )

    @staticmethod
    def all_gather_into_tensor(
        output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """``comm.all_gather_into_tensor``, whose second argument has another name here."""
        return comm.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)

    @staticmethod
    def reduce_scatter_tensor(
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: Any = comm.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """``comm.reduce_scatter_tensor``, whose second argument has another name here."""
        return comm.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)

    @staticmethod
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """``comm.all_to_all_single``, whose second argument has another name here."""
        return comm.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)

    @staticmethod
    def is_initialized() -> bool:
        """Whether there is a process group."""
        return comm.is_initialized()

    @classmethod
    def get_all_gather_function(cls) -> Callable[..., Any]:
        """torch's function that gathers equal pieces into one tensor: ``f(output, input, group=None, ...)``."""
        return torch.distributed.all_gather_into_tensor

    @classmethod
    def get_reduce_scatter_function(cls) -> Callable[..., Any]:
        """torch's function that leaves each rank its piece of a sum: ``f(output, input, op, group=None, ...)``."""
        return torch.distributed.reduce_scatter_tensor
