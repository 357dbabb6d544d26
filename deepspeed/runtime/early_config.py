"""Small sections that earlier releases read: `amp`, `progressive_layer_drop`, `quantize_training`, `sparse_attention`.

Owns their fields only.
"""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from deepspeed.runtime.config_types import Flag, Integer, Real
from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class AmpConfig(DeepSpeedConfigModel):
    """`amp`: Apex AMP; all keys but `enabled` are handed to apex.amp.initialize."""

    model_config = ConfigDict(extra="allow")
    free_keys = True

    enabled: Flag = False
    """Use Apex AMP; excludes fp16, bf16 and ZeRO. Example: true."""


class ProgressiveLayerDropConfig(DeepSpeedConfigModel):
    """`progressive_layer_drop`: drop more layers as training goes on."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Drop layers. Example: true."""

    theta: Real = 1.0
    """Share of layers kept in the end. Example: 0.5."""

    gamma: Real = 0.001
    """Speed of the change per step. Example: 0.001."""


class EigenvalueConfig(DeepSpeedConfigModel):
    """`quantize_training.eigenvalue`: curvature per layer for quantization-aware training."""

    keeps_unknown_keys = True

    enabled: Flag = False
    """Estimate eigenvalues. Example: true."""

    verbose: Flag = False
    """Print each estimate. Example: true."""

    max_iter: Annotated[Integer, Field(ge=1)] = 100
    """Power iterations at most. Example: 100."""

    tol: Real = 1e-2
    """Relative change at which the iteration stops. Example: 1e-2."""

    stability: Real = 1e-6
    """Added to norms. Example: 1e-6."""

    gas_boundary_resolution: Annotated[Integer, Field(ge=1)] = 1
    """Optimizer steps between estimates. Example: 1."""

    layer_name: str = "bert.encoder.layer"
    """Module that holds the layers. Example: "bert.encoder.layer"."""

    layer_num: Annotated[Integer, Field(ge=0)] = 0
    """Number of layers. Example: 12."""


class QuantizeTrainingConfig(DeepSpeedConfigModel):
    """`quantize_training`: settings of quantization-aware training."""

    keeps_unknown_keys = True

    eigenvalue: EigenvalueConfig = Field(default_factory=EigenvalueConfig)
    """Curvature per layer. Example: {"enabled": true}."""


class SparseAttentionConfig(DeepSpeedConfigModel):
    """`sparse_attention`: block layout of attention."""

    keeps_unknown_keys = True

    mode: Literal["fixed", "dense", "variable", "bigbird", "bslongformer"] = "fixed"
    """Layout. Example: "bigbird"."""

    block: Annotated[Integer, Field(ge=1)] = 16
    """Side of a block (tokens). Example: 16."""

    different_layout_per_head: Flag = False
    """Give each head its own layout. Example: true."""

    num_local_blocks: Annotated[Integer, Field(ge=1)] = 4
    """Blocks of a local window (fixed). Example: 4."""

    num_global_blocks: Annotated[Integer, Field(ge=0)] = 1
    """Global blocks (fixed, bigbird). Example: 1."""

    attention: Literal["bidirectional", "unidirectional"] = "bidirectional"
    """Whether tokens see later ones (fixed, variable). Example: "unidirectional"."""

    horizontal_global_attention: Flag = False
    """Let global blocks attend to all (fixed, variable). Example: true."""

    num_different_global_patterns: Annotated[Integer, Field(ge=1)] = 1
    """Different global patterns over heads (fixed). Example: 1."""

    num_random_blocks: Annotated[Integer, Field(ge=0)] = 0
    """Random blocks (variable, bigbird). Example: 1."""

    local_window_blocks: list[Integer] = Field(default_factory=lambda: [4])
    """Blocks of each local window (variable). Example: [4]."""

    global_block_indices: list[Integer] = Field(default_factory=lambda: [0])
    """Global blocks (variable, bslongformer). Example: [0]."""

    global_block_end_indices: list[Integer] | None = None
    """Ends of ranges of global blocks (variable, bslongformer). Example: [2]."""

    num_sliding_window_blocks: Annotated[Integer, Field(ge=1)] = 3
    """Blocks of the sliding window (bigbird, bslongformer). Example: 3."""
