"""Public helpers around checkpoint files."""

from __future__ import annotations

import os
from typing import Any

import torch

from deepspeed.checkpoint import names
from deepspeed.checkpoint.constants import MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX

__all__ = [
    "clone_tensors_for_torch_save",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = torch.device("cpu")) -> Any:  # noqa: B008
    """A copy of nested lists, tuples and dicts whose tensors are clones on ``device``.

    ``torch.save`` writes the whole storage behind a view, so saving views of a flat buffer writes the buffer each time;
    clones hold their own elements alone. Containers keep their type (named tuples and OrderedDicts too), other objects
    are passed through, and a tensor met twice is cloned once, so tied weights stay tied.
    """
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, done: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(item, torch.Tensor):
        if id(item) not in done:
            # The original is kept beside the clone: while it lives no other object can have its id.
            done[id(item)] = (item, _tight(item, device))
        return done[id(item)][1]
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_clone(value, device, done) for value in item))
    if type(item) in (list, tuple):
        return type(item)(_clone(value, device, done) for value in item)
    if isinstance(item, dict) and hasattr(item, "items"):
        return _clone_dict(item, device, done)
    return item


def _clone_dict(item: dict[Any, Any], device: torch.device, done: dict[int, tuple[Any, Any]]) -> Any:
    pairs = [(key, _clone(value, device, done)) for key, value in item.items()]
    try:
        made = type(item)(pairs)
    except TypeError:
        made = dict(pairs)  # a class with another constructor (defaultdict): its contents are what is saved
    for name, value in vars(item).items() if hasattr(item, "__dict__") else ():
        setattr(made, name, value)
    return made


def _tight(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    detached = tensor.detach()
    moved = detached.to(device)
    return detached.clone() if moved.data_ptr() == detached.data_ptr() else moved


def get_model_ckpt_name_for_rank(base_folder: str | os.PathLike[str], mp_rank_str: str) -> str:
    """Path of the model-states file of model-parallel rank ``mp_rank_str`` (two digits)."""
    return os.path.join(base_folder, f"{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str | os.PathLike[str], dp_rank: int, mp_rank: int) -> str:
    """Path of the optimizer-states file of one shard (without the prefix of bf16 runs)."""
    return os.path.join(base_folder, names.optim_file(dp_rank, mp_rank, bf16=False))


def get_layer_ckpt_name_for_rank(base_folder: str | os.PathLike[str], layer_id: str | int, tp_rank: int) -> str:
    """Path of the file of one pipeline layer under tensor parallelism; ``layer_id`` like ``layer_03``."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}{MODEL_FILE_SUFFIX}")
