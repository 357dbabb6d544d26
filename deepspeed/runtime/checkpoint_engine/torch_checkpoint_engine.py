"""The default back end: files in the format of ``torch.save``, complete and on disk when ``save`` returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed.checkpoint import trusted
from deepspeed.checkpoint.disk import durable
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.utils.torch_file import TorchFile

ENGINE_NAME = "TorchCheckpointEngine"


class TorchCheckpointEngine(CheckpointEngine):
    """Atomic files; loading runs no code from them (objects of unknown classes come back inert)."""

    name = ENGINE_NAME

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing to prepare."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write ``state_dict`` so that ``path`` is the old file or the new one at any moment. Raises OSError."""
        durable.write_torch(Path(path), TorchFile(state_dict))

    def load(self, path: str, map_location: Any = None) -> Any:
        """The object in ``path``, tensors where ``map_location`` says (default: mapped in host memory).

        Raises CheckpointError naming a file that is missing or torn.
        """
        return trusted.load_file(Path(path), map_location)

    def commit(self, info: CheckpointCommitInfo | None) -> bool:
        return True
