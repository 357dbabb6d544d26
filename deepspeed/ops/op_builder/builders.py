"""The builders of the ops that are there."""

from __future__ import annotations

from typing import Any

from deepspeed.ops.op_builder.builder import OpBuilder

__all__ = [
    "AsyncIOBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "FusedAdamBuilder",
    "PinMemoryBuilder",
]


class CPUAdamBuilder(OpBuilder):
    """`load()` has create_adam, adam_update, destroy_adam."""

    NAME = "cpu_adam"
    BUILD_VAR = "DS_BUILD_CPU_ADAM"

    def absolute_name(self) -> str:
        return "deepspeed.ops.adam.cpu_adam_op"

    def _functions(self) -> Any:
        from deepspeed.ops.op_builder import functions

        return functions.module("cpu_adam_op", functions.create_adam, functions.adam_update, functions.destroy_adam)


class CPUAdagradBuilder(OpBuilder):
    """`load()` has create_adagrad, adagrad_update, destroy_adagrad."""

    NAME = "cpu_adagrad"
    BUILD_VAR = "DS_BUILD_CPU_ADAGRAD"

    def absolute_name(self) -> str:
        return "deepspeed.ops.adagrad.cpu_adagrad_op"

    def _functions(self) -> Any:
        from deepspeed.ops.op_builder import functions

        return functions.module(
            "cpu_adagrad_op", functions.create_adagrad, functions.adagrad_update, functions.destroy_adagrad
        )


class CPULionBuilder(OpBuilder):
    """`load()` has create_lion, lion_update, destroy_lion."""

    NAME = "cpu_lion"
    BUILD_VAR = "DS_BUILD_CPU_LION"

    def absolute_name(self) -> str:
        return "deepspeed.ops.lion.cpu_lion_op"

    def _functions(self) -> Any:
        from deepspeed.ops.op_builder import functions

        return functions.module("cpu_lion_op", functions.create_lion, functions.lion_update, functions.destroy_lion)


class FusedAdamBuilder(OpBuilder):
    """`load()` has multi_tensor_adam."""

    NAME = "fused_adam"
    BUILD_VAR = "DS_BUILD_FUSED_ADAM"

    def absolute_name(self) -> str:
        return "deepspeed.ops.adam.fused_adam_op"

    def _functions(self) -> Any:
        from deepspeed.ops.op_builder import functions

        return functions.module("fused_adam_op", functions.multi_tensor_adam)


class AsyncIOBuilder(OpBuilder):
    """`load()` has aio_handle, aio_read, aio_write, deepspeed_memcpy."""

    NAME = "async_io"
    BUILD_VAR = "DS_BUILD_AIO"

    def absolute_name(self) -> str:
        return "deepspeed.ops.aio.async_io_op"

    def _functions(self) -> Any:
        from deepspeed.ops.aio.module import aio_module

        return aio_module()


class PinMemoryBuilder(OpBuilder):
    """`load()` has pin_handle."""

    NAME = "pin_memory"
    BUILD_VAR = "DS_BUILD_PIN_MEMORY"

    def absolute_name(self) -> str:
        return "deepspeed.ops.pin_memory_op"

    def _functions(self) -> Any:
        from deepspeed.ops.aio.module import pin_memory_module

        return pin_memory_module()
