"""The current mesh as functions, for clients: which group, rank and size does this process have along an axis?

Owns: historical names. Does not own: groups or arithmetic; everything is a question to `deepspeed.comm.mesh`'s current
mesh, which `initialize` sets (before that, all ranks are data parallel).
Names without underscore speak of tensor, model and data parallelism; those with one, used by client libraries, cover
all axes. Expert groups are asked for by name: `ep_size_4`.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import torch.distributed as torch_dist

from deepspeed.comm.mesh import ParallelMesh, current_mesh, device_mesh, set_current_mesh
from deepspeed.comm.rank_grid import RankGrid
from deepspeed.utils.exceptions import DeprecatedException

if TYPE_CHECKING:
    from deepspeed.comm.group_facts import Group

    # Live views of the current mesh; assigning `mpu` makes the mesh of that object the current one at the next call.
    mpu: Any
    mesh_device: Any

# Whether tensor-parallel ranks also share the experts' matrices: AutoTP sets it; 1 = experts are whole on each rank.
expert_tensor_parallel_world_size: int = 1


def __getattr__(name: str) -> Any:
    if name == "mpu":
        return current_mesh().mpu if torch_dist.is_initialized() else None
    if name == "mesh_device":
        return current_mesh().torch_mesh if torch_dist.is_initialized() else None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _mesh() -> ParallelMesh:
    """The current mesh; takes over an `mpu` that a client has assigned to this module."""
    assigned = globals().pop("mpu", None)
    if assigned is not None and current_mesh().mpu is not assigned:
        set_current_mesh(ParallelMesh.from_mpu(assigned))
    return current_mesh()


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Removed long ago; raises."""
    raise DeprecatedException(
        "deepspeed.utils.groups.initialize() is no longer the way to set up expert parallelism: pass ep_size to "
        "deepspeed.moe.layer.MoE(..., ep_size=...)"
    )


def _ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise AssertionError unless `denominator` divides `numerator`."""
    if numerator % denominator:
        raise AssertionError(f"{numerator} is not divisible by {denominator}")


# Data parallel


def _clone_world_group() -> Group:
    """The group of all ranks."""
    return _mesh().group("world")


def _get_data_parallel_group() -> Group:
    """Ranks that hold the same parameters and see other data (without the sequence axis)."""
    return _mesh().group("dp")


def _get_data_parallel_group_ranks() -> list[int]:
    """Ranks of the data-parallel group."""
    return list(_mesh().ranks("dp"))


def _get_data_parallel_rank() -> int:
    """Position in the data-parallel group."""
    return _mesh().rank("dp")


def _get_data_parallel_world_size() -> int:
    """Size of the data-parallel group."""
    return _mesh().size("dp")


def get_data_parallel_group() -> Group:
    """Ranks that hold the same parameters and see other data (without the sequence axis)."""
    return _mesh().group("dp")


def get_data_parallel_rank() -> int:
    """Position in the data-parallel group."""
    return _mesh().rank("dp")


def get_data_parallel_world_size() -> int:
    """Size of the data-parallel group."""
    return _mesh().size("dp")


def _get_broadcast_src_rank() -> int:
    """Rank of the job that hands out parameters: the first that holds the same ones."""
    return _mesh().ranks("zero")[0]


# Sequence parallel


def _get_sequence_parallel_group() -> Group:
    """Ranks that share one sequence."""
    return _mesh().group("sp")


def _get_sequence_parallel_rank() -> int:
    """Position in the sequence-parallel group; 0 without sequence parallelism."""
    return _mesh().rank("sp")


def _get_sequence_parallel_world_size() -> int:
    """Size of the sequence-parallel group; 1 without sequence parallelism."""
    return _mesh().size("sp")


def _get_sequence_data_parallel_group() -> Group:
    """Data x sequence parallel: all ranks that hold the same parameters."""
    return _mesh().group("zero")


def _get_sequence_data_parallel_rank() -> int:
    """Position in the sequence-data group."""
    return _mesh().rank("zero")


def _get_sequence_data_parallel_world_size() -> int:
    """Size of the sequence-data group."""
    return _mesh().size("zero")


# Tensor and model parallel


def get_tensor_model_parallel_group() -> Group:
    """Ranks that share each matrix."""
    return _mesh().group("tp")


def get_tensor_model_parallel_rank() -> int:
    """Position in the tensor-parallel group."""
    return _mesh().rank("tp")


def get_tensor_model_parallel_world_size() -> int:
    """Size of the tensor-parallel group."""
    return _mesh().size("tp")


def get_tensor_model_parallel_src_rank() -> int:
    """Rank of the job that is first in the tensor-parallel group."""
    return _mesh().ranks("tp")[0]


def set_tensor_model_parallel_rank(rank: int) -> None:
    """Answer `rank` from now on; for tools that build a model for a rank they are not."""
    _mesh().position_overrides["tp"] = rank


def set_tensor_model_parallel_world_size(world_size: int) -> None:
    """Answer `world_size` from now on; for tools that build a model for a size they do not run at."""
    _mesh().size_overrides["tp"] = world_size


def get_model_parallel_group() -> Group:
    """Ranks that hold one copy of the model together: pipeline x tensor parallel."""
    return _mesh().group("mp")


def get_model_parallel_rank() -> int:
    """Position in the model-parallel group."""
    return _mesh().rank("mp")


def get_model_parallel_world_size() -> int:
    """Size of the model-parallel group."""
    return _mesh().size("mp")


def _get_model_parallel_world_size() -> int:
    """Size of the model-parallel group."""
    return _mesh().size("mp")


def _create_model_parallel(model_parallel_size_: int) -> tuple[Group, Group]:
    """Make model-parallel groups of neighbours; returns (data-parallel group, model-parallel group)."""
    mesh = _replace_mesh(tp=model_parallel_size_)
    return mesh.group("dp"), mesh.group("mp")


def _init_tp_mesh_device(
    tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None
) -> tuple[Group, Group]:
    """Make tensor- and data-parallel groups and torch's view of both; returns (data group, tensor group)."""
    groups = _init_tp_groups_with_new_group(tensor_model_parallel_size, data_parallel_size)
    mesh = _mesh()
    mesh.torch_mesh = mesh.device_mesh("dp", "tp")
    return groups


def _init_tp_groups_with_new_group(
    tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None
) -> tuple[Group, Group]:
    """Make tensor- and data-parallel groups; returns (data group, tensor group)."""
    world = torch_dist.get_world_size()
    if data_parallel_size is not None and data_parallel_size * tensor_model_parallel_size != world:
        raise ValueError(
            f"tensor parallel {tensor_model_parallel_size} x data parallel {data_parallel_size} = "
            f"{tensor_model_parallel_size * data_parallel_size} ranks; the job has {world}"
        )
    mesh = _replace_mesh(tp=tensor_model_parallel_size)
    return mesh.group("dp"), mesh.group("tp")


def _replace_mesh(tp: int) -> ParallelMesh:
    mesh = _mesh()
    if mesh.size("tp") != tp:
        mesh = ParallelMesh.build(tp=tp)
        set_current_mesh(mesh)
    return mesh


# Experts, by name `ep_size_N`


def _size_of(group_name: str) -> int:
    match = re.fullmatch(r"ep_size_(\d+)", group_name)
    if match is None:
        raise ValueError(f"expert group names look like 'ep_size_4'; found {group_name!r}")
    return int(match[1])


def _create_expert_and_data_parallel(
    expert_parallel_size_: int,
    mp_size: int | None = None,
    pp_size: int | None = None,
    mp_mode: str = "tp",
    use_data_before_expert_parallel_: bool = False,
    folding_spec: Any = None,
) -> None:
    """Make the groups of one expert-parallel size. All ranks must call, for the same sizes in the same order."""
    if folding_spec is not None:
        raise ValueError("folding_spec: experts folded over tensor-parallel ranks are not supported; pass None")
    if mp_mode not in ("tp", "sp"):
        raise ValueError(f"mp_mode={mp_mode!r}: expected 'tp' or 'sp'")
    mesh = _mesh()
    for name, axis, size in (("mp_size", mp_mode, mp_size), ("pp_size", "pp", pp_size)):
        if size is not None and size != mesh.size(axis):
            raise ValueError(f"{name}={size}, but the current mesh has {axis}={mesh.size(axis)}")
    mesh.add_ep(expert_parallel_size_, data_before_expert=use_data_before_expert_parallel_)


def _create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: Any, use_data_before_expert_parallel_: bool = False
) -> None:
    """The same inside the data-parallel groups of a Megatron-style object."""
    if current_mesh().mpu is not mpu:
        set_current_mesh(ParallelMesh.from_mpu(mpu))
    current_mesh().add_ep(expert_parallel_size_, data_before_expert=use_data_before_expert_parallel_)


def _get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """(expert-parallel groups, expert-data groups) of a whole job, as lists of ranks. Needs no process group."""
    _ensure_divisibility(world_size, tensor_parallel_size_ * pipeline_parallel_size_)
    data = world_size // (tensor_parallel_size_ * pipeline_parallel_size_)
    _ensure_divisibility(data, expert_parallel_size_)
    parts = {"edp": data // expert_parallel_size_, "ep": expert_parallel_size_}
    if use_data_before_expert_parallel_:
        parts = {"ep": expert_parallel_size_, "edp": data // expert_parallel_size_}
    grid = RankGrid({"pp": pipeline_parallel_size_, "dp": data, "tp": tensor_parallel_size_}).split("dp", parts)
    experts = grid.lines("ep", order=("pp", "tp", "edp"))
    replicas = grid.lines("edp", order=("pp", "tp", "ep"))
    return [list(line) for line in experts], [list(line) for line in replicas]


def _get_expert_parallel_group(group_name: str) -> Group:
    """Ranks over which the experts of a layer are spread."""
    return _mesh().group("ep", ep_size=_size_of(group_name))


def _get_expert_parallel_group_ranks(group_name: str) -> list[int]:
    """Ranks of the expert-parallel group."""
    return list(_mesh().ranks("ep", ep_size=_size_of(group_name)))


def _get_expert_parallel_rank(group_name: str) -> int:
    """Position in the expert-parallel group."""
    return _mesh().rank("ep", ep_size=_size_of(group_name))


def _get_expert_parallel_world_size(group_name: str) -> int:
    """Size of the expert-parallel group."""
    return _mesh().size("ep", ep_size=_size_of(group_name))


def _get_expert_parallel_src_rank(group_name: str) -> int:
    """Rank of the job that is first in the expert-parallel group."""
    return _mesh().ranks("ep", ep_size=_size_of(group_name))[0]


def _get_expert_parallel_group_dict() -> dict[str, Group]:
    """All expert-parallel groups by name."""
    mesh = _mesh()
    return {f"ep_size_{size}": mesh.group("ep", ep_size=size) for size in mesh.ep_sizes}


def _get_expert_data_parallel_group(group_name: str) -> Group:
    """Ranks that hold the same experts."""
    return _mesh().group("edp", ep_size=_size_of(group_name))


def _get_expert_data_parallel_group_ranks(group_name: str) -> list[int]:
    """Ranks of the expert-data group."""
    return list(_mesh().ranks("edp", ep_size=_size_of(group_name)))


def _get_expert_data_parallel_rank(group_name: str) -> int:
    """Position in the expert-data group."""
    return _mesh().rank("edp", ep_size=_size_of(group_name))


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    """Size of the expert-data group."""
    return _mesh().size("edp", ep_size=_size_of(group_name))


def _get_expert_broadcast_src_rank(group_name: str) -> int:
    """Rank of the job that hands out experts: the first that holds the same ones."""
    return _mesh().ranks("edp", ep_size=_size_of(group_name))[0]


def _get_expert_data_parallel_group_dict() -> dict[str, Group]:
    """All expert-data groups by name."""
    mesh = _mesh()
    return {f"ep_size_{size}": mesh.group("edp", ep_size=size) for size in mesh.ep_sizes}


def _get_max_expert_size() -> int | None:
    """The largest expert-parallel size in use; None without experts."""
    sizes = _mesh().ep_sizes
    return sizes[-1] if sizes else None


def _get_max_expert_size_name() -> str:
    """Name of the largest expert-parallel size in use."""
    size = _get_max_expert_size()
    if size is None:
        raise ValueError("no expert-parallel groups exist: the model has no MoE layer yet")
    return f"ep_size_{size}"


def _get_max_expert_parallel_group() -> Group:
    """The expert-parallel group of the largest size in use."""
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_expert_model_parallel_world_size() -> int:
    """Number of ranks that share each expert's matrices."""
    return expert_tensor_parallel_world_size


# ZeRO++


def _create_zero_param_parallel_group(group_size: int) -> None:
    """Make the groups that hold a secondary copy of the parameters together (hpZ). All ranks must call."""
    _mesh().add_hpz(group_size)


def _zero_param_parallel_is_initialized() -> bool:
    """Whether hpZ groups exist."""
    return torch_dist.is_initialized() and _mesh().has("hpz")


def _get_zero_param_intra_parallel_group() -> Group | None:
    """Ranks that hold a secondary copy of the parameters together; None without hpZ."""
    return _mesh().group("hpz") if _zero_param_parallel_is_initialized() else None


def _get_zero_param_intra_parallel_group_ranks() -> list[int]:
    """Ranks of the hpZ group; empty without hpZ."""
    return list(_mesh().ranks("hpz")) if _zero_param_parallel_is_initialized() else []


def _get_zero_param_intra_parallel_group_world_size() -> int:
    """Size of the hpZ group."""
    return _mesh().size("hpz")


def _get_zero_param_intra_parallel_rank_in_mygroup() -> int:
    """Position in the hpZ group."""
    return _mesh().rank("hpz")


def _get_local_all_to_all_group() -> dict[str, Group]:
    """The two hops of a hierarchical reduction: `local_I` joins the ranks of node I, `global_J` the J-th rank of each.

    Only this rank's own two entries hold a group; the others hold torch's non-member marker. All ranks must call.
    """
    world, rank = torch_dist.get_world_size(), torch_dist.get_rank()
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world)
    _ensure_divisibility(world, local)
    view = device_mesh((world // local, local), ("node", "local"))
    node, place = divmod(rank, local)
    outside = torch_dist.GroupMember.NON_GROUP_MEMBER
    groups: dict[str, Group] = {f"local_{index}": outside for index in range(world // local)}
    groups |= {f"global_{index}": outside for index in range(local)}
    groups[f"local_{node}"] = view.get_group("local")
    groups[f"global_{place}"] = view.get_group("node")
    return groups


def _release_process_group_references(group: Group | None = None) -> None:
    """Forget the current mesh and its groups; for callers that destroy groups through torch itself."""
    set_current_mesh(None)
