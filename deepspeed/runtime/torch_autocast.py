"""Autocast around parts of a model that clients run themselves, as the engine's forward has it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

__all__ = ["autocast_if_enabled"]


def autocast_if_enabled(engine: DeepSpeedEngine) -> AbstractContextManager[object]:
    """Context with ``torch_autocast.dtype`` on the engine's device; does nothing where the section is off."""
    return engine.precision.forward_context(engine.device.type)
