"""``DeepSpeedZeRoOffload``: the hooks of stage 3 under their historical name, for clients that take them off and on.

A thin layer over ``sharded_module.py``. On one rank, where nothing is sharded, there are no hooks, and everything here
does nothing. An engine without optimizer has this object in the optimizer's place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from deepspeed.runtime.zero.historical_params import attach_whole, detach
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.sharded_module import ShardedModule, external_parameters
from deepspeed.runtime.zero.sharded_parameter import block_of

__all__ = ["DeepSpeedZeRoOffload", "ZeroParamStatus"]


class ExternalParameters:
    """``module.ds_external_parameters()``: ``(name, parameter)`` of what the module borrows from others."""

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> Iterator[tuple[str, nn.Parameter]]:
        module = self._module()
        for param in external_parameters(module) if module is not None else ():
            block = block_of(param)
            yield block.name_of(param) if block is not None else str(id(param)), param

    def __reduce__(self) -> tuple[Any, ...]:  # a copied or pickled module has none
        return type, (None,)


class DeepSpeedZeRoOffload:
    """See the module docstring. ``sharded`` is None where parameters are whole."""

    def __init__(self, module: nn.Module, sharded: ShardedModule | None) -> None:
        self.module = module
        self.sharded = sharded
        self.param_coordinator = PartitionedParameterCoordinator(sharded.gatherer if sharded is not None else None)
        self.backward_hooks: list[Any] = []  # backward needs none: see saved_tensors.py
        self._describe()

    def _describe(self) -> None:
        for part in self.module.modules():
            part.__dict__["ds_external_parameters"] = ExternalParameters(part)
        attach_whole(param for param in self.module.parameters() if block_of(param) is None)

    @property
    def forward_hooks(self) -> list[Any]:
        """Handles of the hooks that fetch parameters; each has ``remove()``."""
        return self.sharded._handles if self.sharded is not None else []

    @forward_hooks.setter
    def forward_hooks(self, handles: list[Any]) -> None:
        if self.sharded is not None:
            self.sharded._handles = handles

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Put the hooks back on the whole model."""
        self.setup_zero_stage3_hooks()

    def setup_zero_stage3_hooks(self) -> None:
        """Hook the model as it is now; hooks that are there are replaced."""
        if self.sharded is not None:
            self.sharded.install_hooks()
        self._describe()

    def get_param_coordinator(self) -> PartitionedParameterCoordinator:
        return self.param_coordinator

    def empty_partition_cache(self) -> None:
        """Release every gathered parameter that no graph needs."""
        self.param_coordinator.release_and_reset_all()

    partition_all_parameters = empty_partition_cache

    def destroy(self) -> None:
        """Leave no trace on the module. Parameters are the engine's matter."""
        for part in self.module.modules():
            part.__dict__.pop("ds_external_parameters", None)
        for param in self.module.parameters():
            if block_of(param) is None:
                detach(param)
        self.sharded = None
        self.param_coordinator = PartitionedParameterCoordinator(None)
