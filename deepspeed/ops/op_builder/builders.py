"""The builders of the ops that are there."""

from __future__ import annotations

from typing import Any

from deepspeed.ops.op_builder.builder import OpBuilder

__all__ = [
    "AsyncIOBuilder",
    "CCLCommBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "FusedAdamBuilder",
    "PinMemoryBuilder",
    "ShareMemCommBuilder",
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


class ShareMemCommBuilder(OpBuilder):
    """`load()` has initialize, vector_kernel_level, and registers torch.ops.deepspeed.inference_all_reduce."""

    NAME = "deepspeed_shm_comm"
    BUILD_VAR = "DS_BUILD_SHM_COMM"

    def absolute_name(self) -> str:
        return "deepspeed.ops.comm.deepspeed_shm_comm_op"

    def _functions(self) -> Any:
        from deepspeed.ops.shm_comm import shm_comm_module

        return shm_comm_module()


class CCLCommBuilder(OpBuilder):
    """oneCCL carries nothing here: refused, with what to use instead."""

    NAME = "deepspeed_ccl_comm"
    BUILD_VAR = "DS_BUILD_CCL_COMM"
    _INSTEAD = (
        "collectives of CPU tensors go through shared memory inside a host and through gloo between hosts, without "
        "oneCCL: call deepspeed.init_distributed('gloo'). `ShareMemCommBuilder` has the sum for generation"
    )

    def absolute_name(self) -> str:
        return "deepspeed.ops.comm.deepspeed_ccl_comm_op"

    def sources(self) -> list[str]:
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        """False: there is nothing to load."""
        self.error_log = self._INSTEAD
        if verbose:
            print(f"{self.NAME}: {self._INSTEAD}")
        return False

    def load(self, verbose: bool = False) -> Any:
        """Raises ValueError that says what carries collectives here."""
        raise ValueError(f"CCLCommBuilder: {self._INSTEAD}")
