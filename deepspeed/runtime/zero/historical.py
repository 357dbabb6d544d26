"""Which historical optimizer class stands for a stage and precision, so that ``isinstance`` checks go on working.

All of them are the one :class:`ZeroOptimizer`; the choice changes no number.
"""

from __future__ import annotations

import torch

from deepspeed.ops.adam.fused_adam import FusedAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.precision import PrecisionPolicy
from deepspeed.runtime.zero.mics import MiCS_Optimizer
from deepspeed.runtime.zero.optimizer import ZeroOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def optimizer_class(
    stage: int, precision: PrecisionPolicy, base: torch.optim.Optimizer | None = None, *, mics: bool = False
) -> type[ZeroOptimizer]:
    """The class name clients expect for ``stage`` in this precision; ``mics``: with ``mics_shard_size``.

    Without sharding the name also depends on ``base``: the fused Adam had flat masters, the others one per parameter.
    """
    if stage == 0 and precision.model is torch.float32:
        return ZeroOptimizer
    if stage == 0:
        return FP16_Optimizer if isinstance(base, FusedAdam) else FP16_UnfusedOptimizer
    if stage == 3:
        return MiCS_Optimizer if mics else DeepSpeedZeroOptimizer_Stage3
    if stage == 1 and precision.model is torch.bfloat16 and precision.accum is torch.float32:
        return BF16_Optimizer
    return DeepSpeedZeroOptimizer
