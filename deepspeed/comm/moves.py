"""The public collectives that move tensors and objects and add nothing up: all-to-all, gather, scatter, barrier.

Owns: their signatures and the choice between shared memory and torch's call. Does not own: sums, broadcasts and flat
gathers (`comm.py`, where all public names are).
Invariant: as of every public collective (`comm.py`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm import collectives, host_calls, objects
from deepspeed.comm.call import Handle, begin, enter, membership, wait_mode
from deepspeed.comm.exchanges import start_barrier
from deepspeed.comm.group_facts import Group
from deepspeed.comm.pending import blocking

__all__ = [
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast_object_list",
    "gather",
    "monitored_barrier",
    "scatter",
]


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
    facts = membership(group)
    if facts is None:
        return None
    host_calls.check_all_to_all(facts, output, tensor, output_split_sizes, input_split_sizes)
    enter("all_to_all_single", group)
    splits = output_split_sizes, input_split_sizes
    through_memory = host_calls.all_to_all(facts, output, tensor, *splits)
    if through_memory is None:
        dense, step = host_calls.dense_and_back(output)
        sent, _ = host_calls.dense_and_back(tensor)
        through_memory = torch_dist.all_to_all_single(dense, sent, *splits, group, async_op=True), step
    work, finish = through_memory
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
    parts, steps = host_calls.dense_list(gather_list) if gather_list else (gather_list, [])
    work = torch_dist.gather(host_calls.dense_and_back(tensor)[0], parts, dst, group, async_op=True)
    mode = wait_mode(facts, tensor.device)
    return begin("gather", work, facts, mode, tensor.nbytes, async_op, (prof, log_name), host_calls.in_turn(steps))


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
    dense, step = host_calls.dense_and_back(tensor)
    parts = host_calls.dense_list(scatter_list)[0] if scatter_list else scatter_list
    work = torch_dist.scatter(dense, parts, src, group, async_op=True)
    mode = wait_mode(facts, tensor.device)
    return begin("scatter", work, facts, mode, tensor.nbytes, async_op, (prof, log_name), step)


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
