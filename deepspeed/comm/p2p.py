"""Transfers between two ranks: torch.distributed's, with a bounded wait and an optional log.

gloo waits for a transfer for the limit of the group and cannot be woken before: its wait may not be cut into slices
(the first cut would close the connection), so another rank's failure ends it only when that rank's process ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm.call import Handle, LogOptions, membership, require_initialized
from deepspeed.comm.group_facts import Group
from deepspeed.comm.pending import WaitMode

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"]


class TransferHandle(Handle):
    """A transfer: only two ranks take part, so it is not among the calls that all ranks count."""

    __slots__ = ()
    counts = False


def _transfer(
    name: str,
    start: Callable[[], Any],
    tensor: torch.Tensor,
    group: Group | None,
    async_op: bool,
    log: LogOptions,
) -> Handle | None:
    facts = membership(group)
    if facts is None:
        return None
    mode = WaitMode.PLAIN if facts.blocks_host(tensor.device) else WaitMode.STREAM
    handle = TransferHandle((start(),), None, facts, name, tensor.nbytes, mode, log)
    if async_op:
        return handle
    handle.wait()
    return None


def isend(
    tensor: torch.Tensor,
    dst: int,
    group: Group | None = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "isend",
    debug: str = "",
) -> Handle | None:
    """Start sending `tensor` to global rank `dst`."""
    return _transfer("isend", lambda: torch_dist.isend(tensor, dst, group, tag), tensor, group, True, (prof, log_name))


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "irecv",
    debug: str = "",
) -> Handle | None:
    """Start receiving into `tensor` from global rank `src` (None: from any)."""
    return _transfer("irecv", lambda: torch_dist.irecv(tensor, src, group, tag), tensor, group, True, (prof, log_name))


def send(
    tensor: torch.Tensor,
    dst: int,
    group: Group | None = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "send",
    debug: str = "",
) -> None:
    """Send `tensor` to global rank `dst`."""
    _transfer("send", lambda: torch_dist.isend(tensor, dst, group, tag), tensor, group, False, (prof, log_name))


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "recv",
    debug: str = "",
) -> int:
    """Receive into `tensor` from global rank `src` (None: any); returns the sender's rank, -1 outside the group."""
    handle = _transfer("recv", lambda: torch_dist.irecv(tensor, src, group, tag), tensor, group, True, (prof, log_name))
    if handle is None:
        return -1
    work: Any = handle.work
    handle.wait()
    if src is not None:
        return src
    sender: int = work._source_rank()
    return sender if group is None else torch_dist.get_global_rank(group, sender)


class P2POp:
    """One transfer of `batch_isend_irecv`: `op` is `isend` or `irecv`, of this module or of torch.distributed."""

    def __init__(
        self, op: Callable[..., Any], tensor: torch.Tensor, peer: int, group: Group | None = None, tag: int = 0
    ) -> None:
        ours: dict[Callable[..., Any], Callable[..., Any]] = {isend: torch_dist.isend, irecv: torch_dist.irecv}
        self.op = ours.get(op, op)
        if self.op not in (torch_dist.isend, torch_dist.irecv):
            raise ValueError(f"P2POp: op must be isend or irecv, found {op!r}")
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag


def batch_isend_irecv(
    p2p_op_list: Sequence[Any],
    prof: bool = False,
    log_name: str = "batch_isend_irecv",
    debug: str = "",
) -> list[Handle]:
    """Start several transfers (our `P2POp` or torch's) as one batch."""
    require_initialized()
    ops: list[Any] = [
        torch_dist.P2POp(op.op, op.tensor, op.peer, op.group, op.tag) if isinstance(op, P2POp) else op
        for op in p2p_op_list
    ]
    works = torch_dist.batch_isend_irecv(ops)
    name, log = "batch_isend_irecv", (prof, log_name)
    handles: list[Handle] = []
    # A backend may return one work for the whole batch, or one per transfer.
    for work, op in zip(works, ops, strict=False):
        facts = membership(op.group)
        assert facts is not None  # torch has refused a batch on a group this rank is not in
        mode = WaitMode.PLAIN if facts.blocks_host(op.tensor.device) else WaitMode.STREAM
        handles.append(TransferHandle((work,), None, facts, name, op.tensor.nbytes, mode, log))
    return handles
