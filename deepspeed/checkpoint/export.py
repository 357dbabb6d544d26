"""The whole model as one state dict, for use outside.

Owns: gathering. Does not own: files.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint import writer
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def whole_state_dict(engine: DeepSpeedEngine, exclude_frozen: bool) -> OrderedDict[str, Any]:
    """The module's state dict with clean names, every tensor a host tensor of its own; tied names share one.

    Parameters are whole on every rank at stages 0 to 2, so nothing is communicated.
    """
    state = writer.module_state(engine, exclude_frozen)
    first: dict[Any, Any] = {}
    for name, value in state.items():
        key = (
            (value.data_ptr(), tuple(value.shape), value.dtype)
            if hasattr(value, "data_ptr") and value.numel()
            else name
        )
        state[name] = first.setdefault(key, value)
    whole: OrderedDict[str, Any] = clone_tensors_for_torch_save(state)
    return whole
