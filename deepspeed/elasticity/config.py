"""Section `elasticity`: batch sizes that stay the same over many numbers of devices."""

from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from deepspeed.runtime.config_types import Flag, Integer, Real, Rule, refuse, to_integer
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

LATEST_ELASTICITY_VERSION = 0.2


class ElasticityError(Exception):
    """Base of elasticity errors."""


class ElasticityConfigError(ElasticityError):
    """The section is contradictory."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The number of devices is not one of those the section allows."""


def _micro_batches(value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)) or not value:
        raise refuse("list of integers > 0")
    sizes = [to_integer(item) for item in value]
    if min(sizes) <= 0:
        raise refuse("list of integers > 0")
    return sizes


class ElasticityConfigModel(DeepSpeedConfigModel):
    """`elasticity`: choose the batch from the number of devices."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Choose the batch. Example: true."""

    max_train_batch_size: Annotated[Integer, Field(ge=1)] = 2000
    """Largest batch (samples); required when enabled. Example: 2000."""

    micro_batch_sizes: Annotated[list[int], Rule(_micro_batches, "list of integers > 0")] = Field(
        default_factory=lambda: [2, 4, 6]
    )
    """Micro batches to choose from; required when enabled. Example: [2, 4, 6]."""

    min_gpus: Annotated[Integer, Field(ge=1)] = 1
    """Fewest devices. Example: 1."""

    max_gpus: Annotated[Integer, Field(ge=1)] = 10000
    """Most devices. Example: 10000."""

    min_time: Annotated[Integer, Field(ge=0)] = 0
    """Minutes a size must last. Example: 20."""

    num_gpus_per_node: Annotated[Integer, Field(ge=1)] = 1
    """Devices of a node. Example: 8."""

    model_parallel_size: Annotated[Integer, Field(ge=1)] = 1
    """Model-parallel ranks; above 1 needs version 0.2. Example: 2."""

    version: Annotated[Real, Field(gt=0, le=LATEST_ELASTICITY_VERSION)] = LATEST_ELASTICITY_VERSION
    """Version of the rule, 0.1 or 0.2. Example: 0.2."""

    prefer_larger_batch: Flag = True
    """Among equals take the larger batch. Example: false."""

    ignore_non_elastic_batch_info: Flag = False
    """Accept batch keys beside this section and ignore them. Example: true."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in ("max_train_batch_size", "micro_batch_sizes"):
            if self.enabled and name not in self.model_fields_set:
                raise PydanticCustomError(
                    "ds_cross", "missing; expected it with elasticity.enabled true", {"key": name}
                )
        if self.min_gpus > self.max_gpus:
            raise PydanticCustomError(
                "ds_cross",
                "found {low} with elasticity.max_gpus {high}; expected at most max_gpus",
                {"key": "min_gpus", "low": self.min_gpus, "high": self.max_gpus},
            )
        if self.num_gpus_per_node % self.model_parallel_size:
            raise PydanticCustomError(
                "ds_cross",
                "found {mp} with elasticity.num_gpus_per_node {node}; expected a divisor of it",
                {"key": "model_parallel_size", "mp": self.model_parallel_size, "node": self.num_gpus_per_node},
            )
        return self
