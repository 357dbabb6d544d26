"""Who am I? Rank, world size and meeting point from the variables that launchers set.

Owns: the table of launchers and the variables each one sets. Pure: works on a mapping, changes nothing.
Does not own: starting torch.distributed (`init.py`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

__all__ = [
    "DEFAULT_AML_MASTER_PORT",
    "DEFAULT_AML_NCCL_SOCKET_IFNAME",
    "HOW_TO_START",
    "LaunchFacts",
    "discover",
    "expand_host_list",
    "get_local_rank_from_launcher",
    "get_world_rank_from_launcher",
    "get_world_size_from_launcher",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
]

DEFAULT_AML_MASTER_PORT = "54965"
DEFAULT_AML_NCCL_SOCKET_IFNAME = "^docker0,lo"

HOW_TO_START = (
    "Start the ranks with `deepspeed script.py ...`, `torchrun --nproc_per_node=N script.py ...`, `mpirun -n N python "
    "script.py ...` or `srun python script.py ...`, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT "
    "for each process. One process alone needs none of them."
)


@dataclass(frozen=True)
class LaunchFacts:
    """Place of this process in the job."""

    source: str  # which launcher's variables told it
    rank: int
    world_size: int
    local_rank: int
    local_size: int | None = None  # ranks on this machine, where the launcher says so
    master_addr: str | None = None  # None: not told
    master_port: int | None = None


# name, (rank, size, local rank, local size); the first launcher all of whose first two variables exist is taken.
_LAUNCHERS: tuple[tuple[str, tuple[str, str, str, str]], ...] = (
    ("torchrun or deepspeed", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    (
        "Open MPI",
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    (
        "MVAPICH2",
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
    # srun sets the STEP variables; a plain process inside an allocation has PROCID but no step of several tasks.
    ("Slurm", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")),
    ("MPICH or Intel MPI", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
)


def discover(env: Mapping[str, str] | None = None, *, use_mpi: bool = True) -> LaunchFacts | None:
    """Facts from the first launcher whose variables are set, or None when no launcher set any.

    Args:
        env: the environment; default `os.environ`.
        use_mpi: also look at the variables of MPI and Slurm, not only RANK and WORLD_SIZE.

    Raises:
        ValueError: a variable is missing beside its siblings, or is not a number.
    """
    env = os.environ if env is None else env
    for source, (rank_name, size_name, local_name, local_size_name) in _LAUNCHERS if use_mpi else _LAUNCHERS[:1]:
        if rank_name not in env or size_name not in env:
            continue
        rank, size = _integer(env, rank_name), _integer(env, size_name)
        if not 0 <= rank < size:
            raise ValueError(f"{rank_name}={rank} and {size_name}={size} ({source}): the rank must be below the size")
        local_size = _local_size(env, local_size_name)
        local_rank = _integer(env, local_name) if local_name in env else _guess_local_rank(env, rank, size)
        facts = LaunchFacts(source, rank, size, local_rank, local_size)
        return _with_meeting_point(facts, env)
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    if len(missing) == 1:
        given = "RANK" if missing == ["WORLD_SIZE"] else "WORLD_SIZE"
        if given == "WORLD_SIZE" and env["WORLD_SIZE"] == "1":
            return None  # some notebooks export it for one process
        raise ValueError(
            f"environment variable {given}={env[given]!r} is set but {missing[0]} is not: one of several processes "
            f"without its place. {HOW_TO_START}"
        )
    return None


def _with_meeting_point(facts: LaunchFacts, env: Mapping[str, str]) -> LaunchFacts:
    addr = env.get("MASTER_ADDR")
    port = _integer(env, "MASTER_PORT") if "MASTER_PORT" in env else None
    if addr is None and in_aml(env) and facts.source == "Open MPI":
        # Azure: one node has the batch-AI variable only, several nodes have host:port.
        if facts.local_size == facts.world_size and "AZ_BATCHAI_MPI_MASTER_NODE" in env:
            addr = env["AZ_BATCHAI_MPI_MASTER_NODE"]
        elif "AZ_BATCH_MASTER_NODE" in env:
            addr = env["AZ_BATCH_MASTER_NODE"].split(":")[0]
        port = port if port is not None else int(DEFAULT_AML_MASTER_PORT)
    if addr is None and in_aws_sm(env) and "SM_HOSTS" in env:
        addr = json.loads(env["SM_HOSTS"])[0]
    if addr is None and facts.source == "Slurm":
        hosts = expand_host_list(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
        addr = hosts[0] if hosts else None
    if addr is None and (facts.world_size == 1 or facts.local_size == facts.world_size):
        addr = "127.0.0.1"
    return replace(facts, master_addr=addr, master_port=port)


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"environment variable {name}={env[name]!r} is not a whole number") from None


def _local_size(env: Mapping[str, str], name: str) -> int | None:
    """`4`, or Slurm's `4(x2),3`: the size is told only when it is the same on all machines."""
    match = re.fullmatch(r"(\d+)(\(x\d+\))?", env.get(name, ""))
    if match is None:
        # The deepspeed launcher says LOCAL_SIZE.
        return _integer(env, "LOCAL_SIZE") if name == "LOCAL_WORLD_SIZE" and "LOCAL_SIZE" in env else None
    return int(match[1])


def _guess_local_rank(env: Mapping[str, str], rank: int, size: int) -> int:
    if size == 1:
        return 0
    local_size = env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE")
    if local_size is not None and local_size.isdigit():
        return rank % int(local_size)
    raise ValueError(
        f"environment variable LOCAL_RANK is not set for rank {rank} of {size}: it says which device of its machine "
        f"the process uses. {HOW_TO_START}"
    )


def expand_host_list(text: str) -> list[str]:
    """Names of a Slurm host list: `gpu[01-03,07],login1` gives gpu01 gpu02 gpu03 gpu07 login1."""
    hosts: list[str] = []
    for item in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)?", text):
        match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", item)
        if match is None:
            hosts.append(item)
            continue
        prefix, ranges, suffix = match.groups()
        for span in ranges.split(","):
            first, _, last = span.partition("-")
            for number in range(int(first), int(last or first) + 1):
                hosts.append(f"{prefix}{number:0{len(first)}d}{suffix}")
    return hosts


def in_aml(env: Mapping[str, str] | None = None) -> bool:
    """Whether this is an Azure Machine Learning job."""
    return "AZUREML_EXPERIMENT_ID" in (os.environ if env is None else env)


def in_aws_sm(env: Mapping[str, str] | None = None) -> bool:
    """Whether this is an AWS SageMaker training job."""
    return "SM_TRAINING_ENV" in (os.environ if env is None else env)


def in_dlts(env: Mapping[str, str] | None = None) -> bool:
    """Whether this is a DLTS cluster job."""
    return "DLTS_JOB_ID" in (os.environ if env is None else env)


def get_world_rank_from_launcher() -> int:
    """Rank by the launcher's variables; 0 for a process alone."""
    facts = discover()
    return 0 if facts is None else facts.rank


def get_world_size_from_launcher() -> int:
    """Number of ranks by the launcher's variables; 1 for a process alone."""
    facts = discover()
    return 1 if facts is None else facts.world_size


def get_local_rank_from_launcher() -> int:
    """Rank on this machine by the launcher's variables; 0 for a process alone."""
    local = os.environ.get("LOCAL_RANK")
    if local is not None:
        return int(local)
    facts = discover()
    return 0 if facts is None else facts.local_rank
