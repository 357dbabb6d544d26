"""Configs of the sequence and cache manager: how much is tracked, how much memory the cache takes."""

from enum import Enum
from typing import Annotated

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from deepspeed.runtime.config_types import Flag, Integer, Size, TorchDtype, torch_dtype
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

Positive = Annotated[Integer, Field(gt=0)]


class KVCacheType(str, Enum):
    """Which past tokens a cache holds."""

    DENSE = "dense"
    LOCAL = "local"


class AllocationMode(str, Enum):
    """How the size of the cache is given."""

    RESERVE = "reserve"
    ALLOCATE = "allocate"


class KVCacheConfig(DeepSpeedConfigModel):
    """Shape of a cache of keys and values; filled in by a model."""

    type: KVCacheType = KVCacheType.DENSE
    """Which past tokens are held. Example: "local"."""

    block_size: Positive = 128
    """Tokens of a block. Example: 64."""

    num_allocation_groups: Positive = 1
    """Groups of layers with blocks of their own. Example: 1."""

    cache_shape: tuple[Positive, Positive, Positive]
    """Layers, heads of keys and values, head size. Example: [32, 8, 128]."""

    cache_dtype: TorchDtype = Field(default_factory=lambda: torch_dtype("fp16"))
    """Dtype of the cache. Example: "bf16"."""

    max_blocks_per_allocation_group: Positive = 64
    """Blocks of one sequence at most. Example: 64."""


class MemoryConfig(DeepSpeedConfigModel):
    """`memory_config`: memory of the cache."""

    mode: AllocationMode = AllocationMode.RESERVE
    """reserve: all free memory but `size` bytes; allocate: exactly `size` blocks. Example: "allocate"."""

    size: Annotated[Size, Field(gt=0)] = 1_000_000_000
    """Bytes (reserve) or blocks (allocate). Example: 1000000000."""


class DSStateManagerConfig(DeepSpeedConfigModel):
    """`state_manager`: sequences in flight."""

    max_tracked_sequences: Positive = 2048
    """Sequences known at a time. Example: 2048."""

    max_ragged_batch_size: Positive = 768
    """Tokens of one forward. Example: 768."""

    max_ragged_sequence_count: Positive = 512
    """Sequences of one forward; at most the two above. Example: 512."""

    max_context: Positive = 8192
    """Longest sequence (tokens). Example: 8192."""

    memory_config: MemoryConfig = Field(default_factory=MemoryConfig)
    """Memory of the cache. Example: {"mode": "allocate", "size": 1024}."""

    offload: Flag = False
    """Keep parts of the cache on the host. Example: false."""

    @model_validator(mode="after")
    def _sequences_fit(self) -> Self:
        for key in ("max_ragged_batch_size", "max_tracked_sequences"):
            limit = getattr(self, key)
            if self.max_ragged_sequence_count > limit:
                raise PydanticCustomError(
                    "ds_cross",
                    "max_ragged_sequence_count: found {found} with {other} {limit}; expected at most {other}",
                    {
                        "key": "max_ragged_sequence_count",
                        "found": self.max_ragged_sequence_count,
                        "other": key,
                        "limit": limit,
                    },
                )
        return self
