"""Which rank am I: the variables of every launcher, and what is said when some are missing."""

from __future__ import annotations

import pytest

from deepspeed.comm.environment import LaunchFacts, discover, expand_host_list

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "1234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x4)",
    "SLURM_STEP_NODELIST": "gpu[03-04,7]",
}


@pytest.mark.parametrize(
    ("env", "facts"),
    (
        ({}, None),
        ({"WORLD_SIZE": "1"}, None),
        (TORCHRUN, LaunchFacts("torchrun or deepspeed", 3, 8, 1, 2, "node7", 1234)),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"},
            LaunchFacts("torchrun or deepspeed", 0, 2, 0, 2, "127.0.0.1", None),
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            LaunchFacts("torchrun or deepspeed", 0, 1, 0, None, "127.0.0.1", None),
        ),
        (OPEN_MPI, LaunchFacts("Open MPI", 2, 4, 2, 4, "127.0.0.1", None)),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            LaunchFacts("Open MPI", 2, 4, 0, 2, None, None),
        ),
        ({**OPEN_MPI, **TORCHRUN}, LaunchFacts("torchrun or deepspeed", 3, 8, 1, 2, "node7", 1234)),
        (SLURM, LaunchFacts("Slurm", 5, 16, 1, 4, "gpu03", None)),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4,3"}, LaunchFacts("Slurm", 5, 16, 1, None, "gpu03", None)),
        # A script in an allocation, not started by srun, is alone although the allocation has many tasks.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}, None),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            LaunchFacts("MPICH or Intel MPI", 1, 2, 1, 2, "127.0.0.1", None),
        ),
        (
            {
                "MV2_COMM_WORLD_RANK": "1",
                "MV2_COMM_WORLD_SIZE": "2",
                "MV2_COMM_WORLD_LOCAL_RANK": "1",
                "MASTER_ADDR": "h",
            },
            LaunchFacts("MVAPICH2", 1, 2, 1, None, "h", None),
        ),
        (
            {**OPEN_MPI, "AZUREML_EXPERIMENT_ID": "x", "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.4"},
            LaunchFacts("Open MPI", 2, 4, 2, 4, "10.0.0.4", 54965),
        ),
        (
            {
                **OPEN_MPI,
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "AZUREML_EXPERIMENT_ID": "x",
                "AZ_BATCH_MASTER_NODE": "10.0.0.5:6000",
            },
            LaunchFacts("Open MPI", 2, 4, 2, 2, "10.0.0.5", 54965),
        ),
        (
            {
                **OPEN_MPI,
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "SM_TRAINING_ENV": "{}",
                "SM_HOSTS": '["algo-1", "algo-2"]',
            },
            LaunchFacts("Open MPI", 2, 4, 2, 2, "algo-1", None),
        ),
    ),
)
def test_each_launcher_is_understood(env: dict[str, str], facts: LaunchFacts | None) -> None:
    assert discover(env) == facts


def test_mpi_and_slurm_are_read_only_when_wanted() -> None:
    assert discover(OPEN_MPI, use_mpi=False) is None
    assert discover(TORCHRUN, use_mpi=False) is not None


@pytest.mark.parametrize(
    ("env", "text"),
    (
        ({"RANK": "1"}, "RANK='1' is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE='4' is set but RANK is not"),
        ({"RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "RANK=4 and WORLD_SIZE=4 .*the rank must be below"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK='one' is not a whole number"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "LOCAL_RANK is not set for rank 1 of 4.*torchrun --nproc_per_node"),
    ),
)
def test_missing_variables_are_named_with_the_ways_to_start(env: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        discover(env)


@pytest.mark.parametrize(
    ("text", "hosts"),
    (
        ("", []),
        ("login1", ["login1"]),
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("a[9-11]-ib,b", ["a9-ib", "a10-ib", "a11-ib", "b"]),
    ),
)
def test_slurm_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_host_list(text) == hosts
