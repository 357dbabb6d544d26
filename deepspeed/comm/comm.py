"""The public collectives: torch.distributed's, with a bounded wait and an optional log.

Owns: signatures and the choice between our own transport (`collectives.py`) and torch's call. Does not own: groups,
starting up (`init.py`), the log (`logging.py`), transfers between two ranks (`p2p.py`).
Every function that communicates waits for the limit of its group at most and then raises `CollectiveError`. With
`async_op=True` it returns a `Handle`; on ranks outside the group it does nothing and returns None, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm import collectives, host_calls, objects
from deepspeed.comm.at_once import sum_at_once
from deepspeed.comm.call import Handle, LogOptions, begin, enter, membership, wait_mode
from deepspeed.comm.environment import in_aml, in_aws_sm, in_dlts
from deepspeed.comm.exchanges import start_barrier
from deepspeed.comm.group_facts import Group, GroupFacts
from deepspeed.comm.init import (
    init_distributed,
    mpi_discovery,
    patch_aml_env_for_torch_nccl_backend,
    patch_aws_sm_env_for_torch_nccl_backend,
)
from deepspeed.comm.logging import (
    comms_logger,
    configure,
    get_comm_operation_count,
    get_logged_comm_ops,
    has_comm_data,
    log_summary,
    reset_log,
)
from deepspeed.comm.p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
from deepspeed.comm.pending import blocking
from deepspeed.comm.reduce_op import ReduceOp, to_torch
from deepspeed.comm.state import (
    destroy_process_group,
    enable_symm_mem_for_group,
    get_all_ranks_from_group,
    get_backend,
    get_global_rank,
    get_local_rank,
    get_rank,
    get_world_group,
    get_world_size,
    has_all_gather_into_tensor,
    has_all_reduce_coalesced,
    has_coalescing_manager,
    has_reduce_scatter_tensor,
    initialize_mesh_device,
    is_available,
    is_initialized,
    new_group,
)

__all__ = [
    "Handle",
    "P2POp",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "comms_logger",
    "configure",
    "destroy_process_group",
    "enable_symm_mem_for_group",
    "gather",
    "get_all_ranks_from_group",
    "get_backend",
    "get_comm_operation_count",
    "get_global_rank",
    "get_local_rank",
    "get_logged_comm_ops",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_comm_data",
    "has_reduce_scatter_tensor",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "mpi_discovery",
    "new_group",
    "patch_aml_env_for_torch_nccl_backend",
    "patch_aws_sm_env_for_torch_nccl_backend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
]

# torch renamed the flat forms; the old names warn where the new ones exist.
_torch_all_gather_flat: Callable[..., Any] = getattr(torch_dist, "all_gather_single", torch_dist.all_gather_into_tensor)
_torch_reduce_scatter_flat: Callable[..., Any] = getattr(
    torch_dist, "reduce_scatter_single", torch_dist.reduce_scatter_tensor
)


_SUM: Any = torch_dist.ReduceOp.SUM


def _reduction(op: Any, facts: GroupFacts, tensor: torch.Tensor) -> tuple[Any, bool]:
    """(torch's reduction, whether the result must still be divided): AVG is a sum where the backend lacks it."""
    if op is ReduceOp.SUM:  # nearly every call; torch's own class compares slowly
        return _SUM, False
    torch_op = to_torch(op)
    if torch_op == torch_dist.ReduceOp.AVG and not facts.knows_average(tensor.device):
        return torch_dist.ReduceOp.SUM, True
    return torch_op, False


def all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str = "",
) -> Handle | None:
    """Reduce `tensor` over the ranks, in place."""
    if op is ReduceOp.SUM and not async_op and not prof and sum_at_once(tensor, group):
        return None
    return _all_reduce("all_reduce", [tensor], op, group, async_op, (prof, log_name))


def inference_all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str = "",
) -> Handle | None:
    """`all_reduce` as generation calls it."""
    return _all_reduce("all_reduce", [tensor], op, group, async_op, (prof, log_name))


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str = "",
) -> Handle | None:
    """Reduce each of `tensors` over the ranks, in place."""
    return _all_reduce("all_reduce_coalesced", tensors, op, group, async_op, (prof, log_name))


def _all_reduce(
    name: str, tensors: Sequence[torch.Tensor], op: Any, group: Group | None, async_op: bool, log: LogOptions
) -> Handle | None:
    if not tensors:
        return None
    nbytes = sum(tensor.nbytes for tensor in tensors)
    facts = enter(name, group, nbytes)
    if facts is None:
        return None
    torch_op, divide = _reduction(op, facts, tensors[0])
    works: list[Any] = []
    steps: list[Callable[[], object]] = []
    for tensor in tensors:
        through_memory = host_calls.all_reduce(facts, tensor, torch_op)
        if through_memory is None:
            works.append(torch_dist.all_reduce(tensor, torch_op, group, async_op=True))
        else:
            works.append(through_memory[0])
            steps += [through_memory[1]] if through_memory[1] is not None else []
        if divide:
            steps.append(partial(tensor.div_, facts.size))

    def finish() -> None:
        for step in steps:
            step()

    mode = wait_mode(facts, tensors[0].device)
    return begin(name, tuple(works), facts, mode, nbytes, async_op, log, finish if steps else None)


def broadcast(
    tensor: torch.Tensor,
    src: int,
    group: Group | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "broadcast",
    debug: str = "",
) -> Handle | None:
    """Copy `tensor` of global rank `src` to all ranks of the group."""
    facts = enter("broadcast", group, tensor.nbytes, src)
    if facts is None:
        return None
    source = src if group is None else torch_dist.get_group_rank(group, src)
    work, finish = host_calls.broadcast(facts, tensor, source) or (
        torch_dist.broadcast(tensor, src, group, async_op=True),
        None,
    )
    mode = wait_mode(facts, tensor.device)
    return begin("broadcast", work, facts, mode, tensor.nbytes, async_op, (prof, log_name), finish)


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: str = "",
) -> Handle | None:
    """Reduce `tensor` over the ranks into that of global rank `dst`; the others' content is undefined afterwards."""
    facts = enter("reduce", group, tensor.nbytes, dst)
    if facts is None:
        return None
    torch_op, divide = _reduction(op, facts, tensor)
    work = torch_dist.reduce(tensor, dst, torch_op, group, async_op=True)
    finish = (lambda: tensor.div_(facts.size)) if divide and get_rank() == dst else None
    mode = wait_mode(facts, tensor.device)
    return begin("reduce", work, facts, mode, tensor.nbytes, async_op, (prof, log_name), finish)


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Group | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather",
    debug: str = "",
) -> Handle | None:
    """Fill `tensor_list` (one tensor per rank) with every rank's `tensor`."""
    facts = enter("all_gather", group)
    if facts is None:
        return None
    work, finish = host_calls.all_gather_list(facts, tensor_list, tensor) or (
        torch_dist.all_gather(tensor_list, tensor, group, async_op=True),
        None,
    )
    nbytes = sum(part.nbytes for part in tensor_list)
    return begin("all_gather", work, facts, wait_mode(facts, tensor.device), nbytes, async_op, (prof, log_name), finish)


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    group: Group | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: str = "",
) -> Handle | None:
    """Concatenate every rank's `tensor` into `output_tensor`."""
    facts = enter("all_gather_into_tensor", group, output_tensor.nbytes)
    if facts is None:
        return None
    works = _start_flat_gather(output_tensor, tensor, group, facts)
    mode = wait_mode(facts, tensor.device)
    return begin("all_gather_into_tensor", works, facts, mode, output_tensor.nbytes, async_op, (prof, log_name))


def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group | None = None,
    async_op: bool = False,
    debug: str = "",
) -> Handle | None:
    """`all_gather_into_tensor` under its older name."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Group | None = None,
    async_op: bool = False,
) -> Handle | None:
    """`all_gather_into_tensor` for several pairs."""
    if len(output_tensors) != len(input_tensors):
        raise ValueError(f"all_gather_coalesced: {len(output_tensors)} outputs for {len(input_tensors)} inputs")
    if not output_tensors:
        return None
    nbytes = sum(output.nbytes for output in output_tensors)
    facts = enter("all_gather_coalesced", group, nbytes)
    if facts is None:
        return None
    works: tuple[Any, ...] = ()
    for output, piece in zip(output_tensors, input_tensors, strict=True):
        works += _start_flat_gather(output, piece, group, facts)
    mode = wait_mode(facts, input_tensors[0].device)
    return begin("all_gather_coalesced", works, facts, mode, nbytes, async_op, (False, "all_gather_coalesced"))


def _start_flat_gather(
    output: torch.Tensor, piece: torch.Tensor, group: Group | None, facts: GroupFacts
) -> tuple[Any, ...]:
    plain = output.is_contiguous() and piece.is_contiguous() and output.dtype is piece.dtype
    if plain and output.numel() == piece.numel() * facts.size and not output.is_complex():
        return collectives.start_all_gather(output.view(-1), piece.view(-1), group, facts)
    return (_torch_all_gather_flat(output, piece, group=group, async_op=True),)


def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: str = "",
) -> Handle | None:
    """Reduce `tensor` over the ranks; each keeps its slice in `output_tensor`."""
    facts = enter("reduce_scatter_tensor", group, tensor.nbytes)
    if facts is None:
        return None
    return _reduce_scatter("reduce_scatter_tensor", output_tensor, tensor, op, group, facts, async_op, (prof, log_name))


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    prof: bool = False,
    debug: str = "",
) -> Handle | None:
    """`reduce_scatter_tensor` under its older name."""
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op, prof)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: str = "",
) -> Handle | None:
    """Reduce entry r of `input_list` over the ranks into `output` of rank r. All entries have the shape of `output`."""
    facts = membership(group)
    if facts is None:
        return None
    wrong = [tuple(part.shape) for part in input_list if part.shape != output.shape]
    if len(input_list) != facts.size or wrong:
        raise ValueError(
            f"reduce_scatter: needs {facts.size} tensors of the output's shape {tuple(output.shape)}; found "
            f"{len(input_list)}, of which these differ: {wrong}"
        )
    whole = torch.cat([part.reshape(-1) for part in input_list])
    enter("reduce_scatter", group, whole.nbytes)
    return _reduce_scatter("reduce_scatter", output, whole, op, group, facts, async_op, (prof, log_name))


def _reduce_scatter(
    name: str,
    output: torch.Tensor,
    whole: torch.Tensor,
    op: Any,
    group: Group | None,
    facts: GroupFacts,
    async_op: bool,
    log: LogOptions,
) -> Handle | None:
    mode = wait_mode(facts, whole.device)
    torch_op, divide = _reduction(op, facts, whole)
    ours = torch_op == torch_dist.ReduceOp.SUM and whole.is_floating_point() and facts.sums_locally(whole.device)
    if ours and output.is_contiguous() and whole.is_contiguous() and facts.size > 1:
        flat, pieces = output.view(-1), whole.view(-1)
        works, sum_up = collectives.start_reduce_scatter(flat, pieces, group, facts, average=divide)
        return begin(name, works, facts, mode, whole.nbytes, async_op, log, sum_up)
    target = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype, device=output.device)
    work = host_calls.reduce_scatter(facts, target, whole, torch_op)
    if work is None:
        work = _torch_reduce_scatter_flat(target, whole, op=torch_op, group=group, async_op=True)

    def finish() -> None:
        if divide:
            target.div_(facts.size)
        if target is not output:
            output.copy_(target)

    return begin(name, work, facts, mode, whole.nbytes, async_op, log, finish)


def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all_single",
    debug: str = "",
) -> Handle | None:
    """Send piece j of `tensor` to rank j; piece i of `output` comes from rank i. Splits count rows of dim 0."""
    facts = enter("all_to_all_single", group)
    if facts is None:
        return None
    work, finish = host_calls.all_to_all(facts, output, tensor, output_split_sizes, input_split_sizes) or (
        torch_dist.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group, async_op=True),
        None,
    )
    mode = wait_mode(facts, tensor.device)
    return begin("all_to_all_single", work, facts, mode, tensor.nbytes, async_op, (prof, log_name), finish)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all",
    debug: str = "",
) -> Handle | None:
    """Send entry j of `input_tensor_list` to rank j; entry i of `output_tensor_list` comes from rank i."""
    facts = enter("all_to_all", group)
    if facts is None:
        return None
    device = input_tensor_list[0].device
    mode = wait_mode(facts, device)
    nbytes = sum(part.nbytes for part in input_tensor_list)
    if not facts.sums_locally(device):
        work = torch_dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op=True)
        return begin("all_to_all", work, facts, mode, nbytes, async_op, (prof, log_name))
    # gloo's list form moves the bytes several times: one flat exchange instead.
    sent = torch.cat([part.reshape(-1) for part in input_tensor_list])
    send_sizes = [part.numel() for part in input_tensor_list]
    receive_sizes = [part.numel() for part in output_tensor_list]
    received = torch.empty(sum(receive_sizes), dtype=output_tensor_list[0].dtype, device=device)
    work, _ = host_calls.all_to_all(facts, received, sent, receive_sizes, send_sizes) or (
        torch_dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group, async_op=True),
        None,
    )

    def finish() -> None:
        for part, piece in zip(output_tensor_list, received.split(receive_sizes), strict=True):
            part.copy_(piece.view(part.shape))

    return begin("all_to_all", work, facts, mode, nbytes, async_op, (prof, log_name), finish)


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: Group | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "gather",
    debug: str = "",
) -> Handle | None:
    """Collect every rank's `tensor` in `gather_list` of global rank `dst`."""
    facts = enter("gather", group, root=dst)
    if facts is None:
        return None
    work = torch_dist.gather(tensor, gather_list, dst, group, async_op=True)
    return begin("gather", work, facts, wait_mode(facts, tensor.device), tensor.nbytes, async_op, (prof, log_name))


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: Group | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "scatter",
    debug: str = "",
) -> Handle | None:
    """Hand entry r of `scatter_list` of global rank `src` to rank r of the group."""
    facts = enter("scatter", group, root=src)
    if facts is None:
        return None
    work = torch_dist.scatter(tensor, scatter_list, src, group, async_op=True)
    return begin("scatter", work, facts, wait_mode(facts, tensor.device), tensor.nbytes, async_op, (prof, log_name))


def barrier(
    group: Group | None = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: str = "",
) -> Handle | None:
    """Wait until every rank of the group is here."""
    facts = enter("barrier", group)
    if facts is None:
        return None
    work = start_barrier(group, facts, device_ids=device_ids)
    return begin("barrier", work, facts, collectives.barrier_mode(group, facts), 0, async_op, (prof, log_name))


def monitored_barrier(
    group: Group | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
    prof: bool = False,
    log_name: str = "monitored_barrier",
    debug: str = "",
) -> None:
    """`barrier` with a limit of its own, where the backend has one (gloo). The error names missing ranks."""
    facts = membership(group)
    if facts is None:
        return
    if torch_dist.get_backend(group) == "gloo":
        with blocking("monitored_barrier", ""):
            torch_dist.monitored_barrier(group, timeout, wait_all_ranks)
    else:
        barrier(group, prof=prof, log_name=log_name)


def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Group | None = None,
    prof: bool = False,
    log_name: str = "all_gather_object",
    debug: str = "",
) -> None:
    """Fill `object_list` with every rank's picklable `obj`. The log sees the two gathers of bytes that do it."""
    if membership(group) is not None:
        objects.all_gather_object(object_list, obj, group)


def broadcast_object_list(
    object_list: list[Any],
    src: int,
    group: Group | None = None,
    device: torch.device | None = None,
    prof: bool = False,
    log_name: str = "broadcast_object_list",
    debug: str = "",
) -> None:
    """Replace the picklable entries of `object_list` by those of global rank `src`; the log sees two broadcasts."""
    if membership(group) is not None:
        objects.broadcast_object_list(object_list, src, group, device)
