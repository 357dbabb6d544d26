"""Linear layers in tiles, each with a parameter of its own (memory-centric tiling).

At stage 3 a layer is gathered whole; one that is too large for that is cut into tiles that are gathered, used and
released one after the other. The function computed is that of the whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from deepspeed.runtime.zero.gathered_parameters import GatheredParameters

__all__ = ["TiledLinear", "TiledLinearReturnBias", "split_tensor_along_last_dim"]


class TiledLinear(nn.Module):
    """``in_splits`` x ``out_splits`` linear layers that compute what one of (in_features, out_features) does.

    ``linears[o][i]`` maps part i of the input to its share of part o of the output; the last of each row has the bias.
    Parts differ by at most one element.

    Args:
        in_features, out_features, bias: of the whole layer.
        in_splits, out_splits: tiles per dim, from 1 to the dim's size.
        input_is_already_split: ``forward`` is given the list of parts of the input.
        combine_out_splits: give one output, else the list of its parts.
        linear_cls: class of the tiles, called with (in_features, out_features, bias=..., **kwargs).
        init_linear: a whole layer whose values are copied.

    Raises:
        RuntimeError: a number of splits that is below 1 or above the dim's size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, size in (
            ("in_splits", in_splits, in_features),
            ("out_splits", out_splits, out_features),
        ):
            if not 1 <= splits <= size:
                raise RuntimeError(f"TiledLinear: {name} is {splits}; expected 1 to {size}, the size of that dim")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = _bounds(in_features, in_splits), _bounds(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, height, bias=bias and i == in_splits - 1, **kwargs)
                for i, width in enumerate(_sizes(self.in_parts))
            )
            for height in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """The layer's output, or its parts.  # (..., in_features) -> (..., out_features)"""
        if self.input_is_already_split:
            parts: Sequence[Any] = list(input_)
            if len(parts) != self.in_splits:
                raise RuntimeError(f"TiledLinear: {len(parts)} parts of the input; expected in_splits={self.in_splits}")
        else:
            parts = split_tensor_along_last_dim(input_, self.in_parts)
        outputs = []
        for row in self._rows():
            total = None
            for tile, part in zip(row, parts, strict=True):
                total = self._reduce_local_output(tile(part), total)
            outputs.append(total)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _rows(self) -> list[list[Any]]:
        rows: Any = self.linears
        return [list(row) for row in rows]

    def _reduce_local_output(self, new: Any, total: Any) -> Any:
        return new if total is None else total + new

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Take the values of the whole layer ``other``. Collective where parameters are sharded.

        Raises ValueError for a layer of another shape, or with a bias where this has none, or the other way round.
        """
        weight: Any = other.weight
        bias: Any = getattr(other, "bias", None)
        shape = tuple(getattr(weight, "ds_shape", weight.shape))
        if shape != (self.out_features, self.in_features):
            raise ValueError(
                f"TiledLinear.copy_params_from: weight of shape {shape}; expected "
                f"({self.out_features}, {self.in_features})"
            )
        if (bias is not None) != self.use_bias:
            found, own = ("a", "none") if bias is not None else ("no", "one")
            raise ValueError(f"TiledLinear.copy_params_from: the layer has {found} bias, this one has {own}")
        with GatheredParameters([weight] if bias is None else [weight, bias]):
            for row, (low, high) in zip(self._rows(), pairwise(self.out_parts), strict=True):
                for tile, (left, right) in zip(row, pairwise(self.in_parts), strict=True):
                    with GatheredParameters(list(tile.parameters()), modifier_rank=0):
                        tile.weight.copy_(weight[low:high, left:right])
                        if getattr(tile, "bias", None) is not None:
                            tile.bias.copy_(bias[low:high])


class TiledLinearReturnBias(TiledLinear):
    """Tiles whose layers return ``(output, bias)``, as some tensor-parallel layers do; gives ``(output, bias)``."""

    def _reduce_local_output(self, new: Any, total: Any) -> Any:
        if not isinstance(new, tuple):
            raise TypeError(f"TiledLinearReturnBias: linear_cls returned {type(new).__name__}; expected (output, bias)")
        output, bias = new
        if total is None:
            return output, bias
        before, held = total
        return before + output, bias if bias is not None else held

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        whole = torch.cat([output for output, _ in outputs], dim=-1)
        return whole, torch.cat(biases, dim=-1) if biases else None


def split_tensor_along_last_dim(
    tensor: torch.Tensor, partitions: Sequence[int], contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """The parts of ``tensor`` between the bounds ``partitions`` (0, ..., size) of its last dim."""
    parts = torch.split(tensor, _sizes(partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def _bounds(size: int, splits: int) -> list[int]:
    """``splits`` + 1 bounds of parts that differ by at most one."""
    small, larger = divmod(size, splits)
    return [0, *accumulate(small + (part < larger) for part in range(splits))]


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [high - low for low, high in pairwise(bounds)]
