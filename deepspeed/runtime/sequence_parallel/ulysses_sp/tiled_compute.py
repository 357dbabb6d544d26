"""A function of a long sequence, computed in tiles of it: the activations of one tile are in memory at a time.

The functions run a tile under ``torch.utils.checkpoint``: in forward only its output is kept, in backward it is
computed again, just before its own backward. Random numbers and autocast of the second run are those of the first.
Gradients of weights are summed over the tiles by autograd, and leave for the ranks once, when they are whole.

Owns: cutting, putting together, weights of a mean. Does not own: groups of ranks (nothing here communicates).
Invariant: outputs and gradients are those of the function on the whole sequence, where it treats positions apart.

Source: "Arctic Long Sequence Training: Scalable And Efficient Training For Multi-Million Token Sequences" (2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORED_LABEL = -100  # torch's cross_entropy leaves such labels out of its mean


def _tile_size(length: int, shards: int) -> int:
    if not isinstance(shards, int) or shards < 1:
        raise ValueError(f"shards: found {shards!r}, expected the number of tiles, a whole number from 1")
    return max(1, math.ceil(length / shards))


def _run(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn`` whose activations are computed again in backward; as it is where nothing is recorded."""
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    return checkpoint(fn, *args, use_reentrant=False, **kwargs)


def _reduced(losses: Sequence[Tensor], weights: Sequence[Tensor | int], reduction: str | None) -> Tensor:
    """The sum, or the mean weighted by the positions that each tile's own mean is of."""
    if reduction == "sum":
        return torch.stack(list(losses)).sum(0)
    if reduction != "mean":
        raise ValueError(f'output_reduction: found {reduction!r}, expected "mean" or "sum"')
    values = torch.stack(list(losses))
    parts = torch.stack([torch.as_tensor(weight, device=values.device) for weight in weights]).to(values.dtype)
    parts = parts.view(-1, *[1] * (values.dim() - 1))
    # The mean of a tile without a counted label is 0/0. Where there is none in any tile, so is the whole.
    counted = torch.where(parts > 0, values * parts, torch.zeros_like(values))
    return counted.sum(0) / parts.sum(0)


class TiledMLP:
    """A module's forward on tiles of the sequence, such as an MLP block's."""

    @staticmethod
    def apply(
        fn: Callable[[nn.Module, Tensor], Tensor],
        self: nn.Module,
        x: Tensor,
        shards: int,
        compute_params: Sequence[nn.Parameter] | None = None,
    ) -> Tensor:
        """``fn(self, x)`` for ``x`` of shape ``(..., sequence, hidden)``, in ``shards`` tiles of its last but one dim.

        The result has the shape that ``fn`` gives, tiles joined along the same dim. ``compute_params`` are the weights
        that ``fn`` uses; they are found without being named. Raises ValueError for a tensor of fewer than two dims.
        """
        if x.dim() < 2:
            raise ValueError(f"TiledMLP: found x of shape {tuple(x.shape)}, expected (..., sequence, hidden)")
        tiles = x.split(_tile_size(x.shape[-2], shards), dim=-2)
        return torch.cat([_run(fn, self, tile) for tile in tiles], dim=-2)


class TiledFusedLogitsLoss:
    """Logits and their loss on tiles of the sequence: the logits of one tile are in memory at a time."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: nn.Module,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Sequence[nn.Parameter] | None = None,
        output_reduction: str = "mean",
    ) -> Tensor:
        """The loss ``fn(self, x, y)``, or ``fn(self, x, y, mask)``, of ``x`` ``(batch, sequence, hidden)``.

        ``y`` and ``mask`` are ``(batch, sequence)``. ``fn`` gets them with batch and sequence as one dim, in tiles, and
        returns a scalar. "sum" adds the tiles' losses. "mean" weighs a tile's loss by the positions that its mean is
        of: those of ``mask``, else those whose label is not -100, so that it equals the mean of the whole sequence.
        Raises ValueError for another reduction and for shapes that do not fit.
        """
        if output_reduction not in ("mean", "sum"):
            raise ValueError(f'output_reduction: found {output_reduction!r}, expected "mean" or "sum"')
        for name, value in (("y", y), ("mask", mask)):
            if value is not None and value.shape != x.shape[:-1]:
                raise ValueError(
                    f"TiledFusedLogitsLoss: found {name} of shape {tuple(value.shape)}, expected {tuple(x.shape[:-1])} "
                    f"for x of shape {tuple(x.shape)}"
                )
        size = _tile_size(y.numel(), shards)
        hidden, labels = x.flatten(0, -2).split(size), y.flatten().split(size)
        masks = [None] * len(labels) if mask is None else mask.flatten().split(size)
        losses, weights = [], []
        for tile, label, counted in zip(hidden, labels, masks, strict=True):
            losses.append(_run(fn, self, tile, label, *([] if counted is None else [counted])))
            weights.append(counted.sum() if counted is not None else _positions(label))
        return _reduced(losses, weights, output_reduction)


def _positions(labels: Tensor) -> Tensor | int:
    return labels.numel() if labels.is_floating_point() else (labels != IGNORED_LABEL).sum()


class SequenceTiledCompute:
    """Any function of keyword arguments, some of them cut along the sequence (dim 1)."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str | None,
        compute_params: Sequence[nn.Parameter] | None,
        output_unshard_dimension: int | None,
        output_reduction: str | None,
        *args: Any,
    ) -> Tensor:
        """``fn(**kwargs)`` per tile; ``args`` are the values of ``keys_to_shard``, then of ``keys_to_pass``.

        Tensors of ``keys_to_shard`` are ``(batch, seqlen, ...)`` and are cut along dim 1; None is passed on. Results
        are joined along ``output_unshard_dimension``, or reduced ("mean" weighted by the tiles' lengths, or "sum").
        Gradients reach every tensor that requires them, whichever ``grad_requiring_tensor_key`` names. Raises
        ValueError for values that do not fit ``seqlen`` or the keys, and where both or neither way to join is given.
        """
        keys = [*keys_to_shard, *keys_to_pass]
        if len(keys) != len(args):
            raise ValueError(f"SequenceTiledCompute: found {len(args)} values, expected one for each of {keys}")
        if (output_unshard_dimension is None) == (output_reduction is None):
            raise ValueError(
                "SequenceTiledCompute: give output_unshard_dimension or output_reduction, one of them; found "
                f"{output_unshard_dimension!r} and {output_reduction!r}"
            )
        size = _tile_size(seqlen, shards)
        cut: dict[str, Sequence[Any]] = {}
        for key, value in zip(keys_to_shard, args, strict=False):
            if value is not None and (value.dim() < 2 or value.shape[1] != seqlen):
                raise ValueError(
                    f"SequenceTiledCompute: found {key} of shape {tuple(value.shape)}, "
                    f"expected {seqlen} in dim 1 (seqlen)"
                )
            cut[key] = [None] * math.ceil(seqlen / size) if value is None else value.split(size, dim=1)
        whole = dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True))
        lengths = [min(size, seqlen - start) for start in range(0, seqlen, size)]
        results = [
            _run(fn, **{key: tiles[index] for key, tiles in cut.items()}, **whole) for index in range(len(lengths))
        ]
        if output_unshard_dimension is None:
            return _reduced(results, lengths, output_reduction)
        return torch.cat(results, dim=output_unshard_dimension)
