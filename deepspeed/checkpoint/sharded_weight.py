"""A saved weight that lies in shards (a tag of stage 3).

``ShardedWeight`` stands in a saved module state where a tensor would: it has shape and dtype, and knows the extents of
its elements.

Owns: that stand-in. Does not own: its way into a live module (``weights.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint.index import Extent, FragmentIndex, copy_into

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class ShardedWeight:
    """Parameter ``name`` of a saved module; ``what`` its elements are called in ``index``. ``dtype``: torch's, or the
    plain one (``utils/torch_archive/tensors.py``) where the tag is read without torch."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    index: FragmentIndex
    what: str

    def cover(self, start: int, numel: int) -> list[Extent]:
        """The extents of these elements. Raises CheckpointError for elements that are nowhere."""
        return self.index.cover(self.name, self.what, start, numel)

    def whole(self) -> torch.Tensor:
        """All of it, in host memory of its own."""
        import torch

        made = torch.empty(self.shape, dtype=self.dtype)
        copy_into(made, self.cover(0, made.numel()), 0)
        return made
