"""Collectives over lists of tensors; sub-modules are imported on first use."""

from __future__ import annotations

from typing import Any

from deepspeed.unbuilt import attribute_or_submodule


def __getattr__(name: str) -> Any:
    return attribute_or_submodule(__name__, name)
