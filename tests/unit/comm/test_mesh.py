"""ParallelMesh without processes: one rank alone, and hundreds of ranks on torch's fake process group."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepspeed.comm.mesh import ParallelMesh, current_mesh, set_current_mesh
from deepspeed.comm.rank_grid import RankGrid
from deepspeed.utils import groups


@pytest.fixture
def fake_world(request: pytest.FixtureRequest) -> Iterator[int]:
    rank, size = request.param
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    yield size
    set_current_mesh(None)
    dist.destroy_process_group()


def test_one_rank_needs_no_process_group() -> None:
    mesh = ParallelMesh.build()
    for axis in ("dp", "tp", "pp", "sp", "zero", "mp", "world"):
        assert (mesh.size(axis), mesh.rank(axis), mesh.ranks(axis), mesh.group(axis)) == (1, 0, (0,), None)
    assert current_mesh().world_size == 1
    assert groups._get_sequence_parallel_world_size() == 1
    assert groups._get_data_parallel_world_size() == 1
    set_current_mesh(None)


def test_an_unknown_axis_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="unknown axis 'xp'; this mesh has dp, mp, pp, sp, tp, world, zero"):
        ParallelMesh.build().size("xp")
    with pytest.raises(ValueError, match="no experts of ep_size=4; sizes in use: none"):
        ParallelMesh.build().size("ep", ep_size=4)


def test_sizes_that_do_not_divide_show_the_equation() -> None:
    with pytest.raises(ValueError, match="6 ranks cannot be divided into pp 2 x sp 1 x tp 2 = 4 ranks per replica"):
        ParallelMesh.build(6, rank=0, pp=2, tp=2)
    with pytest.raises(ValueError, match=r"zero_hpz_partition_size=3 does not divide the 4 ranks"):
        ParallelMesh.build(4, rank=0, hpz=3)
    with pytest.raises(ValueError, match="unknown axis 'ep'; a mesh is built of pp, dp, sp and tp"):
        ParallelMesh.build(RankGrid({"dp": 2, "ep": 2}), rank=0)


@pytest.mark.parametrize("fake_world", ((300, 512),), indirect=True)
def test_a_mesh_of_512_ranks_is_built_in_a_second_with_few_groups(fake_world: int) -> None:
    before = len(dist.distributed_c10d._world.pg_map)
    start = time.process_time()
    mesh = ParallelMesh.build(pp=4, sp=2, tp=8, hpz=4, ep=[2, 4])
    spent = time.process_time() - start
    made = len(dist.distributed_c10d._world.pg_map) - before
    # 512 = pp 4 x dp 8 x sp 2 x tp 8; rank 300 = (2, 2, 1, 4)
    assert mesh.ranks("tp") == tuple(range(296, 304))
    assert mesh.ranks("sp") == (292, 300)
    assert mesh.ranks("dp") == tuple(range(268, 396, 16))
    assert mesh.ranks("zero") == tuple(range(260, 388, 8))
    assert mesh.ranks("pp") == (44, 172, 300, 428)
    assert mesh.size("mp") == 32
    assert (mesh.rank("tp"), mesh.rank("sp"), mesh.rank("dp"), mesh.rank("pp")) == (4, 1, 2, 2)
    assert mesh.ranks("hpz") == (292, 300, 308, 316)
    assert mesh.ranks("ep", ep_size=2) == (292, 300)
    assert mesh.group("ep", ep_size=2) is mesh.group("sp")  # the same ranks share one group
    assert mesh.group("ep", ep_size=4) is mesh.group("hpz")
    # tp, sp (= ep of 2), dp (= edp of 2), zero, mp, pp, hpz (= ep of 4), hpz_outer (= edp of 4)
    assert made == 8
    assert spent < 2.0


@pytest.mark.parametrize("fake_world", ((5, 16),), indirect=True)
def test_lines_equal_those_of_the_grid_for_every_shape(fake_world: int) -> None:
    for pp, sp, tp in ((1, 1, 1), (2, 1, 2), (1, 2, 4), (4, 2, 2), (16, 1, 1), (1, 16, 1)):
        mesh = ParallelMesh.build(pp=pp, sp=sp, tp=tp)
        grid = RankGrid({"pp": pp, "dp": 16 // (pp * sp * tp), "sp": sp, "tp": tp})
        for axis in ("pp", "dp", "sp", "tp"):
            assert mesh.ranks(axis) == grid.line(axis, 5)
        assert mesh.ranks("zero") == grid.line(("dp", "sp"), 5)
        assert mesh.ranks("mp") == grid.line(("pp", "tp"), 5)
        mesh.close()


@pytest.mark.parametrize("fake_world", ((3, 8),), indirect=True)
def test_group_functions_speak_of_the_current_mesh(fake_world: int) -> None:
    assert groups._get_data_parallel_group_ranks() == list(range(8))
    set_current_mesh(ParallelMesh.build(tp=2, sp=2))
    assert groups._get_data_parallel_world_size() == 2
    assert groups._get_sequence_parallel_rank() == 1
    assert groups._get_sequence_data_parallel_world_size() == 4
    assert groups._get_broadcast_src_rank() == 1
    assert groups.get_tensor_model_parallel_world_size() == 2
    assert groups.get_tensor_model_parallel_src_rank() == 2
    assert groups._get_max_expert_size() is None
    groups._create_expert_and_data_parallel(2)
    groups._create_expert_and_data_parallel(4)
    assert groups._get_expert_parallel_group_ranks("ep_size_2") == [1, 3]
    assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == [3, 7]
    assert groups._get_max_expert_size_name() == "ep_size_4"
    assert set(groups._get_expert_parallel_group_dict()) == {"ep_size_2", "ep_size_4"}
    assert not groups._zero_param_parallel_is_initialized()
    assert groups._get_zero_param_intra_parallel_group() is None
    groups._create_zero_param_parallel_group(2)
    assert groups._get_zero_param_intra_parallel_group_ranks() == [1, 3]
    groups.set_tensor_model_parallel_rank(7)
    assert groups.get_tensor_model_parallel_rank() == 7
    with pytest.raises(ValueError, match="mp_size=4, but the current mesh has tp=2"):
        groups._create_expert_and_data_parallel(2, mp_size=4)
    with pytest.raises(ValueError, match="'ep_size_4'; found 'experts'"):
        groups._get_expert_parallel_group("experts")


@pytest.mark.parametrize("fake_world", ((1, 4),), indirect=True)
def test_a_mesh_of_an_ended_world_is_not_current_any_more(fake_world: int) -> None:
    set_current_mesh(ParallelMesh.build(tp=2))
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert current_mesh().world_size == 2
    assert current_mesh().size("tp") == 1
