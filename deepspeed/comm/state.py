"""Questions about the running process groups, and their beginning and end.

Owns: rank and size queries, `new_group`, `destroy_process_group`. Does not own: starting the default group (`init.py`)
and the groups of parallel axes (`mesh.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as torch_dist

from deepspeed.comm import watch
from deepspeed.comm.activity import format_ranks
from deepspeed.comm.call import require_initialized
from deepspeed.comm.group_facts import Group, all_facts, forget, group_timeout
from deepspeed.comm.pending import blocking


def is_available() -> bool:
    """Whether torch was built with torch.distributed."""
    return torch_dist.is_available()


def is_initialized() -> bool:
    """Whether the default process group exists."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def get_rank(group: Group | None = None) -> int:
    """Rank of this process in the group; -1 outside it."""
    require_initialized()
    return torch_dist.get_rank(group)


def get_world_size(group: Group | None = None) -> int:
    """Number of ranks of the group; -1 outside it."""
    require_initialized()
    return torch_dist.get_world_size(group)


def get_local_rank() -> int:
    """Rank on this machine, from LOCAL_RANK (0 without it)."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_global_rank(group: Group | None = None, group_rank: int = 0) -> int:
    """Rank in the job of rank `group_rank` of the group."""
    require_initialized()
    return group_rank if group is None else torch_dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Group | None = None) -> list[int]:
    """Ranks in the job of all members, in group order."""
    require_initialized()
    return list(torch_dist.get_process_group_ranks(group))


def get_world_group() -> Group:
    """The default group."""
    require_initialized()
    return torch_dist.group.WORLD


def get_backend(group: Group | None = None) -> str:
    """Name of the group's backend."""
    require_initialized()
    return torch_dist.get_backend(group)


def new_group(ranks: Sequence[int]) -> Group:
    """A group of these ranks of the job, with the default group's time limit. All ranks of the job must call."""
    require_initialized()
    members = list(ranks)
    with blocking("new_group", lambda: format_ranks(sorted(members))):
        return torch_dist.new_group(members, timeout=group_timeout(torch_dist.group.WORLD))


def destroy_process_group(group: Group | None = None) -> None:
    """End the group; without an argument all groups, the watch and the current mesh."""
    if group is None or group is torch_dist.group.WORLD:
        from deepspeed.comm.mesh import set_current_mesh

        set_current_mesh(None)
        watch.stop("has destroyed its process groups")
        for facts in all_facts():
            if facts.link is not None:
                facts.link.close()
    elif group is not torch_dist.GroupMember.NON_GROUP_MEMBER:
        forget(group)
    torch_dist.destroy_process_group(group)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """torch `DeviceMesh` of this shape over all ranks, on the accelerator's device type."""
    from deepspeed.comm.mesh import device_mesh

    return device_mesh(tuple(mesh_shape), tuple(mesh_dim_names))


def has_all_gather_into_tensor() -> bool:
    """Whether the flat all-gather exists: yes, on every supported torch."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Whether the flat reduce-scatter exists: yes, on every supported torch."""
    return True


def has_all_reduce_coalesced() -> bool:
    """Whether one call can reduce several tensors: yes, on every supported torch."""
    return True


def has_coalescing_manager() -> bool:
    """Whether torch can merge calls into one launch."""
    return hasattr(torch_dist.distributed_c10d, "_coalescing_manager")


def enable_symm_mem_for_group(group_name: str) -> None:
    """Let torch's symmetric memory use the group."""
    from torch.distributed import _symmetric_memory

    enable: Any = _symmetric_memory.enable_symm_mem_for_group
    enable(group_name)
