"""MiCS under its historical names. What it does stands in ``routes.py`` and is chosen by ``mics_shard_size``."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.runtime.zero.mics_utils import MiCS_CommGroups
from deepspeed.runtime.zero.partition_parameters import Init, check_module
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

__all__ = ["MiCS_Init", "MiCS_Optimizer", "has_hierarchical_all_gather_groups"]


class MiCS_Init(Init):
    """:class:`Init` for models that train with ``mics_shard_size``.

    Until ``deepspeed.initialize`` takes over, parameters are spread over all ranks, so that a model which only fits in
    shards of that size can be built; then each block of ``mics_shard_size`` neighbours holds a whole copy.

    Raises ValueError where the config does not ask for MiCS.
    """

    def __init__(self, module: nn.Module | None = None, *args: Any, **kwargs: Any) -> None:
        check_module(module)
        super().__init__(None, *args, **kwargs)
        config = getattr(self, "config", None)
        if self.enabled and (config is None or config.zero_config.mics_shard_size <= 0):
            raise ValueError(
                "MiCS_Init needs config_dict_or_path with zero_optimization.mics_shard_size above 0; found "
                f"{'no config' if config is None else config.zero_config.mics_shard_size}. Without MiCS use zero.Init"
            )
        if self.enabled and module is not None:
            for part in module.modules():
                self.module_built(part)
            self.left(completed=True)


class MiCS_Optimizer(DeepSpeedZeroOptimizer_Stage3):
    """The ZeRO core with shards over ``mics_shard_size`` neighbours and replicas of them on the other ranks."""


def has_hierarchical_all_gather_groups(comm_groups: MiCS_CommGroups) -> bool:
    """Whether these groups gather in two hops."""
    return comm_groups.param_intra_node_group is not None and comm_groups.param_inter_node_shard_group is not None
