"""Stage 3 under its historical name: the ZeRO core with sharded parameters, and the old attribute names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3_estimators import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
    model_to_params,
)
from deepspeed.runtime.zero.views import HistoricalViews
from deepspeed.utils import tensor_fragment

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "model_to_params",
]


class DeepSpeedZeroOptimizer_Stage3(HistoricalViews):
    """The ZeRO core with parameters, gradients and optimizer state sharded."""

    parameter_offload: DeepSpeedZeRoOffload

    @property
    def fp16_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's parameters in their own dtype, per group; on one rank, where they are whole, none.  # 1D each"""
        return [group.shard for group in self.groups if group.shard is not None]

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's masters per group; parameters that are their own masters stand for them.  # 1D each"""
        flat = [group.master if group.master is not None else group.shard for group in self.groups]
        return [shard for shard in flat if shard is not None]

    def get_full_hp_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """The whole fp32 value of ``param``, or of one of its optimizer states. Collective."""
        if optim_state_key is None:
            return tensor_fragment.safe_get_full_fp32_param(param)
        return tensor_fragment.safe_get_full_optimizer_state(param, optim_state_key)

    def set_full_hp_param(self, value: torch.Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        """Write it, the same value on every rank. Collective."""
        if optim_state_key is None:
            tensor_fragment.safe_set_full_fp32_param(param, value)
        else:
            tensor_fragment.safe_set_full_optimizer_state(param, value, optim_state_key)

    def get_local_fp32_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """This rank's elements of the same."""
        if optim_state_key is None:
            return tensor_fragment.safe_get_local_fp32_param(param)
        return tensor_fragment.safe_get_local_optimizer_state(param, optim_state_key)

    def set_local_hp_param(self, value: torch.Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        """Write this rank's elements."""
        if optim_state_key is None:
            tensor_fragment.safe_set_local_fp32_param(param, value)
        else:
            tensor_fragment.safe_set_local_optimizer_state(param, value, optim_state_key)

    def get_fp32_grad_for_param(self, param: nn.Parameter) -> torch.Tensor | None:
        """The whole reduced gradient of ``param`` in fp32. Collective."""
        return tensor_fragment.safe_get_full_grad(param)

    def get_local_fp32_grad_for_param(self, param: nn.Parameter) -> torch.Tensor | None:
        """This rank's elements of it."""
        return tensor_fragment.safe_get_local_grad(param)

    def get_hp_param_device(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.device:
        """Where its master and states live."""
        device: torch.device = self.find(param)[0].device
        return device

    def empty_partition_cache(self) -> None:
        """Release every gathered parameter that no graph needs."""
        self.parameter_offload.empty_partition_cache()

    def destroy(self) -> Any:
        """See :meth:`ZeroOptimizer.destroy`; the hooks are the engine's matter."""
        self.__dict__.pop("parameter_offload", None)
        super().destroy()
