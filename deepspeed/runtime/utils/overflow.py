"""Do the gradients hold an infinity or a NaN, on any rank that steps together?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.comm import collectives
from deepspeed.runtime.utils.norms import NOT_FINITE, has_inf_or_nan

__all__ = ["CheckOverflow"]


class CheckOverflow:
    """Overflow test over parameter groups, agreed between ranks.

    Args:
        param_groups: list of parameter lists or of optimizer groups.
        mpu: model-parallel unit; its group must agree.
        zero_reduce_scatter: each rank holds only a part of the reduced gradients, so all ranks must agree.
        deepspeed: engine; one that does not average gradients by itself (a pipeline) makes all ranks agree.
    """

    def __init__(
        self,
        param_groups: Iterable[Any] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.mpu = mpu
        self.zero_reduce_scatter = zero_reduce_scatter
        self.deepspeed = deepspeed
        self.params: list[torch.Tensor] | None = None
        self.has_moe_params = False
        if param_groups is not None:
            self.params = self._flatten(param_groups)
            self.has_moe_params = any(not getattr(param, "allreduce", True) for param in self.params)

    @staticmethod
    def _flatten(param_groups: Iterable[Any]) -> list[torch.Tensor]:
        return [param for group in param_groups for param in (group["params"] if isinstance(group, dict) else group)]

    def _agree(self, overflow: bool, all_ranks: bool) -> bool:
        """True on all ranks that must agree if it is true on one of them."""
        if not (torch_dist.is_available() and torch_dist.is_initialized()):
            return overflow
        engine_averages = getattr(self.deepspeed, "enable_backward_allreduce", True)
        if all_ranks or self.zero_reduce_scatter or not engine_averages:
            group = None
        elif self.mpu is not None:
            group = self.mpu.get_model_parallel_group()
        else:
            return overflow
        flag = torch.tensor([float(overflow)], device=get_accelerator().current_device_name())
        collectives.all_reduce(flag, group, op="max", what="the gradient overflow flag")
        return bool(flag.item())

    def check(self, param_groups: Iterable[Any] | None = None) -> bool:
        """Test the gradients of ``param_groups`` (default: those of the constructor)."""
        if param_groups is not None:
            return self.has_overflow(self._flatten(param_groups))
        if self.params is None:
            raise ValueError("CheckOverflow.check: no `param_groups` given here or to the constructor")
        return self.has_overflow(self.params, self.has_moe_params)

    def check_using_norm(self, norm_group: Sequence[float | torch.Tensor], reduce_overflow: bool = True) -> bool:
        """Test a list of norms in which -1 marks overflow; ``reduce_overflow=False`` asks this rank alone."""
        overflow = any(float(norm) == NOT_FINITE for norm in norm_group)
        return self._agree(overflow, self.has_moe_params) if reduce_overflow else overflow

    def has_overflow(self, params: Iterable[torch.Tensor], has_moe_params: bool | None = None) -> bool:
        """Test the gradients of ``params`` and agree. Experts differ between ranks, so with them all ranks agree."""
        all_ranks = self.has_moe_params if has_moe_params is None else has_moe_params
        return self._agree(self.has_overflow_serial(params), all_ranks)

    @staticmethod
    def has_overflow_serial(params: Iterable[torch.Tensor]) -> bool:
        """Test the gradients of ``params`` of this rank."""
        # One read-back for all parameters: a device is stopped once.
        flags = [has_inf_or_nan(param.grad) for param in params if param.grad is not None and param.grad.numel() > 0]
        return bool(torch.stack([flag.to(flags[0].device) for flag in flags]).any()) if flags else False
