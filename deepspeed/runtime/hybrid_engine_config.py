"""Section `hybrid_engine`: training and generation with one set of weights."""

from typing import Annotated

from pydantic import Field

from deepspeed.runtime.config_types import Flag, Integer
from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class HybridEngineConfig(DeepSpeedConfigModel):
    """`hybrid_engine`: RLHF-style training."""

    enabled: Flag = False
    """Build the engine that also generates. Example: true."""

    max_out_tokens: Annotated[Integer, Field(gt=0)] = 512
    """Longest generation, prompt included (tokens). Example: 1024."""

    inference_tp_size: Annotated[Integer, Field(ge=1)] = 1
    """Ranks that split the model while generating. Example: 2."""

    release_inference_cache: Flag = False
    """Free the cache of keys and values between generations. Example: true."""

    pin_parameters: Flag = True
    """[stage 3] Keep gathered weights during a generation. Example: false."""

    tp_gather_partition_size: Annotated[Integer, Field(ge=1)] = 8
    """Layers gathered together when inference_tp_size is above 1. Example: 4."""

    enable_cuda_graph: Flag = False
    """Capture one decoding graph per position. Example: true."""
