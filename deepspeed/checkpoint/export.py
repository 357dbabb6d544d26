"""The whole model as one state dict, for use outside.

Owns: gathering. Does not own: files.
Invariant: sharded parameters are whole one block at a time; only the rank that keeps the result has memory for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.checkpoint import names, writer
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

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


def gathered_parameters(engine: DeepSpeedEngine, exclude_frozen: bool, *, keep: bool) -> dict[int, torch.Tensor]:
    """``id(parameter) -> whole host tensor`` of every sharded parameter; empty where not ``keep``. Collective.

    A rank that cannot keep a tensor goes on gathering, so that the others do not wait for it, and raises at the end.
    """
    sharded = engine.sharded_module
    if sharded is None:
        return {}
    kept: dict[int, torch.Tensor] = {}
    error: Exception | None = None
    sharded.gatherer.absorb_edits()
    for block in sharded.gatherer.blocks:
        if not any(place.param.requires_grad or not exclude_frozen for place in block.places):
            continue
        with sharded.gatherer.borrowed(block):
            if keep and error is None:
                try:
                    kept.update(_copies(block, exclude_frozen))
                except (RuntimeError, MemoryError) as caught:  # torch reports a failed allocation as RuntimeError
                    error = caught
    if error is not None:
        raise error
    return kept


def _copies(block: Any, exclude_frozen: bool) -> Iterator[tuple[int, torch.Tensor]]:
    for place in block.places:
        if place.param.requires_grad or not exclude_frozen:
            yield id(place.param), block.view(place).to(device="cpu", copy=True)
