"""Graphs that do not keep sharded parameters gathered: what autograd saves of one is a note of where to find it again.

Inside :func:`keep_sharded` every tensor that autograd saves for backward and that lies in the full buffer of a block is
replaced by ``(block, geometry)``; when backward needs it, its block is fetched (by then it has usually been prefetched)
and the same view of the new buffer is made. This is all that backward needs: there are no backward module hooks, and
whatever backward does (re-entrant, double, twice with ``retain_graph``, of a user-written function) comes by here.

A user's own ``saved_tensors_hooks`` inside (``save_on_cpu``, activation checkpointing) take precedence, as torch has
it; they then hold values or recompute, which is right too. What autograd gives such hooks of a leaf is the parameter
itself, which loses its values when its block is released; torch's checkpoint keeps a frozen one as it is. So hooks that
are entered inside get an alias in its place: another parameter that holds on to the buffer.

The gradient transforms of ``torch.func`` refuse to start where there are any such hooks. For those within a forward
ours are put aside meanwhile; the graphs made inside hold values.

A function that saved a parameter itself finds in backward a tensor that torch has made: the values, none of the
parameter's attributes. Such functions ask for ``ds_status`` before they gather: every tensor in a full buffer has it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks

from deepspeed.runtime.zero.historical_params import ZeroParamStatus
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


def _block_under(tensor: torch.Tensor) -> ParamBlock | None:
    """The block in whose full buffer ``tensor`` lies."""
    if not live_buffers:
        return None
    try:
        return live_buffers.get(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # sparse, functional and other tensors without a storage
        return None


class _StatusOfValues:
    """``ds_status`` of a tensor in a full buffer; other tensors do not have it. A parameter's own goes first."""

    def __get__(self, tensor: torch.Tensor | None, owner: type) -> ZeroParamStatus | None:
        if tensor is None:
            return None  # torch lists the attributes of the class Tensor (torch.compile does) and reads each
        if _block_under(tensor) is None:
            raise AttributeError(f"{owner.__name__!r} object has no attribute 'ds_status'")
        return ZeroParamStatus.AVAILABLE


def give_values_a_status() -> None:
    """From now on tensors in full buffers have ``ds_status``. For when parameters are sharded; again is no harm."""
    if "ds_status" not in torch.Tensor.__dict__:
        torch.Tensor.ds_status = _StatusOfValues()  # type: ignore[attr-defined]


def _pack(tensor: torch.Tensor) -> Any:
    block = _block_under(tensor)
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


def _with_aliases(pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """``pack`` of a user's hooks, given an alias wherever it would be given a sharded parameter itself."""

    def with_aliases(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) and live_buffers.get(tensor.untyped_storage().data_ptr()) is not None:
            tensor = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)  # a parameter: hooks may ask
        return pack(tensor)

    return with_aliases


@contextlib.contextmanager
def _without_notes() -> Iterator[None]:
    """Inside, the innermost hooks are a user's or none."""
    hooks, count = torch._C._autograd, 0
    while (top := hooks._top_saved_tensors_default_hooks(False)) is not None and top[0] is _pack:
        hooks._pop_saved_tensors_default_hooks()
        count += 1
    try:
        yield
    finally:
        for _ in range(count):
            hooks._push_saved_tensors_default_hooks(_pack, _unpack)


@contextlib.contextmanager
def _disable_all_but_notes(error_message: str) -> Iterator[None]:
    """``disable_saved_tensors_hooks`` while a forward runs: ``torch.func.grad``, ``vjp``, ``jacrev`` begin with it."""
    with _without_notes(), _disable(error_message):
        yield


_disable = graph.disable_saved_tensors_hooks
_enter = saved_tensors_hooks.__enter__
_lock = threading.Lock()
_scopes = 0  # keep_sharded contexts under way, in any thread


def _enter_with_aliases(hooks: saved_tensors_hooks) -> None:
    if hooks.pack_hook is _pack:
        _enter(hooks)
    else:
        torch._C._autograd._push_saved_tensors_default_hooks(_with_aliases(hooks.pack_hook), hooks.unpack_hook)


def _count(scopes: int) -> None:
    global _scopes
    with _lock:
        _scopes += scopes
        saved_tensors_hooks.__enter__ = _enter_with_aliases if _scopes else _enter  # type: ignore[method-assign]
        graph.disable_saved_tensors_hooks = _disable_all_but_notes if _scopes else _disable


@contextlib.contextmanager
def keep_sharded() -> Iterator[None]:
    """The context in which graphs keep notes instead of gathered parameters."""
    _count(1)
    try:
        with saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _count(-1)
