"""The dtype enumerations clients import, whose members are torch dtypes.

Built on first use, so that reading a config needs no torch.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Any

from deepspeed.runtime.config_types import DTYPE_SPELLINGS, dtype_name, torch_dtype


def _from_str(cls: Any, value: str) -> Any:
    """The member a dtype name stands for.

    Raises:
        ValueError: unknown name.
    """
    name = dtype_name(value)
    if name is None or name not in cls.__members__:
        raise ValueError(f"{value!r} is no dtype; expected one of {', '.join(cls.__members__)}")
    return cls[name]


@lru_cache(maxsize=1)
def config_dtype_enum() -> Any:
    """`deepspeed.runtime.config.DtypeEnum`: fp16, fp32, int8, bf16; the value is the torch dtype."""
    enum = Enum("DtypeEnum", [(name, torch_dtype(name)) for name in ("fp16", "fp32", "int8", "bf16")])  # type: ignore[misc]
    enum.__module__ = "deepspeed.runtime.config"
    return enum


@lru_cache(maxsize=1)
def inference_dtype_enum() -> Any:
    """`deepspeed.inference.config.DtypeEnum`: the value is a tuple of the torch dtype and its names."""
    members = [
        (name, (torch_dtype(name), f"torch.{spellings[1] if len(spellings) > 1 else name}", *spellings))
        for name, spellings in DTYPE_SPELLINGS.items()
    ]
    enum = Enum("DtypeEnum", members)  # type: ignore[misc]
    enum.__module__ = "deepspeed.inference.config"
    enum.from_str = classmethod(_from_str)  # type: ignore[attr-defined]
    return enum
