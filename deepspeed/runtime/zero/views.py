"""Historical attribute names and call forms of sharded optimizers, as live views of the real storage.

Each property returns the same tensors every time: clients compare them in place and use them as keys. A historical
argument does what it says or is refused by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.runtime.zero import state_dict as zero_state
from deepspeed.runtime.zero.optimizer import ZeroOptimizer


class HistoricalViews(ZeroOptimizer):
    """Mixin of names and call forms; adds no state."""

    def backward(  # type: ignore[override]
        self, loss: torch.Tensor, create_graph: bool = False, retain_graph: bool = False
    ) -> None:
        """:meth:`ZeroOptimizer.backward`. Raises ValueError for ``create_graph``, which gradients here cannot carry."""
        if create_graph:
            raise ValueError(
                "optimizer.backward(create_graph=True) is not supported: gradients move into the buffers of the "
                "reduction and carry no graph. Take torch.autograd.grad(..., create_graph=True) and add what you make "
                "of it to the loss"
            )
        super().backward(loss, retain_graph=retain_graph)

    def load_state_dict(
        self,
        state_dict: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: str | None = None,
        load_serial: bool | None = None,
        param_shapes: Any = None,
        *,
        state_dict_list: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Take back what ``state_dict()`` gave. Collective. Raises ValueError under another layout.

        Args:
            state_dict: this rank's, or the list of all ranks' (also by the name ``state_dict_list``).
            load_optimizer_states: False restores the masters alone; moments and hyper-parameters stay.
            load_from_fp32_weights: masters come from the saved masters either way, which is what True asks for.
            checkpoint_folder, load_serial, param_shapes: refused: ``engine.load_checkpoint`` reads checkpoints.
        """
        files = {"checkpoint_folder": checkpoint_folder, "load_serial": load_serial, "param_shapes": param_shapes}
        asked = [name for name, value in files.items() if value is not None]
        if asked or not isinstance(load_optimizer_states, bool):
            raise ValueError(
                f"optimizer.load_state_dict: found {', '.join(asked) or f'{load_optimizer_states=}'}; it takes the "
                "result of optimizer.state_dict() and load_optimizer_states=True or False. Checkpoints on disk are "
                'read by engine.load_checkpoint ("checkpoint": {"load_universal": true} for universal ones)'
            )
        found = state_dict if state_dict is not None else state_dict_list
        if isinstance(found, Sequence):
            if len(found) != self.world:
                raise ValueError(f"optimizer.load_state_dict: found {len(found)} states for {self.world} ranks")
            found = found[self.rank]
        if found is None:
            raise TypeError("optimizer.load_state_dict: needs the result of optimizer.state_dict()")
        zero_state.load_shard_state(self, found, states=load_optimizer_states)

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
        """Reduced gradients of this rank's fragments per group number, None where there are none.

        Those that lie there: what is written to them between backward and ``step`` counts.
        """
        self.settle_gradients()
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
