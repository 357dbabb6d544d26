"""Historical names of what compiled an op: `CPUAdamBuilder().load()` and the like.

Nothing is built by torch's extension machinery here: `load` returns an object with the op's historical functions, over
the implementation that the registry (`deepspeed.ops.registry`) chooses. Builders of ops that this version does not have
are `NotImplementedBuilder`. Names are loaded at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.ops.op_builder.builder import NotImplementedBuilder as NotImplementedBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder as OpBuilder
    from deepspeed.ops.op_builder.builders import AsyncIOBuilder as AsyncIOBuilder
    from deepspeed.ops.op_builder.builders import CCLCommBuilder as CCLCommBuilder
    from deepspeed.ops.op_builder.builders import CPUAdagradBuilder as CPUAdagradBuilder
    from deepspeed.ops.op_builder.builders import CPUAdamBuilder as CPUAdamBuilder
    from deepspeed.ops.op_builder.builders import CPULionBuilder as CPULionBuilder
    from deepspeed.ops.op_builder.builders import FusedAdamBuilder as FusedAdamBuilder
    from deepspeed.ops.op_builder.builders import PinMemoryBuilder as PinMemoryBuilder
    from deepspeed.ops.op_builder.builders import ShareMemCommBuilder as ShareMemCommBuilder

_EXPORTS = {
    **dict.fromkeys(("OpBuilder", "NotImplementedBuilder", "get_default_compute_capabilities"), "builder"),
    **dict.fromkeys(
        ("AsyncIOBuilder", "CCLCommBuilder", "CPUAdagradBuilder", "CPUAdamBuilder", "CPULionBuilder",
         "FusedAdamBuilder", "PinMemoryBuilder", "ShareMemCommBuilder"), "builders"),
    "ALL_OPS": "all_ops",
}  # fmt: skip
# Builders whose op is not part of this version.
_NOT_IMPLEMENTED = (
    "DeepCompileBuilder", "EvoformerAttnBuilder", "FPQuantizerBuilder", "FlashAttentionBuilder",
    "FusedLambBuilder", "FusedLionBuilder", "GDSBuilder", "InferenceBuilder", "InferenceCoreBuilder",
    "InferenceCutlassBuilder", "QuantizerBuilder", "RaggedOpsBuilder", "RaggedUtilsBuilder", "RandomLTDBuilder",
    "SpatialInferenceBuilder", "StochasticTransformerBuilder", "TransformerBuilder",
    "UtilsBuilder",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    if name in _NOT_IMPLEMENTED:
        return import_module(f"{__name__}.builder").not_implemented(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_NOT_IMPLEMENTED})
