"""Section `compile`: what `engine.compile()` does."""

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from deepspeed.runtime.config_types import Flag, Size
from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class CompileConfig(DeepSpeedConfigModel):
    """`compile`: DeepCompile graph passes."""

    deepcompile: Flag = False
    """Use the graph passes when engine.compile() is called. Example: true."""

    autoep_non_moe: Flag = False
    """Compile the dense regions of an AutoEP model with torch alone. Example: true."""

    free_activation: Flag = False
    """Free large activations early in backward. Example: true."""

    free_activation_threshold: Annotated[Size, Field(ge=0)] = 10_485_760
    """Bytes above which an activation is freed early. Example: 10485760."""

    offload_activation: Flag = False
    """Read by the activation offload pass of a custom schedule. Example: true."""

    offload_activation_pin_memory: Flag = True
    """Page-lock the host buffers of that pass. Example: false."""

    offload_opt_states: Flag = False
    """Schedule passes that offload optimizer states. Example: true."""

    double_buffer: Flag = True
    """Use two gather buffers. Example: false."""

    symmetric_memory: Flag = False
    """Gather through torch symmetric memory. Example: true."""

    debug_log: Flag = False
    """Print what each pass did. Example: true."""

    offload_parameters: Flag = False
    """Set when both offload blocks use the host. Example: true."""

    sync_before_reduce: Flag = False
    """Wait for the device before reductions (debugging). Example: true."""

    sync_after_reduce: Flag = False
    """Wait for the device after reductions (debugging). Example: true."""

    sync_before_allgather: Flag = False
    """Wait for the device before all-gathers (debugging). Example: true."""

    sync_after_allgather: Flag = False
    """Wait for the device after all-gathers (debugging). Example: true."""

    keep_int_input_tensors: Flag = True
    """Keep integer graph inputs alive. Example: false."""

    keep_all_input_tensors: Flag = False
    """Keep all graph inputs alive. Example: true."""

    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = None
    """Explicit passes; autotp stands alone. Example: ["autosp"]."""

    @model_validator(mode="after")
    def _autotp_stands_alone(self) -> Self:
        others = sorted(set(self.passes or ()) - {"autotp"})
        if self.passes and "autotp" in self.passes and others:
            raise PydanticCustomError(
                "ds_cross",
                "found autotp together with {others}; expected autotp alone",
                {"key": "passes", "others": ", ".join(others)},
            )
        return self
