"""One block of memory for the saved activations of a forward, instead of one allocation each.

Owns: cutting blocks into slices. Does not own what is stored, and keeps no slice alive: a block is freed when its last
slice is. A *generation* is the time from the first slice to the first use in backward; slices of one generation share
blocks, and the next forward starts new ones, so two forwards never overwrite each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

__all__ = ["ActivationArena"]

# Slices start on this many bytes, so kernels take the same vector paths as on fresh tensors.
_ALIGNMENT = 256

Key = tuple[torch.dtype, torch.device]


def _padded(numel: int, dtype: torch.dtype) -> int:
    step = _ALIGNMENT // dtype.itemsize
    return math.ceil(numel / step) * step


class ActivationArena:
    """Hands out 1D slices of blocks sized for ``num_checkpoints`` checkpoints.

    Args:
        num_checkpoints: checkpoints of one forward; more of them start another block.
        allocate: makes a block: (numel, dtype, device) → 1D tensor.
    """

    def __init__(
        self, num_checkpoints: int, allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor]
    ) -> None:
        self.num_checkpoints = num_checkpoints
        self._allocate = allocate
        # Free rest of the current block of each kind.
        self._rest: dict[Key, torch.Tensor] = {}
        self.num_blocks = 0
        """Blocks allocated so far."""

    def reserve(self, sizes: list[tuple[int, torch.dtype, torch.device]]) -> None:
        """Announce the (numel, dtype, device) of all slices of one checkpoint, so that a new block fits the forward."""
        needed: dict[Key, int] = {}
        for numel, dtype, device in sizes:
            needed[dtype, device] = needed.get((dtype, device), 0) + _padded(numel, dtype)
        for (dtype, device), numel in needed.items():
            rest = self._rest.get((dtype, device))
            if rest is None or rest.numel() < numel:
                self._rest[dtype, device] = self._allocate(numel * self.num_checkpoints, dtype, device)
                self.num_blocks += 1

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """1D slice of undefined values; its size must have been reserved."""
        rest = self._rest[dtype, device]
        self._rest[dtype, device] = rest[_padded(numel, dtype) :]
        # `data`: autograd counts the changes of a tensor and all its views together, and would take filling the next
        # slice for a change of this one.
        return rest[:numel].data

    def close(self) -> None:
        """End the generation: the next slice comes from a new block."""
        self._rest.clear()
