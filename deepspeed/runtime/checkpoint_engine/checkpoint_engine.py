"""The interface of storage back ends: where one object of a checkpoint goes and how it comes back.

Owns: the interface. Does not own: which files a checkpoint has and when it is complete (``checkpoint/manager.py``).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass
class CheckpointCommitInfo:
    """Which checkpoint is being written, and whether ``latest`` will point to it."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """A back end. ``create`` begins a checkpoint, ``save`` writes one object, ``commit`` says that all are written."""

    name = "CheckpointEngine"

    def __init__(self, config_params: Any = None) -> None:
        self.config_params = config_params

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """A checkpoint begins."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Write ``state_dict`` to ``path``."""

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """The object in ``path``."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo | None) -> bool:
        """All objects of the checkpoint are safe when this returns True."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """True for the data-parallel rank that writes what all of them hold."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """True when ``save`` returns before the bytes are safe."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """True when tensors that share memory share it again after loading."""
        return True

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """The checkpoint whose commit is still to come; None where saving is immediate."""
        return None

    def set_commit_info(self, info: CheckpointCommitInfo | None) -> None:  # noqa: B027  (nothing by default)
        """Remember a commit for later; nothing to remember where saving is immediate."""

    def cleanup(self) -> None:  # noqa: B027  (nothing by default)
        """Release what the back end holds."""
