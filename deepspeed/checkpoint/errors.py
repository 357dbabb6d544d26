"""The one error of saving and loading. Every rank raises it with the same text."""

from __future__ import annotations

__all__ = ["CheckpointError", "OneNodesPart"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The text says where, what was found, what was expected, what to do."""


class OneNodesPart(CheckpointError):
    """What is missing was never in this folder: it is one node's part of a save, and the others hold the rest."""
