"""Section `pipeline`: settings read by the pipeline engine; without a PipelineModule it changes nothing."""

from typing import Annotated, Any

from pydantic import Field

from deepspeed.runtime.config_types import Flag, Integer, Rule, refuse, to_integer
from deepspeed.runtime.config_utils import AUTO, DeepSpeedConfigModel


def _stages(value: Any) -> int | str:
    if value == AUTO:
        return AUTO
    if isinstance(value, str) or to_integer(value) < 1:
        raise refuse('an integer >= 1 or "auto"')
    return to_integer(value)


class PipelineConfig(DeepSpeedConfigModel):
    """`pipeline`: pipeline parallelism."""

    keeps_unknown_keys = True

    stages: Annotated[str | int, Rule(_stages, 'an integer >= 1 or "auto"')] = AUTO
    """[with PipelineModule] For information: the module decides. Example: 4."""

    partition: str = "best"
    """[with PipelineModule] For information: the module decides. Example: "best"."""

    seed_layers: Flag = False
    """[with PipelineModule] For information: the module decides. Example: true."""

    activation_checkpoint_interval: Annotated[Integer, Field(ge=0)] = 0
    """[with PipelineModule] Layers between checkpoints; above 0 it overrides the module. Example: 1."""

    pipe_partitioned: Flag = True
    """[with PipelineModule] Send activations sharded over the model-parallel ranks. Example: false."""

    grad_partitioned: Flag = True
    """[with PipelineModule] Send gradients sharded over the model-parallel ranks. Example: false."""

    use_reentrant: Flag | None = None
    """[with PipelineModule] false uses torch's non-reentrant checkpoint; absent = true. Example: false."""
