"""The public collectives through shared memory: tensors of any strides and list forms, brought to what a channel moves.

Owns: the copies into and out of contiguous memory, as finishing steps. Does not own: the channel (`shm_channel.py`),
who has one (`same_host.py`) and the public signatures (`comm.py`).
Whether a function here takes a call depends on facts that all ranks share (dtype, layout, operation), never on strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from deepspeed.comm import exchanges
from deepspeed.comm.group_facts import GroupFacts
from deepspeed.comm.same_host import channel_of
from deepspeed.comm.shm_channel import Channel, fold_of, reduction_code

__all__ = [
    "all_gather_list",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "check_all_to_all",
    "check_gather_list",
    "dense_and_back",
    "reduce_scatter",
]

Finish: TypeAlias = "Callable[[], object] | None"


def all_reduce(facts: GroupFacts, tensor: torch.Tensor, op: Any, *, average: bool) -> tuple[Any, Finish] | None:
    """(work, finishing step) of reducing `tensor` in place by torch's `op`; None: it goes by the backend.

    `average`: a sum that is divided by the number of ranks; of 16-bit numbers before it is rounded to them.
    """
    channel = channel_of(facts, tensor, "all_reduce", "", tensor.nbytes)
    if channel is None or not _is_plain(tensor):
        return None
    dense = tensor.contiguous()
    before_rounding = average and tensor.is_floating_point() and tensor.itemsize == 2
    work = exchanges.start_host_reduction(channel, dense, op, 1.0 / facts.size if before_rounding else None)
    if work is None:
        return None
    back = _copy_back(tensor, dense)
    divide = partial(tensor.div_, facts.size) if average and not before_rounding else None
    return work, in_turn([step for step in (back, divide) if step is not None])


def broadcast(facts: GroupFacts, tensor: torch.Tensor, source: int) -> tuple[Any, Finish] | None:
    """As `all_reduce`; `source` counts inside the group."""
    channel = channel_of(facts, tensor, "broadcast", "", tensor.nbytes)
    if channel is None or not _is_plain(tensor):
        return None
    dense = tensor.contiguous()
    return channel.broadcast(dense, source), _copy_back(tensor, dense)


def check_gather_list(facts: GroupFacts, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """Raise ValueError unless `outputs` can hold the ranks' `tensor`."""
    if len(outputs) != facts.size or any(o.numel() != tensor.numel() or o.dtype is not tensor.dtype for o in outputs):
        raise ValueError(
            f"all_gather: needs {facts.size} outputs of {tensor.numel()} elements of {tensor.dtype}; found "
            f"{[(tuple(o.shape), o.dtype) for o in outputs][:4]}"
        )


def all_gather_list(
    facts: GroupFacts, outputs: Sequence[torch.Tensor], tensor: torch.Tensor
) -> tuple[Any, Finish] | None:
    """As `all_reduce`; tensors that `check_gather_list` has passed."""
    channel = channel_of(facts, tensor, "all_gather", "", tensor.nbytes)
    if channel is None or not _is_plain(tensor):
        return None
    received = torch.empty((facts.size, tensor.numel()), dtype=tensor.dtype)
    work = channel.all_gather(received, tensor.contiguous())

    def finish() -> None:
        for output, piece in zip(outputs, received, strict=True):
            output.copy_(piece.view(output.shape))

    return work, finish


def reduce_scatter(facts: GroupFacts, output: torch.Tensor, whole: torch.Tensor, op: Any) -> Any:
    """The work of a reduce-scatter of any dtype and operation into contiguous `output`; None: by the backend."""
    channel = channel_of(facts, whole, "reduce_scatter", "", whole.nbytes)
    fold = fold_of(op)
    if channel is None or fold is None or not _is_plain(whole):
        return None
    code = reduction_code(whole.dtype, output.dtype, fold, False)
    if code is None:
        return None
    return channel.reduce_scatter(output, whole.contiguous(), code)


def check_all_to_all(
    facts: GroupFacts,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
) -> None:
    """Raise ValueError unless dtypes and splits fit."""
    if output.dtype is not tensor.dtype:
        raise ValueError(f"all_to_all: output is {output.dtype}, input is {tensor.dtype}; they must be equal")
    exchanges.piece_bytes(output, output_splits, facts.size)
    exchanges.piece_bytes(tensor, input_splits, facts.size)


def all_to_all(
    facts: GroupFacts,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
) -> tuple[Any, Finish] | None:
    """As `all_reduce`; splits count rows of dim 0; tensors that `check_all_to_all` has passed."""
    channel = channel_of(facts, tensor, "all_to_all", "", tensor.nbytes)
    if channel.__class__ is not Channel or not _is_plain(tensor):
        return None
    dense = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
    sizes = [
        exchanges.piece_bytes(part, s, facts.size) for part, s in ((output, output_splits), (tensor, input_splits))
    ]
    return channel.all_to_all(dense, tensor.contiguous(), *sizes), _copy_back(output, dense)


def dense_and_back(tensor: torch.Tensor) -> tuple[torch.Tensor, Finish]:
    """(the tensor, or its values in contiguous memory; the step that brings those back), for calls of torch.

    Handed a strided tensor, gloo's all-reduce and broadcast take the memory behind its first element, in silence.
    """
    dense = tensor.contiguous() if tensor.layout is torch.strided else tensor
    return dense, _copy_back(tensor, dense)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def _copy_back(tensor: torch.Tensor, dense: torch.Tensor) -> Finish:
    return None if dense is tensor else lambda: tensor.copy_(dense)


def in_turn(steps: Sequence[Callable[[], object]]) -> Callable[[], object] | None:
    """One finishing step of several; None of none."""
    if len(steps) < 2:
        return steps[0] if steps else None

    def finish() -> None:
        for step in steps:
            step()

    return finish


def dense_list(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Callable[[], object]]]:
    """(the tensors or contiguous stand-ins, the steps that bring those back)."""
    pairs = [dense_and_back(tensor) for tensor in tensors]
    return [dense for dense, _ in pairs], [step for _, step in pairs if step is not None]
