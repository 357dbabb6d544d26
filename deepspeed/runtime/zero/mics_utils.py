"""The process groups of MiCS as one record, for clients that ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.comm.group_facts import facts_of
from deepspeed.comm.mesh import ParallelMesh, current_mesh

__all__ = ["MiCS_CommGroups", "create_mics_comm_groups"]


@dataclass
class MiCS_CommGroups:
    """``shard``: the neighbours that hold one copy of the parameters; ``repli``: the ranks with the same shard.

    ``intra_node`` and ``inter_node_shard`` cut the shard group for gathers in two hops; None where that is one hop.
    """

    param_shard_group: Any = None
    param_shard_size: int = -1
    param_shard_rank: int = -1
    param_repli_group: Any = None
    param_repli_size: int = -1
    param_repli_rank: int = -1
    param_intra_node_group: Any = None
    param_inter_node_shard_group: Any = None


def create_mics_comm_groups(
    shard_size: int, dp_group: Any, hierarchical_allgather: bool = False, mpu: Any = None, *, node_size: int = 0
) -> MiCS_CommGroups:
    """The groups of this rank, made where they do not exist yet. All ranks must call.

    Args:
        shard_size: ranks of a shard group; must divide the ranks that hold the same parameters.
        dp_group: these ranks; None: those of the current mesh (or of ``mpu``).
        hierarchical_allgather: cut the shard group by nodes of ``node_size`` ranks, where these are fewer.

    Raises:
        ValueError: a size does not divide, with the equation; or ``dp_group`` has other ranks than the mesh.
    """
    mesh = ParallelMesh.from_mpu(mpu) if mpu is not None else current_mesh()
    if dp_group is not None and facts_of(dp_group).size != mesh.size("zero"):
        raise ValueError(
            f"create_mics_comm_groups: dp_group has {facts_of(dp_group).size} ranks, the mesh has {mesh.size('zero')} "
            "that hold the same parameters"
        )
    levels = mesh.levels(shard_size, name="mics_shard_size")
    made = MiCS_CommGroups(
        param_shard_group=levels.inner,
        param_shard_size=shard_size,
        param_shard_rank=mesh.rank("zero_inner", inner=shard_size),
        param_repli_group=levels.outer,
        param_repli_size=mesh.size("zero_outer", inner=shard_size),
        param_repli_rank=mesh.rank("zero_outer", inner=shard_size),
    )
    if hierarchical_allgather and 1 < node_size < shard_size:
        hops = mesh.levels(node_size, within=shard_size, name="node_size")
        made.param_intra_node_group, made.param_inter_node_shard_group = hops.inner, hops.outer
    return made
