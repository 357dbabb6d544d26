"""Helpers that need no file of their own."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist

__all__ = [
    "align_dense_tensors",
    "call_to_str",
    "ensure_directory_exists",
    "filter_empty_parameters",
    "get_checkpoint_folder_size",
    "get_inactive_params",
    "get_only_unique_item",
    "is_transformers_cache",
    "noop_context",
    "noop_decorator",
    "set_random_seed",
]

T = TypeVar("T")


class noop_context:
    """Context manager that does nothing."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        return None


def noop_decorator(func: T) -> T:
    """Return ``func`` itself."""
    return func


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch (all devices)."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str) -> None:
    """Make the folders on the way to the file ``filename``."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def get_checkpoint_folder_size(save_dir: str, tag: str | None, local_rank: int | None = None) -> int:
    """Bytes of all files below ``save_dir/tag`` (``save_dir`` without a tag); 0 on ranks other than 0.

    ``local_rank`` asks the first rank of each machine (for machine-local storage) instead of rank 0.
    """
    if local_rank is None:
        asked = not (torch_dist.is_available() and torch_dist.is_initialized()) or torch_dist.get_rank() == 0
    else:
        asked = local_rank == 0
    if not asked:
        return 0
    folder = os.path.join(save_dir, str(tag)) if tag else save_dir
    return sum(
        os.path.getsize(os.path.join(place, name))
        for place, _, names in os.walk(folder)
        for name in names
        if not os.path.islink(os.path.join(place, name))
    )


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Text of a call: ``("f", 1, b=2)`` → ``"f(1, b=2)"``."""
    parts = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{base}({', '.join(parts)})"


def get_only_unique_item(items: Iterable[T]) -> T:
    """The one distinct item of ``items``; RuntimeError if there are none or several."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected there to be only one unique element in {items}")
    return found.pop()


def align_dense_tensors(tensor_list: list[torch.Tensor], alignment: int) -> list[torch.Tensor]:
    """``tensor_list``, with a tensor of zeros behind it if need be so that all elements together are a multiple."""
    missing = -sum(tensor.numel() for tensor in tensor_list) % alignment
    if missing == 0:
        return tensor_list
    first = tensor_list[0]
    return [*tensor_list, torch.zeros(missing, dtype=first.dtype, device=first.device)]


def filter_empty_parameters(params: Iterable[Any]) -> list[Any]:
    """``params`` without those of no elements; optimizer groups (dicts) are copied with their lists filtered."""
    kept: list[Any] = []
    for entry in params:
        if isinstance(entry, dict):
            kept.append({**entry, "params": [param for param in entry["params"] if param.numel() > 0]})
        elif entry.numel() > 0:
            kept.append(entry)
    return kept


def get_inactive_params(param_list: Iterable[Any]) -> list[Any]:
    """Those parameters that stage 3 holds as a shard only."""
    return [param for param in param_list if hasattr(param, "ds_id") and param.ds_status.name == "NOT_AVAILABLE"]


def is_transformers_cache(obj: Any) -> bool:
    """Tell whether ``obj`` is a key-value cache of Hugging Face transformers (which is not imported for it)."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(obj, module.Cache)
