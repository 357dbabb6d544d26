"""Named process grids of pipeline parallelism: thin names over `RankGrid` and `ParallelMesh`.

Owns: the historical classes and their axis names (pipe, data, model). Does not own: arithmetic
(`comm/rank_grid.py`) and groups (`comm/mesh.py`).
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch.distributed as torch_dist

from deepspeed.comm.group_facts import Group
from deepspeed.comm.mesh import ParallelMesh
from deepspeed.comm.rank_grid import RankGrid

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
]


class ProcessTopology:
    """Named axes <-> ranks, row-major: the last axis varies fastest.

    Args:
        axes: names, outermost first.
        dims: their sizes.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = list(axes)
        self.dims = list(dims)
        self.grid = RankGrid(dict(zip(axes, dims, strict=True)))
        self.ProcessCoord = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]

    def get_rank(self, **coord_kwargs: int) -> int:
        """Rank at these coordinates; ValueError when an axis is missing."""
        return self.grid.rank(coord_kwargs)

    def get_axis_names(self) -> list[str]:
        """Names of the axes, outermost first."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Short text of a rank's coordinates on the axes not omitted, e.g. `model_00`."""
        coordinates = self.grid.coordinates(rank)
        names = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{coordinates[axis]:02d}" for axis in names)

    def get_dim(self, axis: str) -> int:
        """Size of an axis; 0 for an unknown one."""
        return self.grid.sizes.get(axis, 0)

    def get_coord(self, rank: int) -> Any:
        """Coordinates of a rank, as a namedtuple."""
        return self.ProcessCoord(**self.grid.coordinates(rank))

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """All lists of ranks that differ in this axis only; empty for an unknown axis."""
        return [list(line) for line in self.grid.lines(axis)] if axis in self.grid.sizes else []

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Ranks, ascending, with these coordinates."""
        return self.grid.matching(**filter_kwargs)

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Ranks, ascending, whose coordinate on `axis` is `idx`."""
        return self.grid.matching(**{axis: idx})

    def world_size(self) -> int:
        """Number of ranks."""
        return self.grid.world_size

    def __str__(self) -> str:
        return str({self.get_coord(rank): rank for rank in range(self.world_size())})


class PipeDataParallelTopology(ProcessTopology):
    """Axes pipe, data: the replicas of a stage are neighbours, because gradients are the larger traffic."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Axes pipe, data, model: tensor-parallel ranks are neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """The groups of a topology; usable as an `mpu` object.

    Args:
        topology: axes among pipe, data and model; default: all ranks data parallel.
        process_group: the group the topology numbers; only the default group.

    `slice` is the historical word for tensor parallel; `model` is a whole copy of the model: stages x slices.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Group | None = None) -> None:
        if process_group is not None and process_group is not torch_dist.group.WORLD:
            raise ValueError("PipelineParallelGrid numbers the ranks of the default group; pass process_group=None")
        self.global_rank = torch_dist.get_rank()
        self.world_size = torch_dist.get_world_size()
        self._topo = topology if topology is not None else PipeDataParallelTopology(1, self.world_size)
        if self._topo.world_size() != self.world_size:
            raise ValueError(
                f"the topology {dict(self._topo.grid.sizes)} has {self._topo.world_size()} ranks, the job has "
                f"{self.world_size}"
            )
        names = {"pipe": "pp", "data": "dp", "model": "tp"}
        unknown = [axis for axis in self._topo.axes if axis not in names]
        if unknown:
            raise ValueError(f"unknown axis {unknown[0]!r} in the topology; a pipeline grid has pipe, data and model")
        grid = RankGrid({names[axis]: size for axis, size in self._topo.grid.sizes.items()})
        self.mesh = ParallelMesh.build(grid)
        self.data_parallel_size = self.mesh.size("dp")
        self.pipe_parallel_size = self.mesh.size("pp")
        self.model_parallel_size = self.mesh.size("tp")
        self.slice_parallel_size = self.model_parallel_size
        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1

    def topology(self) -> ProcessTopology:
        """The grid of ranks."""
        return self._topo

    def get_stage_id(self) -> int:
        """This rank's pipeline stage."""
        return self.mesh.rank("pp")

    def get_data_parallel_id(self) -> int:
        """This rank's replica."""
        return self.mesh.rank("dp")

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Rank of another stage with this rank's other coordinates, or those given."""
        coordinates = self._topo.grid.coordinates(self.global_rank)
        coordinates.update({"pipe": stage_id, **kwargs})
        return self._topo.grid.rank(coordinates)

    def get_global_rank(self) -> int:
        """This rank in the job."""
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        """This rank's pipeline stage."""
        return self.mesh.rank("pp")

    def get_pipe_parallel_world_size(self) -> int:
        """Number of stages."""
        return self.mesh.size("pp")

    def get_pipe_parallel_group(self) -> Group:
        """The stages of this replica."""
        return self.mesh.group("pp")

    def get_pipeline_model_parallel_rank(self) -> int:
        """This rank's pipeline stage, under Megatron's name."""
        return self.mesh.rank("pp")

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Number of stages, under Megatron's name."""
        return self.mesh.size("pp")

    def get_pipeline_model_parallel_group(self) -> Group:
        """The stages of this replica, under Megatron's name."""
        return self.mesh.group("pp")

    def get_data_parallel_rank(self) -> int:
        """Position among the replicas of this stage."""
        return self.mesh.rank("dp")

    def get_data_parallel_world_size(self) -> int:
        """Number of replicas."""
        return self.mesh.size("dp")

    def get_data_parallel_group(self) -> Group:
        """The replicas of this stage."""
        return self.mesh.group("dp")

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Ranks of the replicas of this stage."""
        return list(self.mesh.ranks("dp"))

    def get_tensor_model_parallel_rank(self) -> int:
        """Position in the tensor-parallel group."""
        return self.mesh.rank("tp")

    def get_tensor_model_parallel_world_size(self) -> int:
        """Size of the tensor-parallel group."""
        return self.mesh.size("tp")

    def get_tensor_model_parallel_group(self) -> Group:
        """Ranks that share the matrices of this stage."""
        return self.mesh.group("tp")

    def get_model_parallel_rank(self) -> int:
        """Position among the ranks of this copy of the model."""
        return self.mesh.rank("mp")

    def get_model_parallel_world_size(self) -> int:
        """Number of ranks of one copy of the model: stages x slices."""
        return self.mesh.size("mp")

    def get_model_parallel_group(self) -> Group:
        """The ranks of this copy of the model."""
        return self.mesh.group("mp")

    def get_slice_parallel_rank(self) -> int:
        """Position in the tensor-parallel group, under its oldest name."""
        return self.mesh.rank("tp")

    def get_slice_parallel_world_size(self) -> int:
        """Size of the tensor-parallel group, under its oldest name."""
        return self.mesh.size("tp")

    def get_slice_parallel_group(self) -> Group:
        """Ranks that share the matrices of this stage, under its oldest name."""
        return self.mesh.group("tp")

    # Historical attributes: lists of ranks of all groups, and this rank's own.

    @property
    def dp_groups(self) -> list[list[int]]:
        """Ranks of every data-parallel group."""
        return self._topo.get_axis_comm_lists("data")

    @property
    def pipe_groups(self) -> list[list[int]]:
        """Ranks of every pipeline."""
        return self._topo.get_axis_comm_lists("pipe")

    @property
    def model_groups(self) -> list[list[int]]:
        """Ranks of every tensor-parallel group."""
        return self._topo.get_axis_comm_lists("model")

    @property
    def p2p_groups(self) -> list[list[int]]:
        """For each rank: itself and the rank of the next stage, the last stage followed by the first."""
        size = self.pipe_parallel_size
        following: dict[int, int] = {}
        for line in self.pipe_groups:
            following.update({rank: line[(stage + 1) % size] for stage, rank in enumerate(line)})
        return [[rank, following[rank]] for rank in sorted(following)]

    @property
    def dp_group(self) -> list[int]:
        """Ranks of this rank's data-parallel group."""
        return list(self.mesh.ranks("dp"))

    @property
    def pp_group(self) -> list[int]:
        """Ranks of this rank's pipeline."""
        return list(self.mesh.ranks("pp"))

    @property
    def slice_group(self) -> list[int]:
        """Ranks of this rank's tensor-parallel group."""
        return list(self.mesh.ranks("tp"))
