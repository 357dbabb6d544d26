"""The settings of activation checkpointing: where they come from, whether they fit together, what follows from them.

Owns: `CheckpointOptions` (values) and `Settings` (values plus the keeper of inputs made from them). Does not own the
process-wide instance or the public calls (see `checkpointing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.arena import ActivationArena
from deepspeed.runtime.activation_checkpointing.saved_inputs import (
    CheckpointStatistics,
    InputKeeper,
    ModelParallelShard,
    allocate,
)
from deepspeed.utils.bwc import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)
from deepspeed.utils.logging import log_dist, log_levels

__all__ = ["CheckpointOptions", "Settings", "check_options", "options_of", "tell_without_effect"]


@dataclass(frozen=True)
class CheckpointOptions:
    """What happens to the inputs a checkpoint keeps; names as in the config section ``activation_checkpointing``."""

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


class Settings:
    """The settings of this process and what follows from them."""

    def __init__(self) -> None:
        self.configured = False
        self.options = CheckpointOptions()
        self.mpu: Any = None
        self.statistics = CheckpointStatistics()
        self._keeper: InputKeeper | None = None

    def set(self, options: CheckpointOptions, mpu: Any) -> None:
        """Take over new settings; forwards that wait for backward keep the old ones."""
        self.options = options
        self.mpu = mpu
        self._keeper = None

    def shard(self) -> ModelParallelShard:
        return ModelParallelShard(
            bwc_tensor_model_parallel_group(self.mpu),
            bwc_tensor_model_parallel_rank(self.mpu),
            bwc_tensor_model_parallel_world_size(self.mpu),
        )

    @property
    def keeper(self) -> InputKeeper:
        if self._keeper is None:
            shard = self.shard()
            arena = None
            if self.options.contiguous_memory_optimization:
                arena = ActivationArena(self.options.number_checkpoints or 1, allocate)
            self._keeper = InputKeeper(
                self.statistics,
                shard if self.options.partition_activations and shard.size > 1 else None,
                self.options.cpu_checkpointing,
                arena,
            )
        return self._keeper


def _section_of(source: Any) -> Any:
    """The section ``activation_checkpointing`` of a config object, of a section, or of a dict, path or base64 text."""
    if hasattr(source, "activation_checkpointing_config"):
        return source.activation_checkpointing_config
    if hasattr(source, "partition_activations"):
        return source
    # Only for sources that need parsing: the config package is large.
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig.parse(source, partial=True).activation_checkpointing_config


def options_of(source: Any) -> CheckpointOptions:
    """Options from a config in any form (see `configure`)."""
    section = _section_of(source)
    names = CheckpointOptions.__dataclass_fields__
    return CheckpointOptions(**{name: getattr(section, name) for name in names})


def check_options(options: CheckpointOptions) -> None:
    """DeepSpeedConfigError if the options contradict each other."""
    if not options.contiguous_memory_optimization:
        return
    from deepspeed.runtime.config import DeepSpeedConfigError

    missing = []
    if not options.partition_activations:
        missing.append("partition_activations true")
    if not options.number_checkpoints:
        missing.append("number_checkpoints (num_checkpoints) at least 1")
    if missing:
        raise DeepSpeedConfigError(
            "activation_checkpointing.contiguous_memory_optimization (contiguous_checkpointing) is on, which needs "
            f"{' and '.join(missing)}; set it, or switch contiguous_memory_optimization off"
        )


def tell_without_effect(options: CheckpointOptions, shard: ModelParallelShard) -> None:
    """One rank-0 line for each option that changes nothing here."""
    lines = []
    if options.partition_activations and shard.size == 1:
        lines.append("partition_activations has no effect: the model-parallel size is 1")
    if options.cpu_checkpointing and get_accelerator().name == "cpu":
        lines.append("cpu_checkpointing has no effect: the accelerator is the cpu, activations are in host memory")
    for line in lines:
        log_dist(f"activation_checkpointing.{line}", ranks=[0], level=log_levels["warning"])
