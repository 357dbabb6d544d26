# ruff: noqa: F401  (the imports for type checkers are the exports)
"""Communication: `from deepspeed import comm as dist` reads like torch.distributed.

Names are imported on first use; what each module owns is said in the module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deepspeed.unbuilt import refusal

if TYPE_CHECKING:
    from deepspeed.comm.comm import (
        Handle,
        P2POp,
        ReduceOp,
        all_gather,
        all_gather_coalesced,
        all_gather_into_tensor,
        all_gather_object,
        all_reduce,
        all_reduce_coalesced,
        all_to_all,
        all_to_all_single,
        allgather_fn,
        barrier,
        batch_isend_irecv,
        broadcast,
        broadcast_object_list,
        comms_logger,
        configure,
        destroy_process_group,
        enable_symm_mem_for_group,
        gather,
        get_all_ranks_from_group,
        get_backend,
        get_comm_operation_count,
        get_global_rank,
        get_local_rank,
        get_logged_comm_ops,
        get_rank,
        get_world_group,
        get_world_size,
        has_all_gather_into_tensor,
        has_all_reduce_coalesced,
        has_coalescing_manager,
        has_comm_data,
        has_reduce_scatter_tensor,
        in_aml,
        in_aws_sm,
        in_dlts,
        inference_all_reduce,
        init_distributed,
        initialize_mesh_device,
        irecv,
        is_available,
        is_initialized,
        isend,
        log_summary,
        monitored_barrier,
        mpi_discovery,
        new_group,
        patch_aml_env_for_torch_nccl_backend,
        patch_aws_sm_env_for_torch_nccl_backend,
        recv,
        reduce,
        reduce_scatter,
        reduce_scatter_fn,
        reduce_scatter_tensor,
        reset_log,
        scatter,
        send,
    )
    from deepspeed.comm.environment import (
        get_local_rank_from_launcher,
        get_world_rank_from_launcher,
        get_world_size_from_launcher,
    )
    from deepspeed.comm.errors import (
        CollectiveError,
    )
    from deepspeed.comm.pending import (
        Pending,
    )
    from deepspeed.comm.torch import (
        TorchBackend,
    )
    from deepspeed.constants import (
        TORCH_DISTRIBUTED_DEFAULT_PORT,
        default_pg_timeout,
    )
    from deepspeed.utils.comms_logging import (
        CommsLogger,
        get_caller_func,
    )

_EXPORTS: dict[str, str] = {
    name: module
    for module, names in {
        "deepspeed.comm.comm": """
            Handle P2POp ReduceOp all_gather all_gather_coalesced all_gather_into_tensor all_gather_object
            all_reduce all_reduce_coalesced all_to_all all_to_all_single allgather_fn barrier batch_isend_irecv
            broadcast broadcast_object_list comms_logger configure destroy_process_group
            enable_symm_mem_for_group gather get_all_ranks_from_group get_backend get_comm_operation_count
            get_global_rank get_local_rank get_logged_comm_ops get_rank get_world_group get_world_size
            has_all_gather_into_tensor has_all_reduce_coalesced has_coalescing_manager has_comm_data
            has_reduce_scatter_tensor in_aml in_aws_sm in_dlts inference_all_reduce init_distributed
            initialize_mesh_device irecv is_available is_initialized isend log_summary monitored_barrier
            mpi_discovery new_group patch_aml_env_for_torch_nccl_backend patch_aws_sm_env_for_torch_nccl_backend
            recv reduce reduce_scatter reduce_scatter_fn reduce_scatter_tensor reset_log scatter send""",
        "deepspeed.comm.environment": """
            get_local_rank_from_launcher get_world_rank_from_launcher get_world_size_from_launcher""",
        "deepspeed.comm.errors": "CollectiveError",
        "deepspeed.comm.pending": "Pending",
        "deepspeed.comm.torch": "TorchBackend",
        "deepspeed.utils.comms_logging": "CommsLogger get_caller_func",
        "deepspeed.constants": "TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(refusal(f"{__name__}.{name}") or f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
