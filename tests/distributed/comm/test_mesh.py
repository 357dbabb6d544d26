"""ParallelMesh on real gloo groups: groups carry traffic, are shared, follow mpu objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed import comm
from deepspeed.comm.mesh import ParallelMesh, current_mesh, set_current_mesh


def sums_of(mesh: ParallelMesh, axes: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for axis in axes:
        tensor = torch.tensor([float(10**mesh.global_rank)])
        dist.all_reduce(tensor, group=mesh.group(axis))
        found[axis] = tensor.item()
    return found


def dp_tp() -> tuple[dict[str, float], bool, bool, int]:
    mesh = ParallelMesh.build(tp=2)
    sums = sums_of(mesh, ("dp", "tp", "sp", "zero", "mp", "world"))
    shared = mesh.group("dp") is mesh.group("zero") and mesh.group("tp") is mesh.group("mp")
    world = mesh.group("world") is dist.group.WORLD
    return sums, shared, world, mesh.rank("tp")


def test_groups_of_each_axis_reach_its_ranks_and_equal_sets_share_a_group(pool: Any) -> None:
    results = pool.run(4, dp_tp)
    assert [r[0]["dp"] for r in results] == [101.0, 1010.0, 101.0, 1010.0]
    assert [r[0]["tp"] for r in results] == [11.0, 11.0, 1100.0, 1100.0]
    assert [r[0]["sp"] for r in results] == [1.0, 10.0, 100.0, 1000.0]
    assert all(r[0]["zero"] == r[0]["dp"] and r[0]["mp"] == r[0]["tp"] for r in results)
    assert all(r[0]["world"] == 1111.0 for r in results)
    assert all(r[1] and r[2] for r in results)
    assert [r[3] for r in results] == [0, 1, 0, 1]


def all_data_parallel() -> tuple[bool, int]:
    before = len(dist.distributed_c10d._world.pg_map)
    mesh = ParallelMesh.build()
    same = mesh.group("dp") is dist.group.WORLD and mesh.group("zero") is dist.group.WORLD
    return same, len(dist.distributed_c10d._world.pg_map) - before


def test_pure_data_parallelism_uses_the_default_group_and_makes_none(pool: Any) -> None:
    assert pool.run(2, all_data_parallel) == [(True, 0)] * 2


def experts() -> dict[str, Any]:
    mesh = ParallelMesh.build(ep=[2, 4])
    sums = {}
    for name, size in (("ep", 2), ("edp", 2), ("ep", 4)):
        tensor = torch.tensor([float(10**mesh.global_rank)])
        dist.all_reduce(tensor, group=mesh.group(name, ep_size=size))
        sums[f"{name}{size}"] = tensor.item()
    with pytest.raises(ValueError, match="does not divide the 4 ranks"):
        mesh.add_ep(3)
    with pytest.raises(ValueError, match=r"has the sizes \(2, 4\)"):
        mesh.group("ep")
    return sums


def test_several_expert_sizes_live_in_one_mesh(pool: Any) -> None:
    results = pool.run(4, experts)
    assert [r["ep2"] for r in results] == [11.0, 11.0, 1100.0, 1100.0]
    assert [r["edp2"] for r in results] == [101.0, 1010.0, 101.0, 1010.0]
    assert [r["ep4"] for r in results] == [1111.0] * 4


class MegatronLike:
    """dp x tp of 4 ranks, as Megatron's parallel state presents it."""

    def __init__(self) -> None:
        rank = dist.get_rank()
        self.tp = self.dp = None
        for ranks in ([0, 1], [2, 3]):
            group = dist.new_group(ranks)
            self.tp = group if rank in ranks else self.tp
        for ranks in ([0, 2], [1, 3]):
            group = dist.new_group(ranks)
            self.dp = group if rank in ranks else self.dp

    def get_model_parallel_group(self) -> Any:
        return self.tp

    def get_data_parallel_group(self) -> Any:
        return self.dp


class SequenceOnly:
    """Two sequence-parallel ranks, two replicas; the sequence group is also called the model group."""

    def __init__(self) -> None:
        rank = dist.get_rank()
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.sp = groups[rank // 2]

    def get_model_parallel_group(self) -> Any:
        return self.sp

    def get_sequence_parallel_group(self) -> Any:
        return self.sp

    def get_sequence_data_parallel_group(self) -> Any:
        return dist.group.WORLD


def from_mpu(kind: type) -> tuple[dict[str, tuple[int, ...]], bool, dict[str, float]]:
    mpu = kind()
    mesh = ParallelMesh.from_mpu(mpu)
    lines = {axis: mesh.ranks(axis) for axis in ("dp", "sp", "tp", "pp", "zero", "mp")}
    own = mesh.group("tp") is mpu.tp if kind is MegatronLike else mesh.group("sp") is mpu.sp
    return lines, own, sums_of(mesh, ("zero", "dp"))


def test_megatron_objects_are_read_by_their_groups(pool: Any) -> None:
    lines, own, sums = pool.run(4, from_mpu, MegatronLike)[3]
    assert lines == {"dp": (1, 3), "sp": (3,), "tp": (2, 3), "pp": (3,), "zero": (1, 3), "mp": (2, 3)}
    assert own
    assert sums == {"zero": 1010.0, "dp": 1010.0}


def test_sequence_objects_are_not_taken_for_tensor_parallel(pool: Any) -> None:
    lines, own, sums = pool.run(4, from_mpu, SequenceOnly)[2]
    assert lines == {"dp": (0, 2), "sp": (2, 3), "tp": (2,), "pp": (2,), "zero": (0, 1, 2, 3), "mp": (2,)}
    assert own
    assert sums == {"zero": 1111.0, "dp": 101.0}


def torch_views() -> tuple[list[int], list[float]]:
    mesh = ParallelMesh.build(tp=2)
    view = mesh.device_mesh("dp", "tp")
    tensor = torch.tensor([float(10**mesh.global_rank)])
    dist.all_reduce(tensor, group=view.get_group("tp"))
    whole = comm.initialize_mesh_device((2, 2), ("data_parallel", "sequence_parallel"))
    other = torch.tensor([float(10**mesh.global_rank)])
    dist.all_reduce(other, group=whole.get_group("data_parallel"))
    return view.mesh.flatten().tolist(), [tensor.item(), other.item()]


def test_device_mesh_views_use_the_groups_of_the_mesh(pool: Any) -> None:
    results = pool.run(4, torch_views)
    assert results[0] == ([0, 1, 2, 3], [11.0, 101.0])
    assert results[3] == ([0, 1, 2, 3], [1100.0, 1010.0])


def close_returns_groups() -> tuple[int, bool]:
    before = len(dist.distributed_c10d._world.pg_map)
    mesh = ParallelMesh.build(tp=2, hpz=2)
    mesh.close()
    mesh.close()
    after = len(dist.distributed_c10d._world.pg_map)
    set_current_mesh(mesh)
    set_current_mesh(None)
    return after - before, current_mesh().ranks("dp") == (0, 1, 2, 3)


def test_close_destroys_what_the_mesh_made(pool: Any) -> None:
    assert pool.run(4, close_returns_groups) == [(0, True)] * 4


def engines_after_another(late: int, destroy: bool) -> tuple[list[int], list[str]]:
    """Meshes that follow each other, each with a group of its own; rank `late` keeps one of them for a while."""
    before, alive = current_mesh(), dist.distributed_c10d._world.pg_map
    at_first = set(alive)
    kept, made, used = [], [], []
    for number in range(6):
        mesh = ParallelMesh.build()
        set_current_mesh(mesh)
        group = mesh.separate_group("dp", "gathers")
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 2.0
        if number == 1 and dist.get_rank() == late:
            kept.append(mesh)
        if number == 4:
            kept.clear()
        if destroy:
            mesh.retire()
        made.append(len(alive) - len(at_first))
        used.append(group.group_name)
    set_current_mesh(before)
    for group in set(alive) - at_first:
        dist.destroy_process_group(group)
    return made, used


@pytest.mark.parametrize(("destroy", "made"), ((True, [1, 1, 1, 1, 1, 1]), (False, [1, 1, 2, 2, 2, 2])))
def test_groups_of_engines_that_are_gone_are_used_again(pool: Any, destroy: bool, made: list[int]) -> None:
    """Destroyed or only forgotten; what one rank still has is used by none."""
    first, second = pool.run(2, engines_after_another, 1, destroy)
    assert first == second
    assert first[0] == made
    assert len(set(first[1])) == made[-1]


def cut_after_another() -> list[int]:
    """Meshes that follow each other, each cut into the same blocks."""
    before, alive = current_mesh(), dist.distributed_c10d._world.pg_map
    at_first = set(alive)
    made = []
    for _ in range(3):
        mesh = ParallelMesh.build(tp=2)
        set_current_mesh(mesh)
        mesh.levels(2)
        made.append(len(alive) - len(at_first))
    set_current_mesh(before)
    for group in set(alive) - at_first:
        dist.destroy_process_group(group)
    return made


def test_meshes_of_one_world_share_the_groups_of_equal_ranks(pool: Any) -> None:
    """Each engine made its own, and left them behind."""
    for made in pool.run(4, cut_after_another, timeout=30.0):
        assert made == [made[0]] * 3
