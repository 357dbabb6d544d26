"""The whole model for use outside: as one state dict, or streamed into safetensors files.

Owns: gathering. Does not own: files.
Invariant: sharded parameters are whole one block at a time; only the rank that keeps the result has memory for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.checkpoint import names, safetensors, writer
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

SAFETENSORS = safetensors.SUFFIX

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def whole_state_dict(engine: DeepSpeedEngine, exclude_frozen: bool, *, keep: bool) -> OrderedDict[str, Any] | None:
    """The module's state dict with clean names, every tensor a host tensor of its own; tied names share one.

    None where not ``keep``. Collective where parameters are sharded, else nothing is communicated.
    """
    gathered = gathered_parameters(engine, exclude_frozen, keep=keep)
    if not keep:
        return None
    state = writer.module_state(engine, exclude_frozen)
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        clean = names.clean_name(name)
        if clean in state and id(param) in gathered:
            state[clean] = gathered[id(param)]
    first: dict[Any, Any] = {}
    for name, value in state.items():
        key = (
            (value.data_ptr(), tuple(value.shape), value.dtype)
            if hasattr(value, "data_ptr") and value.numel()
            else name
        )
        state[name] = first.setdefault(key, value)
    own = {id(value) for value in gathered.values()}
    copied: OrderedDict[str, Any] = clone_tensors_for_torch_save(
        OrderedDict((name, value) for name, value in state.items() if id(value) not in own)
    )
    for name in state:
        state[name] = copied.get(name, state[name])
    return state


def save_safetensors(engine: DeepSpeedEngine, path: Path, exclude_frozen: bool, *, keep: bool) -> None:
    """Write the whole module to ``path`` (split beyond a size, see ``safetensors.py``) where ``keep``. Collective.

    One block of sharded parameters is whole at a time, and nothing else is copied.
    """
    first: dict[Any, str] = {}
    plain: dict[str, torch.Tensor] = {}
    writing: safetensors.Writer | None = None
    if keep:
        named = dict(engine.module.named_parameters(remove_duplicate=False))
        by_name = {names.clean_name(name): param for name, param in named.items()}
        entries = []
        for name, value in writer.module_state(engine, exclude_frozen).items():
            if not isinstance(value, torch.Tensor):
                continue
            key: Any = name
            if name in by_name:  # asked for nothing: a sharded parameter would be gathered to answer
                key = id(by_name[name])
            elif value.numel():
                key = value.data_ptr(), value.shape
            if first.setdefault(key, name) == name:
                entries.append(safetensors.Entry(name, tuple(value.shape), value.dtype))
                plain[name] = value
        writing = safetensors.Writer(path, entries, safetensors.DEFAULT_SHARD_NBYTES)

    def visit(found: Iterator[tuple[int, torch.Tensor]]) -> None:
        for key, tensor in found:
            if writing is not None and key in first:
                del plain[first[key]]
                writing.put(first[key], tensor)

    try:
        visit_parameters(engine, exclude_frozen, visit, keep=keep)
        if writing is not None:
            for name, value in plain.items():
                writing.put(name, value)
            writing.finish()
    except BaseException:
        if writing is not None:
            writing.abandon()
        raise


def gathered_parameters(engine: DeepSpeedEngine, exclude_frozen: bool, *, keep: bool) -> dict[int, torch.Tensor]:
    """``id(parameter) -> whole host tensor`` of every sharded parameter; empty where not ``keep``. Collective."""
    kept: dict[int, torch.Tensor] = {}
    visit_parameters(
        engine,
        exclude_frozen,
        lambda found: kept.update((key, tensor.to(device="cpu", copy=True)) for key, tensor in found),
        keep=keep,
    )
    return kept


def visit_parameters(
    engine: DeepSpeedEngine,
    exclude_frozen: bool,
    visit: Callable[[Iterator[tuple[int, torch.Tensor]]], None],
    *,
    keep: bool,
) -> None:
    """Call ``visit`` where ``keep`` with ``(id(parameter), whole tensor)`` of each block of sharded parameters in turn.

    Collective. The tensors are views that last until ``visit`` returns. A rank where it fails goes on gathering, so
    that the others do not wait for it, and raises at the end.
    """
    sharded = engine.sharded_module
    if sharded is None:
        return
    error: Exception | None = None
    sharded.gatherer.absorb_edits()
    for block in sharded.gatherer.blocks:
        if not any(place.param.requires_grad or not exclude_frozen for place in block.places):
            continue
        with sharded.gatherer.borrowed(block):
            if keep and error is None:
                try:
                    visit(_views(block, exclude_frozen))
                except Exception as caught:  # a full disk, a failed allocation: heard of by all once all is gathered
                    error = caught
    if error is not None:
        raise error


def _views(block: Any, exclude_frozen: bool) -> Iterator[tuple[int, torch.Tensor]]:
    for place in block.places:
        if place.param.requires_grad or not exclude_frozen:
            yield id(place.param), block.view(place)
