"""Historical attribute names of sharded optimizers, as live views of the real storage.

Each property returns the same tensors every time: clients compare them in place and use them as keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.runtime.zero.optimizer import ZeroOptimizer


class HistoricalViews(ZeroOptimizer):
    """Mixin of names only; adds no state and no behaviour."""

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """The model's parameters, per group."""
        return [group.params for group in self.groups]

    fp16_groups = bit16_groups

    @property
    def bit16_groups_flat(self) -> list[torch.Tensor]:
        """The flat parameter buffers, per group (sharded groups only)."""
        return [group.flat for group in self.groups if group.flat is not None]

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """This rank's master shard per group.  # 1D, shard_numel

        Raises AttributeError where masters are aliased to several pieces of the parameters (fp32, more than one
        bucket), or lie in a file by unit: there is no one tensor to show; use
        ``deepspeed.utils.safe_get_full_fp32_param``.
        """
        self.hold_still()
        shards = []
        for group in self.groups:
            if group.master is not None:
                shards.append(group.master)
            elif group.flat is not None and len(group.layout.segments) == 1:
                shards.append(group.model_piece(group.layout.segments[0]))
            else:
                where = "lie in a file" if group.on_disk else "are the parameters themselves"
                raise AttributeError(
                    f"single_partition_of_fp32_groups: the masters {where}, in pieces; read them with "
                    "deepspeed.utils.safe_get_full_fp32_param(param)"
                )
        return shards

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor] | None]:
        """Reduced gradients of this rank's fragments per group number, None where there are none."""
        found: dict[int, list[torch.Tensor] | None] = {}
        for number, group in enumerate(self.groups):
            grads = [grad for bound in group.fragments if (grad := group.grad_of(bound)) is not None]
            found[number] = grads or None
        return found

    @property
    def dynamic_loss_scale(self) -> bool:
        return bool(getattr(self.loss_scaler, "dynamic", False))

    @property
    def partition_gradients(self) -> bool:
        return self.placement.reduces_every_backward

    @property
    def dp_process_group(self) -> Any:
        return self.process_group

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.param_groups]

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def scaled_global_norm(self, norm_type: float = 2) -> float:
        """The last boundary's norm, times the loss scale. Only the L2 norm exists."""
        if norm_type != 2:
            raise ValueError(f"scaled_global_norm: only norm_type=2 is defined; found {norm_type}")
        return (self.norm or 0.0) * self.loss_scale

    def update_lp_params(self) -> None:
        self.publish_masters()
