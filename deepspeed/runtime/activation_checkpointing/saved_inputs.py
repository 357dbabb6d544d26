"""How the inputs of a checkpointed function wait for backward: as they are, as this rank's part, on the host, packed.

Owns: the way of one tensor into its kept form and back. Does not own when (see `checkpointing.checkpoint`), the graph
(torch saves the kept tensors like any others, so nested checkpoints and saved-tensor hooks see them) or the groups.

Invariant: a restored tensor has the bits, shape, strides and device of the original, so recomputation picks the same
kernels and gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.comm import collectives
from deepspeed.runtime.activation_checkpointing.arena import ActivationArena

__all__ = ["CheckpointStatistics", "InputKeeper", "ModelParallelShard"]

_HOST = torch.device("cpu")
# Elements compared between ranks, and number of different shapes that are compared before the rest is trusted.
_SAMPLE_NUMEL = 65536
_MAX_COMPARED_SHAPES = 64


@dataclass(frozen=True)
class ModelParallelShard:
    """The group over which kept activations are cut, and this rank's place in it."""

    group: Any
    rank: int
    size: int

    def chunk(self, numel: int) -> int:
        """Elements of each rank's part; the last part is padded."""
        return math.ceil(numel / self.size)


@dataclass
class CheckpointStatistics:
    """Counts since the last `clear`; bytes are those of the (dense) tensors a checkpoint keeps for backward."""

    num_checkpoints: int = 0
    num_recomputed: int = 0
    input_nbytes: int = 0
    """What the inputs would take as they are."""
    device_nbytes: int = 0
    """What is kept on the device for them."""
    host_nbytes: int = 0
    """What is kept in host memory of another device's tensors."""
    num_blocks: int = 0
    """Blocks allocated for contiguous activations."""

    def clear(self) -> None:
        """Start counting anew."""
        for counter in fields(self):
            setattr(self, counter.name, 0)


def _no_overlap(size: Sequence[int], stride: Sequence[int]) -> tuple[bool, bool]:
    """(no two elements share memory, and there are no gaps either) for dims without stride 0."""
    dims = sorted((step, extent) for step, extent in zip(stride, size, strict=True) if extent > 1)
    reach, dense = 1, True
    for step, extent in dims:
        if step < reach:
            return False, False
        dense = dense and step == reach
        reach = step * extent
    return True, dense


@dataclass(frozen=True)
class _Layout:
    """Memory layout of an original, and the way through a flat tensor of its distinct elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    distinct_size: tuple[int, ...]
    """`size` with expanded dims (stride 0) taken once."""
    dense: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Layout | None:
        """None when elements overlap in memory, which a copy cannot imitate."""
        size, stride = tuple(tensor.shape), tensor.stride()
        distinct = tuple(1 if step == 0 else extent for extent, step in zip(size, stride, strict=True))
        separate, dense = _no_overlap(distinct, stride)
        return cls(size, stride, distinct, dense) if separate else None

    @property
    def numel(self) -> int:
        return math.prod(self.distinct_size)

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """1D, distinct elements; a view where there are no gaps (in memory order then)."""
        distinct = tensor.as_strided(self.distinct_size, self.stride, tensor.storage_offset())
        if self.dense:
            return distinct.as_strided((self.numel,), (1,), tensor.storage_offset())
        return distinct.reshape(-1)

    def unflatten(self, flat: torch.Tensor) -> torch.Tensor:
        """The original's shape and strides over (or from) the elements `flatten` gave."""
        if not self.dense:
            spread = torch.empty_strided(self.distinct_size, self.stride, dtype=flat.dtype, device=flat.device)
            flat = spread.copy_(flat.view(self.distinct_size))
        return flat.as_strided(self.size, self.stride, flat.storage_offset())


@dataclass(frozen=True)
class _Plan:
    """How one input is kept: where its (part of the) distinct elements go and how it looked."""

    layout: _Layout
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    sharded: bool
    kept_numel: int
    kept_device: torch.device


class _Attach(torch.autograd.Function):
    """Gives a restored tensor a place in the graph of the recomputation, so that the function may change it in place
    as it may change the original. A leaf that requires gradients would refuse."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, holder: list[torch.Tensor]) -> torch.Tensor:
        # `data`: no view as far as autograd knows, since it refuses to change a view made in here in place.
        return holder.pop().data

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        return None, None


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else 0


def _default_is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


@dataclass
class InputKeeper:
    """Keeps inputs by the options in force.

    Args:
        statistics: counts what is kept.
        shard: cut activations over this group; None keeps them whole.
        to_host: keep them in host memory.
        arena: pack them into blocks; None allocates each.
        is_on_device: which tensors `to_host` moves.
    """

    statistics: CheckpointStatistics
    shard: ModelParallelShard | None = None
    to_host: bool = False
    arena: ActivationArena | None = None
    is_on_device: Callable[[torch.Tensor], bool] = _default_is_on_device
    _compared: set[tuple[Any, ...]] = field(default_factory=set)

    # Keeping

    def _plan(self, tensor: torch.Tensor) -> _Plan | None:
        """None for what stays as it is: integers, parameters (they live on anyway), subclasses, empty tensors."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.is_floating_point():
            return None
        if tensor.numel() == 0 or (tensor.is_leaf and tensor.requires_grad):
            return None
        sharded = self.shard is not None and tensor.numel() >= self.shard.size
        moves = self.to_host and self.is_on_device(tensor)
        if not (sharded or moves or self.arena is not None):
            return None
        layout = _Layout.of(tensor)
        if layout is None:
            return None
        kept = self.shard.chunk(layout.numel) if self.shard is not None and sharded else layout.numel
        device = _HOST if moves else tensor.device
        return _Plan(layout, tensor.dtype, tensor.device, tensor.requires_grad, sharded, kept, device)

    def _new(self, plan: _Plan) -> torch.Tensor:
        if self.arena is not None:
            return self.arena.take(plan.kept_numel, plan.dtype, plan.kept_device)
        return allocate(plan.kept_numel, plan.dtype, plan.kept_device)

    def _store(self, tensor: torch.Tensor, plan: _Plan) -> torch.Tensor:
        flat = plan.layout.flatten(tensor.detach())
        if plan.sharded:
            assert self.shard is not None
            start = self.shard.rank * plan.kept_numel
            flat = flat[start : start + plan.kept_numel]
        kept = self._new(plan)
        # A device that queues work copies while the host goes on; later copies back are queued behind.
        kept[: flat.numel()].copy_(flat, non_blocking=True)
        return kept

    def keep(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[_Plan | None]]:
        """Return the tensors to save and, for each, how to restore it (None: it is saved as it is)."""
        plans = [self._plan(tensor) for tensor in tensors]
        if self.shard is not None:
            self._check_replicated(tensors, plans, self.shard)
        if self.arena is not None:
            blocks_before = self.arena.num_blocks
            self.arena.reserve([(plan.kept_numel, plan.dtype, plan.kept_device) for plan in plans if plan])
            self.statistics.num_blocks += self.arena.num_blocks - blocks_before
        with torch.no_grad():
            stored = [
                tensor if plan is None else self._store(tensor, plan)
                for tensor, plan in zip(tensors, plans, strict=True)
            ]
        self.statistics.num_checkpoints += 1
        for tensor, kept, plan in zip(tensors, stored, plans, strict=True):
            self.statistics.input_nbytes += _nbytes(tensor)
            if plan is not None and plan.kept_device != plan.device:
                self.statistics.host_nbytes += _nbytes(kept)
            else:
                self.statistics.device_nbytes += _nbytes(kept)
        return stored, plans

    # Restoring

    def restore(self, stored: Sequence[torch.Tensor], plans: Sequence[_Plan | None]) -> list[torch.Tensor]:
        """Return the inputs again, from what `keep` returned."""
        if self.arena is not None:
            self.arena.close()
        return [
            kept if plan is None else self._restore_one(kept.detach(), plan, position)
            for position, (kept, plan) in enumerate(zip(stored, plans, strict=True))
        ]

    def _restore_one(self, kept: torch.Tensor, plan: _Plan, position: int) -> torch.Tensor:
        with torch.no_grad():
            flat = kept.to(plan.device, non_blocking=True)
            if plan.sharded:
                flat = self._gather(flat, plan, position)
            elif flat.data_ptr() == kept.data_ptr():
                # The function may write into its input, and a second backward may need the kept one.
                flat = flat.clone()
            tensor = plan.layout.unflatten(flat)
        if not plan.requires_grad:
            return tensor
        return _Attach.apply(torch.empty(0, requires_grad=True), [tensor])

    def _gather(self, part: torch.Tensor, plan: _Plan, position: int) -> torch.Tensor:
        assert self.shard is not None
        whole = torch.empty(plan.kept_numel * self.shard.size, dtype=plan.dtype, device=plan.device)
        if self.shard.size == 1:
            whole.copy_(part)
        else:
            what = f"input {position} {list(plan.layout.size)} of a checkpointed function"
            collectives.all_gather(whole, part, self.shard.group, what=what)
        return whole[: plan.layout.numel]

    # Checking

    def _check_replicated(
        self, tensors: Sequence[torch.Tensor], plans: Sequence[_Plan | None], shard: ModelParallelShard
    ) -> None:
        """RuntimeError on all ranks if a tensor about to be cut differs between them.

        Gathering parts of different tensors would give silent nonsense. A sample of each new combination of shapes is
        compared once.
        """
        pairs = enumerate(zip(tensors, plans, strict=True))
        cut = [(index, tensor) for index, (tensor, plan) in pairs if plan is not None and plan.sharded]
        shapes = tuple((index, tensor.shape, tensor.dtype) for index, tensor in cut)
        if shard.size == 1 or not cut or shapes in self._compared or len(self._compared) >= _MAX_COMPARED_SHAPES:
            return
        self._compared.add(shapes)
        sums = torch.stack([_sample_checksum(tensor) for _, tensor in cut])
        limits = torch.stack([sums, -sums])
        collectives.all_reduce(limits, shard.group, op="max", what="a comparison of checkpointed inputs")
        for (index, tensor), highest, lowest in zip(cut, limits[0].tolist(), limits[1].tolist(), strict=True):
            if highest != -lowest:
                raise RuntimeError(
                    f"partition_activations: tensor {index} (shape {list(tensor.shape)}, {tensor.dtype}) among the "
                    f"arguments of a checkpointed function differs between the {shard.size} model-parallel ranks "
                    f"(this is rank {shard.rank} of them). Only tensors that all of them have alike can be "
                    "partitioned: give the ranks the same data, or switch partition_activations off"
                )


def _sample_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """int64 scalar from the bits of evenly spread elements and their places."""
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLE_NUMEL)].contiguous()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[sample.element_size()]
    bits = sample.view(integers).to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=bits.device) % 65521
    # Kept far inside int64, whose smallest value has no negative.
    return (bits % 65521 * places).sum()


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """1D tensor of undefined values; page-locked in host memory."""
    if device.type == "cpu":
        return get_accelerator().pin_empty(numel, dtype=dtype)
    return torch.empty(numel, dtype=dtype, device=device)
