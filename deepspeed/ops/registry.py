"""The ops of this package: for each, how it can be done here, what that needs, and what is used in the end.

Owns: one table, `OPS`, and the choice of an implementation. Does not own: compiling (`native/build.py`), the kernels,
and the use of an op by its Python class, which asks for the same implementation on its own.
Invariants: implementations stand best first, the last one is torch and works everywhere the op does; all give the
numbers of `reference`. Asking never raises for what is merely missing: the answer is the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from deepspeed.comm import blockwise, blockwise_native
from deepspeed.native import build
from deepspeed.ops import multi_tensor

__all__ = ["OPS", "Implementation", "Op", "get_op"]


@dataclass(frozen=True)
class Implementation:
    """One way to do an op.

    name: what `ds_report` prints. where: "package.module:attribute", loaded at first use. library: the native library
    it needs, if any. problem: why it cannot be used on a device type, empty when it can.
    """

    name: str
    where: str
    library: str | None = None
    problem: Callable[[str], str] = lambda device: ""

    def why_not(self, op: str, device: str) -> str:
        """Empty when this implementation works here for tensors on `device`; builds its library if need be."""
        reason = self.problem(device)
        if reason or self.library is None:
            return reason
        try:
            reason = build.switched_off(op)
            if not reason:
                build.load(self.library)
        except (build.NativeUnavailable, ValueError) as problem:  # the latter: a DS_ISA that does not exist
            reason = str(problem)
        return reason

    def load(self) -> Any:
        module, _, attribute = self.where.partition(":")
        found = import_module(module)
        return getattr(found, attribute) if attribute else found


@dataclass(frozen=True)
class Op:
    """An op: its implementations, best first, and the plain torch code that says what it computes."""

    name: str
    what: str
    implementations: tuple[Implementation, ...]
    reference: str

    def candidates(self, device: str = "cpu") -> Iterator[tuple[Implementation, str]]:
        """Each implementation with the reason why it is not usable; empty where it is."""
        for implementation in self.implementations:
            yield implementation, implementation.why_not(self.name, device)

    def choose(self, device: str = "cpu") -> Implementation | None:
        """The best implementation that works here for tensors on `device`, or None."""
        return next((implementation for implementation, problem in self.candidates(device) if not problem), None)

    def load(self, device: str = "cpu") -> Any:
        """What the chosen implementation is: a class or a function.

        Raises:
            RuntimeError: none works; the text gives the reason of each.
        """
        problems = []
        for implementation, problem in self.candidates(device):
            if not problem:
                return implementation.load()
            problems.append(f"{implementation.name}: {problem}")
        raise RuntimeError(f"op {self.name!r} cannot be used on {device}: {'; '.join(problems)}")


def get_op(name: str) -> Op:
    """The op of that name.

    Raises:
        ValueError: there is none; the text lists those there are.
    """
    if name not in OPS:
        raise ValueError(f"op {name!r} is unknown; expected one of {', '.join(OPS)}")
    return OPS[name]


def _on_cpu(device: str) -> str:
    return "" if device == "cpu" else f"for tensors on the CPU, not on {device}"


@functools.cache
def _fused_problem(optimizer: str, device: str) -> str:
    """Why torch's fused optimizer does not work on the device, tried with one element."""
    import torch

    try:
        parameter = torch.ones(1, device=device, requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, optimizer)
        make([parameter], lr=0.1, fused=True).step()
    except (RuntimeError, TypeError, ValueError, AssertionError) as problem:  # the last: torch without CUDA
        return f"{type(problem).__name__}: {problem}".splitlines()[0]
    return ""


def _native(where: str) -> Implementation:
    return Implementation("native kernel", where, library="optimizers", problem=_on_cpu)


def _torch_fused(optimizer: str, where: str) -> Implementation:
    return Implementation(
        f"torch fused {optimizer}", where, problem=functools.partial(_fused_problem, optimizer)
    )


def _launched_once(op: str, where: str) -> Implementation:
    return Implementation(
        "Triton multi-tensor kernels", where, problem=functools.partial(multi_tensor.problem, op)
    )


def _op(name: str, what: str, reference: str, *implementations: Implementation) -> tuple[str, Op]:
    return name, Op(name, what, implementations, reference)


_CPU_ADAM, _FUSED_ADAM = "deepspeed.ops.adam:DeepSpeedCPUAdam", "deepspeed.ops.adam:FusedAdam"
_CPU_ADAGRAD = "deepspeed.ops.adagrad:DeepSpeedCPUAdagrad"
_CPU_LION, _FUSED_LION = "deepspeed.ops.lion:DeepSpeedCPULion", "deepspeed.ops.lion:FusedLion"
_FUSED_LAMB = "deepspeed.ops.lamb:FusedLamb"
_FOREACH = "torch foreach operations"

OPS: dict[str, Op] = dict(
    (
        _op(
            "cpu_adam", "Adam and AdamW in host memory", "deepspeed.ops.adam.adam_update:adam_update_pairs",
            _native(_CPU_ADAM), _torch_fused("AdamW", _CPU_ADAM),
        ),
        _op(
            "cpu_adagrad", "Adagrad in host memory", "deepspeed.ops.adagrad.cpu_adagrad:adagrad_update",
            _native(_CPU_ADAGRAD), _torch_fused("Adagrad", _CPU_ADAGRAD),
        ),
        _op(
            "cpu_lion", "Lion in host memory", "deepspeed.ops.lion.lion_update:lion_update_pairs",
            _native(_CPU_LION), Implementation(_FOREACH, _CPU_LION),
        ),
        _op(
            "fused_adam", "Adam and AdamW on the training device", "deepspeed.ops.adam.adam_update:adam_update_pairs",
            _native(_FUSED_ADAM), _launched_once("fused_adam", _FUSED_ADAM), _torch_fused("AdamW", _FUSED_ADAM),
        ),
        _op(
            "fused_lion", "Lion on the training device", "deepspeed.ops.lion.lion_update:lion_update_pairs",
            _native(_FUSED_LION), _launched_once("fused_lion", _FUSED_LION), Implementation(_FOREACH, _FUSED_LION),
        ),
        _op(
            "fused_lamb", "LAMB on the training device", "deepspeed.ops.lamb:FusedLamb",
            _launched_once("fused_lamb", _FUSED_LAMB), Implementation(_FOREACH, _FUSED_LAMB),
        ),
        _op(
            "async_io", "asynchronous reads and writes of files", "deepspeed.ops.aio.module:aio_module",
            Implementation("native library", "deepspeed.ops.aio.module:aio_module", library="aio"),
            Implementation("Python threads", "deepspeed.ops.aio.module:aio_module"),
        ),
        _op(
            "pin_memory", "page-locked host tensors", "deepspeed.ops.aio.module:pin_memory_module",
            Implementation("mapped host memory", "deepspeed.ops.aio.module:pin_memory_module"),
        ),
        _op(
            "deepspeed_shm_comm", "collectives between ranks of one host", "torch.distributed",
            Implementation("shared memory", "deepspeed.comm.same_host", library="transport"),
            Implementation("the process group's own", "torch.distributed"),
        ),
        _op(
            blockwise_native.OP, "int8 and int4 packing of what ZeRO++ sends", "deepspeed.comm.blockwise_torch",
            Implementation(
                "native kernel", "deepspeed.comm.blockwise_native", library=blockwise_native.LIBRARY, problem=_on_cpu
            ),
            Implementation("Triton kernels", "deepspeed.comm.blockwise_triton", problem=blockwise.triton_problem),
            Implementation("torch operations", "deepspeed.comm.blockwise_torch"),
        ),
        _op(
            "draws", "random initial values under zero.Init", "torch",
            Implementation("native kernel", "deepspeed.runtime.zero.init_draws:drawn", library="draws"),
            Implementation("torch's own", "torch"),
        ),
        _op(
            "crc32", "checksums of checkpoint files", "zlib:crc32",
            Implementation("native kernel", "deepspeed.utils.crc32:crc32", library="crc32"),
            Implementation("zlib", "zlib:crc32"),
        ),
    )
)  # fmt: skip
"""Name -> op."""
