"""A tensor cut evenly over the ranks of a group, with a description that can travel to another process."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.comm import collectives
from deepspeed.runtime.utils.balance import partition_uniform

__all__ = ["PartitionedTensor"]


class PartitionedTensor:
    """Holds this rank's part of a tensor that all ranks of ``group`` have alike.

    Args:
        tensor: full tensor, any shape; the same on all ranks.
        group: process group.
        partition_meta: bounds of the parts (one more than there are ranks); default: equal parts.

    The description (`to_meta`) is a 1D int64 tensor: number of dims, the dims, number of parts, rank, the bounds.
    """

    def __init__(self, tensor: torch.Tensor, group: Any, partition_meta: list[int] | None = None) -> None:
        self.group = group
        self.num_parts: int = torch_dist.get_world_size(group)
        self.rank: int = torch_dist.get_rank(group)
        self.orig_size: list[int] = list(tensor.shape)
        self.orig_device = tensor.device
        self.partition = partition_meta or partition_uniform(tensor.numel(), self.num_parts)
        start, end = self.partition[self.rank], self.partition[self.rank + 1]
        self.local_data = tensor.detach().reshape(-1)[start:end].clone()

    @classmethod
    def from_meta(
        cls, meta: torch.Tensor, local_part: torch.Tensor, group: Any, device: str | torch.device | None = None
    ) -> PartitionedTensor:
        """Rebuild from `to_meta` and a part from another process; ``device`` is where `full` puts the whole."""
        numbers = [int(number) for number in meta.tolist()]
        num_dims = numbers[0]
        made = cls.__new__(cls)
        made.group = group
        made.orig_size = numbers[1 : 1 + num_dims]
        made.num_parts = numbers[1 + num_dims]
        made.rank = numbers[2 + num_dims]
        made.partition = numbers[3 + num_dims :]
        expected = made.partition[made.rank + 1] - made.partition[made.rank]
        if local_part.numel() != expected:
            raise ValueError(
                f"PartitionedTensor.from_meta: rank {made.rank} of {made.num_parts} owns {expected} elements of a "
                f"tensor of shape {made.orig_size}, but the part given has {local_part.numel()}"
            )
        made.local_data = local_part.reshape(-1)
        made.orig_device = torch.device(get_accelerator().current_device_name() if device is None else device)
        return made

    def to_meta(self) -> torch.Tensor:
        """Description of the cut: 1D int64, on the current device."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.int64, device=get_accelerator().current_device_name())

    def data(self) -> torch.Tensor:
        """This rank's part, 1D."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Shape of this rank's part."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """Shape of the whole tensor."""
        return self.orig_size

    def full(self, device: str | torch.device | None = None) -> torch.Tensor:
        """Gather the whole tensor from all ranks (all must call) on ``device`` (default: where it came from)."""
        target = torch.device(device) if device is not None else self.orig_device
        sizes = [end - start for start, end in zip(self.partition, self.partition[1:], strict=False)]
        # The collective needs parts of one size; parts differ by one element or by the caller's bounds.
        longest = max(sizes)
        mine = torch.zeros(longest, dtype=self.local_data.dtype, device=target)
        mine[: self.local_data.numel()].copy_(self.local_data)
        gathered = torch.empty(longest * self.num_parts, dtype=mine.dtype, device=target)
        if self.num_parts == 1:
            gathered.copy_(mine)
        else:
            collectives.all_gather(gathered, mine, self.group, what=f"a tensor of shape {self.orig_size}")
        flat = torch.cat([gathered[part * longest : part * longest + size] for part, size in enumerate(sizes)])
        assert flat.numel() == math.prod(self.orig_size)
        return flat.view(self.orig_size)
