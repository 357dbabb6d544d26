"""The public collectives: torch.distributed's, with a bounded wait and an optional log.

Owns: signatures and the choice between our own transport (`collectives.py`) and torch's call. Does not own: groups,
starting up (`init.py`), the log (`logging.py`), transfers between two ranks (`p2p.py`).
Every function that communicates waits for the limit of its group at most and then raises `CollectiveError`. With
`async_op=True` it returns a `Handle`; on ranks outside the group it does nothing and returns None, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm import collectives, host_calls
from deepspeed.comm.at_once import sum_at_once
from deepspeed.comm.call import Handle, LogOptions, begin, enter, membership, wait_mode
from deepspeed.comm.environment import in_aml, in_aws_sm, in_dlts
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
from deepspeed.comm.moves import (
    all_gather_object,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast_object_list,
    gather,
    monitored_barrier,
    scatter,
)
from deepspeed.comm.p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
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

# torch renamed the flat form; the old name warns where the new one exists.
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
        through_memory = host_calls.all_reduce(facts, tensor, torch_op, average=divide)
        if through_memory is not None:
            work, finish = through_memory
        else:
            dense, finish = host_calls.dense_and_back(tensor)
            work = torch_dist.all_reduce(dense, torch_op, group, async_op=True)
        works.append(work)
        steps += [finish] if finish is not None else []
        if divide and through_memory is None:
            steps.append(partial(tensor.div_, facts.size))

    mode = wait_mode(facts, tensors[0].device)
    return begin(name, tuple(works), facts, mode, nbytes, async_op, log, host_calls.in_turn(steps))


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
    through_memory = host_calls.broadcast(facts, tensor, source)
    if through_memory is None:
        dense, step = host_calls.dense_and_back(tensor)
        through_memory = torch_dist.broadcast(dense, src, group, async_op=True), step
    work, finish = through_memory
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
    dense, step = host_calls.dense_and_back(tensor)
    work = torch_dist.reduce(dense, dst, torch_op, group, async_op=True)
    steps: list[Callable[[], object]] = [] if step is None else [step]
    steps += [partial(tensor.div_, facts.size)] if divide and get_rank() == dst else []
    mode = wait_mode(facts, tensor.device)
    return begin("reduce", work, facts, mode, tensor.nbytes, async_op, (prof, log_name), host_calls.in_turn(steps))


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
    facts = membership(group)
    if facts is None:
        return None
    if facts.sums_locally(tensor.device):
        host_calls.check_gather_list(facts, tensor_list, tensor)
    enter("all_gather", group)
    through_memory = host_calls.all_gather_list(facts, tensor_list, tensor)
    if through_memory is None:
        parts, steps = host_calls.dense_list(tensor_list)
        work = torch_dist.all_gather(parts, host_calls.dense_and_back(tensor)[0], group, async_op=True)
        through_memory = work, host_calls.in_turn(steps)
    work, finish = through_memory
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
    facts = membership(group)
    if facts is None:
        return None
    _check_flat_gather(output_tensor, tensor, facts)
    enter("all_gather_into_tensor", group, output_tensor.nbytes)
    works, finish = _start_flat_gather(output_tensor, tensor, group, facts)
    mode = wait_mode(facts, tensor.device)
    return begin("all_gather_into_tensor", works, facts, mode, output_tensor.nbytes, async_op, (prof, log_name), finish)


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
    facts = membership(group)
    if facts is None:
        return None
    for output, piece in zip(output_tensors, input_tensors, strict=True):
        _check_flat_gather(output, piece, facts)
    enter("all_gather_coalesced", group, nbytes)
    works: tuple[Any, ...] = ()
    steps: list[Callable[[], object]] = []
    for output, piece in zip(output_tensors, input_tensors, strict=True):
        started, step = _start_flat_gather(output, piece, group, facts)
        works += started
        steps += [] if step is None else [step]
    mode = wait_mode(facts, input_tensors[0].device)
    log = (False, "all_gather_coalesced")
    return begin("all_gather_coalesced", works, facts, mode, nbytes, async_op, log, host_calls.in_turn(steps))


# Arguments are checked before a call is announced: ranks that all raise are then still in step.
def _check_flat_gather(output: torch.Tensor, piece: torch.Tensor, facts: GroupFacts) -> None:
    if output.dtype is not piece.dtype or output.numel() != piece.numel() * facts.size:
        raise ValueError(
            f"all_gather_into_tensor: the output must have {facts.size} (ranks) x {piece.numel()} elements of "
            f"{piece.dtype}; found shape {tuple(output.shape)} of {output.dtype}"
        )


def _start_flat_gather(
    output: torch.Tensor, piece: torch.Tensor, group: Group | None, facts: GroupFacts
) -> tuple[tuple[Any, ...], Callable[[], object] | None]:
    """(works, finishing step) of one pair. How it travels depends on nothing that may differ between ranks."""
    dense = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype, device=output.device)
    works = collectives.start_all_gather(_flat(dense), _flat(piece), group, facts)
    return works, None if dense is output else partial(output.copy_, dense)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The values end to end, complex ones as pairs, which every backend moves: of a contiguous tensor a view."""
    pairs = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return pairs.contiguous().view(-1)


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
    facts = membership(group)
    if facts is None:
        return None
    if tensor.numel() != output_tensor.numel() * facts.size:
        raise ValueError(
            f"reduce_scatter_tensor: the input must have {facts.size} (ranks) x {output_tensor.numel()} elements (of "
            f"the output); found shapes {tuple(tensor.shape)} for the output {tuple(output_tensor.shape)}"
        )
    enter("reduce_scatter_tensor", group, tensor.nbytes)
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
    # Strides differ between ranks and must not choose the way. Flat: gloo takes the shape of a scalar for garbage.
    target = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype, device=output.device)
    flat, pieces = target.view(-1), whole.contiguous().view(-1)
    steps: list[Callable[[], object]] = [] if target is output else [partial(output.copy_, target)]
    if torch_op == torch_dist.ReduceOp.SUM and whole.is_floating_point() and facts.sums_locally(whole.device):
        works, sum_up = collectives.start_reduce_scatter(flat, pieces, group, facts, average=divide)
        steps = steps if sum_up is None else [sum_up, *steps]
        return begin(name, works, facts, mode, whole.nbytes, async_op, log, host_calls.in_turn(steps))
    work = host_calls.reduce_scatter(facts, flat, pieces, torch_op)
    steps = [partial(target.div_, facts.size), *steps] if divide else steps
    if work is None and facts.sums_locally(whole.device):  # as gloo itself does; its own work never says it is over
        everything = pieces.clone()
        work = torch_dist.all_reduce(everything, torch_op, group, async_op=True)
        steps = [lambda: flat.copy_(everything.view(facts.size, -1)[facts.rank]), *steps]
    elif work is None:
        work = _torch_reduce_scatter_flat(flat, pieces, op=torch_op, group=group, async_op=True)
    return begin(name, work, facts, mode, whole.nbytes, async_op, log, host_calls.in_turn(steps))
