"""Graphs that do not keep sharded parameters gathered: what autograd saves of one is a note of where to find it again.

Inside :func:`keep_sharded` every tensor that autograd saves for backward and that lies in the full buffer of a block is
replaced by ``(block, geometry)``; when backward needs it, its block is fetched (by then it has usually been prefetched)
and the same view of the new buffer is made. This is all that backward needs: there are no backward module hooks, and
whatever backward does (re-entrant, double, twice with ``retain_graph``, of a user-written function) comes by here.

A user's own ``saved_tensors_hooks`` inside (``save_on_cpu``, activation checkpointing) take precedence, as torch has
it; they then hold values or recompute, which is right too.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch

from deepspeed.runtime.zero.param_block import ParamBlock, live_buffers


class _Note:
    """A saved view of a block's full buffer.

    It does not keep the block: after an error in backward, autograd keeps parts of the graph until its next run.
    """

    __slots__ = ("block", "generation", "offset", "shape", "stride")

    def __init__(self, block: ParamBlock, tensor: torch.Tensor) -> None:
        self.block = weakref.ref(block)
        self.generation = block.generation
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()


def _pack(tensor: torch.Tensor) -> Any:
    if not live_buffers:
        return tensor
    try:
        block = live_buffers.get(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # sparse, functional and other tensors without a storage
        return tensor
    if block is None or block.full is None or block.full.dtype is not tensor.dtype:
        return tensor
    block.absorb_if_edited(int(tensor.storage_offset()))  # edited since the gather: the note is of the new values
    return _Note(block, tensor)


def _unpack(saved: Any) -> torch.Tensor:
    if type(saved) is not _Note:
        return saved
    block = saved.block()
    if block is None or block.owner is None:
        raise RuntimeError("backward needs sharded parameters of an engine that is destroyed: run backward before that")
    if block.generation != saved.generation:
        names = ", ".join(place.name for place in block.places[:3])
        raise RuntimeError(
            f"backward needs parameters ({names} ...) with the values they had in forward, but an optimizer step or an "
            "edit has changed them since. Run forward again before this backward"
        )
    full: torch.Tensor = block.owner.fetch_buffer(block)
    return full.as_strided(saved.shape, saved.stride, saved.offset)


def keep_sharded() -> contextlib.AbstractContextManager[Any]:
    """The context in which graphs keep notes instead of gathered parameters."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)
