"""Settings that act on the process or on what is printed, not on the numbers of a run.

Owns: applying the log level, the activation-checkpointing block, the log of collectives and ``dump_state``, the check
of ``zero_allow_untested_optimizer``, and the lines about settings that change nothing for this mesh. Does not own:
what these sections mean (their own modules) or any tensor. Invariant: what a config does not mention stays as the
program left it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from deepspeed import comm as dist
from deepspeed.comm.logging import configure as configure_comm_log
from deepspeed.comm.mesh import ParallelMesh
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS, is_zero_supported_optimizer
from deepspeed.utils.logging import logger, print_dist, set_log_level_from_string

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def apply_config(config: DeepSpeedConfig, mesh: ParallelMesh, mpu: Any) -> None:
    """Apply everything this module owns; then name on rank 0 what was not taken literally."""
    if config.log_level:
        set_log_level_from_string(config.log_level)
    given = config.sections.model_fields_set
    lines = [*config.notes(), *_without_effect_here(config, mesh)]
    if "activation_checkpointing" in given and not checkpointing.is_configured():
        checkpointing.configure(mpu, deepspeed_config=config)
    elif "activation_checkpointing" in given:
        lines += [
            f"activation_checkpointing.{key} has no effect: this process is configured otherwise already, by "
            "deepspeed.checkpointing.configure or an earlier engine"
            for key in checkpointing.differs_from(config)
        ]
    if "comms_logger" in given:
        configure_comm_log(config)
    if dist.get_rank() == 0:
        for line in lines:
            logger.warning(line)
        for line in config.adjustments:
            logger.debug(line)


def _without_effect_here(config: DeepSpeedConfig, mesh: ParallelMesh) -> list[str]:
    if "seq_parallel_communication_data_type" in config.sections.model_fields_set and mesh.size("sp") == 1:
        return ["seq_parallel_communication_data_type has no effect: no sequence is shared (sequence-parallel size 1)"]
    return []


def check_tested(optimizer: torch.optim.Optimizer, config: DeepSpeedConfig) -> None:
    """``zero_allow_untested_optimizer: false``, said in so many words, admits the tested classes only.

    Every torch optimizer is sharded rightly (one that is not known to be elementwise by whole parameters), so a config
    that does not mention the key admits all of them. Raises DeepSpeedConfigError, which is an AssertionError too.
    """
    said = "zero_allow_untested_optimizer" in config.sections.model_fields_set
    if not said or config.zero_allow_untested_optimizer or not config.zero_enabled:
        return
    if not is_zero_supported_optimizer(optimizer):
        tested = ", ".join(sorted({cls.__name__ for cls in ZERO_SUPPORTED_OPTIMIZERS}))
        raise DeepSpeedConfigError(
            f"zero_allow_untested_optimizer: found false with optimizer {type(optimizer).__name__} at "
            f"zero_optimization.stage {config.zero_optimization_stage}; expected one of {tested}; set "
            '"zero_allow_untested_optimizer": true, or remove it'
        )


def dump_state(engine: DeepSpeedEngine) -> None:
    """``dump_state``: rank 0 prints the config in force and the facts of the engine."""
    facts = {"config": engine.config, "engine": engine.summary()}
    print_dist(json.dumps(facts, indent=2, default=str), ranks=[0])
