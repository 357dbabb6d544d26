"""bf16 weights with fp32 masters, fp32 gradient accumulation and sharded state, under the historical name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepspeed.runtime.zero.fragment_link import link_fragments
from deepspeed.runtime.zero.views import HistoricalViews

if TYPE_CHECKING:
    from deepspeed.runtime.zero.shard_group import ShardGroup

__all__ = ["BF16_Optimizer"]


class BF16_Optimizer(HistoricalViews):
    """Stage 1, bf16, ``data_types.grad_accum_dtype: fp32``: a row of values of the ZeRO core."""

    def _adopt(self, groups: Sequence[ShardGroup]) -> None:
        super()._adopt(groups)
        link_fragments(self)
