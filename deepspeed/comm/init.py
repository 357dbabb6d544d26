"""`init_distributed`: start torch.distributed from what the launcher, the cluster or the caller says.

Owns: the meeting of the processes, the default time limit, the environment variables set for clients that read them.
Does not own: reading launchers' variables (`environment.py`), groups beyond the default one (`mesh.py`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.comm import watch
from deepspeed.comm.environment import (
    DEFAULT_AML_MASTER_PORT,
    DEFAULT_AML_NCCL_SOCKET_IFNAME,
    HOW_TO_START,
    LaunchFacts,
    discover,
    in_aml,
    in_aws_sm,
)
from deepspeed.comm.logging import configure
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
from deepspeed.utils.logging import logger

__all__ = [
    "init_distributed",
    "mpi_discovery",
    "patch_aml_env_for_torch_nccl_backend",
    "patch_aws_sm_env_for_torch_nccl_backend",
]


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed unless it is running.

    Args:
        dist_backend: "gloo", "nccl", ...; None: what the accelerator uses.
        auto_mpi_discovery: also read the variables of MPI and Slurm when RANK and WORLD_SIZE are not set.
        distributed_port: port of rank 0 when MASTER_PORT is not set.
        timeout: how long a collective may wait for other ranks before every rank raises `CollectiveError`; default
            DEEPSPEED_TIMEOUT minutes (10).
        init_method: URL as in torch.distributed, e.g. "tcp://host:port" or "file:///shared/path"; needs rank and size,
            from the arguments or the environment.
        dist_init_required: False: somebody else has to have started it; anything else: start it when needed.
        config: DeepSpeedConfig whose `comms_logger` section sets up the log of collectives.
        rank, world_size: place of this process, when no launcher tells it.

    A process without any launcher's variables becomes a world of one rank.

    Raises:
        ValueError: variables are missing or contradict each other; the text names them and the ways to start.
        RuntimeError: `dist_init_required=False` but nothing is running, or the ranks could not meet.
    """
    if config is not None:
        configure(deepspeed_config=config)
    if torch_dist.is_initialized():
        _watch_over()
        return
    if dist_init_required is False:
        raise RuntimeError(
            "init_distributed(dist_init_required=False): torch.distributed has not been initialised. Call "
            "torch.distributed.init_process_group first, or leave dist_init_required at None."
        )
    backend = dist_backend if dist_backend is not None else get_accelerator().communication_backend_name()
    limit = timeout if timeout is not None else default_pg_timeout
    facts = _place(rank, world_size, auto_mpi_discovery, init_method)
    if facts is None:
        # Alone: a store in memory, so that no port can be in use.
        torch_dist.init_process_group(backend, store=torch_dist.HashStore(), rank=0, world_size=1, timeout=limit)
        source = "one process, no launcher"
    else:
        _meet(backend, facts, limit, init_method, distributed_port)
        source = facts.source
    _watch_over()
    if verbose and torch_dist.get_rank() == 0:
        logger.info(
            f"torch.distributed: backend {backend}, {torch_dist.get_world_size()} ranks ({source}), "
            f"time limit of a collective {limit.total_seconds():g} s"
        )


def _watch_over() -> None:
    """With several ranks: every way a rank can end says what it was doing.

    gloo ends the process from a thread of its own (`std::terminate`) when a peer sends more than it expects: no Python
    exception, so only the fault handler can tell which line had started the collective.
    """
    if torch_dist.get_world_size() == 1:
        return
    watch.ensure_started()
    if not faulthandler.is_enabled():
        with contextlib.suppress(RuntimeError, ValueError, OSError, AttributeError):  # standard error is no file
            faulthandler.enable()


def _place(rank: int, world_size: int, use_mpi: bool, init_method: str | None) -> LaunchFacts | None:
    """This process's place by the arguments, else by the environment; None for a process alone."""
    if rank >= 0 and world_size >= 0:
        if rank >= world_size:
            raise ValueError(f"init_distributed: rank={rank} must be below world_size={world_size}")
        given = os.environ.get("LOCAL_RANK", "0" if world_size == 1 else None)
        local_rank = int(given) if given is not None else rank
        port = os.environ.get("MASTER_PORT")
        return LaunchFacts(
            "arguments",
            rank,
            world_size,
            local_rank,
            master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1" if world_size == 1 else None),
            master_port=int(port) if port is not None else None,
        )
    if rank >= 0 or world_size >= 0:
        raise ValueError(
            f"init_distributed: rank={rank} and world_size={world_size}: give both or neither. {HOW_TO_START}"
        )
    facts = discover(use_mpi=use_mpi)
    if facts is None and init_method is not None:
        raise ValueError(
            f"init_distributed(init_method={init_method!r}) needs this process's place: pass rank and world_size, or "
            f"set RANK and WORLD_SIZE. {HOW_TO_START}"
        )
    return facts


def _meet(backend: str, facts: LaunchFacts, limit: timedelta, init_method: str | None, distributed_port: int) -> None:
    if init_method is not None and init_method != "env://":
        where = init_method
    else:
        addr = facts.master_addr or _ask_mpi_for_master(facts)
        port = facts.master_port if facts.master_port is not None else distributed_port
        where = f"{addr}:{port}"
        init_method = f"tcp://{where}"
        if facts.source != "arguments":
            _export(facts, addr, port)
            init_method = "env://"  # torchrun's own store is found this way only
            if in_aml() and backend == "nccl":
                os.environ.setdefault("NCCL_SOCKET_IFNAME", DEFAULT_AML_NCCL_SOCKET_IFNAME)
    try:
        torch_dist.init_process_group(
            backend, init_method=init_method, rank=facts.rank, world_size=facts.world_size, timeout=limit
        )
    except (torch_dist.DistNetworkError, torch_dist.DistStoreError) as error:
        if not torch_dist.is_initialized():
            # torch has counted the group it could not make; a second try would wait under a name no other rank uses.
            torch_dist.distributed_c10d._world.group_count = 0
        raise RuntimeError(
            f"rank {facts.rank} of {facts.world_size} could not meet the other ranks at {where} within "
            f"{limit.total_seconds():g} s: {str(error).splitlines()[0]}. Check that all ranks run and reach that host; "
            "if the port is in use, give the job another one (MASTER_PORT, or --master_port of the launcher)."
        ) from error
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    watch.rank_0_hosts_store = init_method.startswith(("env://", "tcp://")) and not agent_has_store


def _export(facts: LaunchFacts, addr: str, port: int) -> None:
    """Set the variables that torch, and clients after a start by MPI or Slurm, read. Those that exist stay."""
    os.environ.setdefault("MASTER_ADDR", addr)
    os.environ.setdefault("MASTER_PORT", str(port))
    os.environ.setdefault("RANK", str(facts.rank))
    os.environ.setdefault("WORLD_SIZE", str(facts.world_size))
    os.environ.setdefault("LOCAL_RANK", str(facts.local_rank))


def _ask_mpi_for_master(facts: LaunchFacts) -> str:
    """Address of rank 0, by a broadcast through mpi4py: several machines, and no variable tells it."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ValueError(
            f"environment variable MASTER_ADDR is not set, and rank {facts.rank} of {facts.world_size} (started by "
            f"{facts.source}) cannot find the machine of rank 0 by itself: set MASTER_ADDR, or install mpi4py. "
            f"{HOW_TO_START}"
        ) from error
    import socket

    return str(MPI.COMM_WORLD.bcast(socket.gethostbyname(socket.gethostname()), root=0))


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from what MPI or Slurm says.

    Raises:
        ValueError: no launcher's variables are set.
    """
    facts = discover()
    if facts is None:
        raise ValueError(f"mpi_discovery: no variables of MPI, Slurm or another launcher found. {HOW_TO_START}")
    os.environ["RANK"] = str(facts.rank)
    os.environ["WORLD_SIZE"] = str(facts.world_size)
    os.environ["LOCAL_RANK"] = str(facts.local_rank)
    os.environ["MASTER_ADDR"] = facts.master_addr or _ask_mpi_for_master(facts)
    os.environ["MASTER_PORT"] = str(facts.master_port if facts.master_port is not None else distributed_port)
    if verbose:
        logger.info(f"place in the job by {facts.source}: rank {facts.rank} of {facts.world_size}")


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """Azure Machine Learning: set the variables torch.distributed reads from Azure's own.

    Raises:
        ValueError: this is not an Azure job, or its variables are incomplete.
    """
    if not in_aml():
        raise ValueError("AZUREML_EXPERIMENT_ID is not set: this is not an Azure Machine Learning job")
    if "AZ_BATCH_MASTER_NODE" not in os.environ:
        os.environ.setdefault("MASTER_PORT", DEFAULT_AML_MASTER_PORT)
    mpi_discovery(distributed_port=master_port, verbose=verbose)
    os.environ["NCCL_SOCKET_IFNAME"] = DEFAULT_AML_NCCL_SOCKET_IFNAME


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """AWS SageMaker: set RANK, LOCAL_RANK and WORLD_SIZE from the variables its MPI sets.

    Raises:
        ValueError: this is not a SageMaker job, or it was not started by MPI.
    """
    if not in_aws_sm():
        raise ValueError("SM_TRAINING_ENV is not set: this is not an AWS SageMaker job")
    facts = discover()
    if facts is None:
        raise ValueError(f"the SageMaker job has no variables of MPI. {HOW_TO_START}")
    os.environ["RANK"] = str(facts.rank)
    os.environ["LOCAL_RANK"] = str(facts.local_rank)
    os.environ["WORLD_SIZE"] = str(facts.world_size)
    if verbose:
        logger.info(f"SageMaker: rank {facts.rank} of {facts.world_size}, local rank {facts.local_rank}")
