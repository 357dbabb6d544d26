"""Move and compare values with tensors somewhere inside: lists, tuples, named tuples, dicts, objects with ``to``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["compare_tensors_in_structures", "copy_to_device", "move_to_device"]

Device = str | int | torch.device


def _has_own_move(item: Any) -> bool:
    """Objects that know how to move themselves: tensors, modules, packed sequences, batch encodings."""
    return not isinstance(item, type) and callable(getattr(item, "to", None))


def _map_containers(item: Any, leaf: Callable[[Any], Any]) -> Any:
    """Rebuild the containers of ``item`` with ``leaf`` applied to everything else."""
    if _has_own_move(item):
        return leaf(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_map_containers(value, leaf) for value in item))
    if type(item) in (list, tuple):
        return type(item)(_map_containers(value, leaf) for value in item)
    if isinstance(item, dict):
        # A copy keeps the class and what it carries beside its items (ordered, default, model outputs).
        mapped = copy.copy(item)
        for key, value in item.items():
            mapped[key] = _map_containers(value, leaf)
        return mapped
    return leaf(item)


def move_to_device(item: Any, device: Device, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return ``item`` with its tensors on ``device``.

    Args:
        item: tensor, object with a method ``to``, or any nesting of lists, tuples, named tuples and dicts of such;
            everything else (None, numbers, text) comes back as it is.
        device: where to.
        criterion_func: ``criterion_func(tensor)`` says which tensors move; None moves all.
    """

    def leaf(value: Any) -> Any:
        moves = _has_own_move(value) and (criterion_func is None or criterion_func(value))
        return value.to(device) if moves else value

    return _map_containers(item, leaf)


def copy_to_device(item: Any, device: Device, criterion_func: Callable[[Any], bool]) -> Any:
    """Return ``item`` with a copy on ``device`` in place of each tensor for which ``criterion_func(tensor)`` is true.

    Unlike `move_to_device` the chosen tensors are copied even if they are on the device already.
    """

    def leaf(value: Any) -> Any:
        return value.to(device, copy=True) if isinstance(value, torch.Tensor) and criterion_func(value) else value

    return _map_containers(item, leaf)


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Tell whether two nestings of lists, tuples and dicts are equal: same structure, tensors equal bit for bit."""
    if isinstance(inputs1, torch.Tensor) and isinstance(inputs2, torch.Tensor):
        return inputs1.device == inputs2.device and inputs1.dtype == inputs2.dtype and torch.equal(inputs1, inputs2)
    if type(inputs1) is not type(inputs2):
        return False
    if isinstance(inputs1, list | tuple):
        return len(inputs1) == len(inputs2) and all(map(compare_tensors_in_structures, inputs1, inputs2))
    if isinstance(inputs1, dict):
        return inputs1.keys() == inputs2.keys() and all(
            compare_tensors_in_structures(value, inputs2[key]) for key, value in inputs1.items()
        )
    return bool(inputs1 == inputs2)
