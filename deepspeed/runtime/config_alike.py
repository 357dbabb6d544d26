"""Which settings have to be the same on all data-parallel ranks, as lines that ranks can compare.

Owns: the choice of keys. Does not own: comparing (``replicas.py``). What stays out belongs to one rank or host: paths,
pinned memory, reports, and the number of samples a rank takes at a time.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

_ALIKE = (
    "managed_gradient_accumulation",
    "optimizer",
    "scheduler",
    "communication_data_type",
    "gradient_allreduce_op",
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_clipping",
    "sparse_gradients",
    "fp16",
    "bf16",
    "torch_autocast",
    "data_types",
    "zero_optimization",
)
_OF_ONE_HOST = ("nvme_path", "pin_memory")


def settings_of_all_ranks(config: DeepSpeedConfig) -> list[str]:
    """``key path = value`` of every setting that decides what ranks send each other, or what becomes of it."""
    sections = config.sections.model_dump(include=set(_ALIKE))
    lines = [f"gradient_accumulation_steps = {config.gradient_accumulation_steps}"]
    return lines + [f"{path} = {_shown(value)}" for path, value in _leaves(sections) if path]


def _leaves(values: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in sorted(values.items(), key=lambda item: str(item[0])):
        if key in _OF_ONE_HOST:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _shown(value: Any) -> str:
    """The value as text, which is the same in every process: an object may show its address."""
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [_shown(item) for item in value]
        return f"[{', '.join(sorted(parts) if isinstance(value, (set, frozenset)) else parts)}]"
    plain = value is None or isinstance(value, (str, numbers.Number, Enum, torch.dtype, torch.Tensor))
    return repr(value) if plain else type(value).__name__
