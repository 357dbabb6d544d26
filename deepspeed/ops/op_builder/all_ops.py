"""`ALL_OPS`: name of an op -> an instance of its builder."""

from __future__ import annotations

from deepspeed.ops.op_builder import builders
from deepspeed.ops.op_builder.builder import NotImplementedBuilder, OpBuilder

__all__ = ["ALL_OPS", "accelerator_name", "op_builder_dir"]

accelerator_name = "cpu"
op_builder_dir = "deepspeed.ops.op_builder"

ALL_OPS: dict[str, OpBuilder] = {
    NotImplementedBuilder.NAME: NotImplementedBuilder(),
    **{made.NAME: made for made in (getattr(builders, name)() for name in builders.__all__)},
}
