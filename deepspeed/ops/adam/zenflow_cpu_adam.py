"""`ZenFlowCPUAdam`: `DeepSpeedCPUAdam` under the name that scripts for ZenFlow pass to `initialize`."""

from __future__ import annotations

from typing import Any

from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.utils.logging import logger


class ZenFlowCPUAdam(DeepSpeedCPUAdam):
    """Adam or AdamW on the CPU, as `DeepSpeedCPUAdam`; what ZenFlow does around it is set in the config.

    Args:
        overlap_step: whether updates run beside training is `zero_optimization.zenflow.overlap_step` of the config;
            asked for here, a line says so.
    """

    def __init__(self, *args: Any, overlap_step: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if overlap_step:
            logger.warning(
                "ZenFlowCPUAdam(overlap_step=True) has no effect by itself: set zero_optimization.zenflow.overlap_step "
                "to true in the config"
            )
