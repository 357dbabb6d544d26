"""`Channel`: the collectives of one group through shared memory, and `ShmWork`, the handle of one under way.

Owns: the calls into the native library (`native/csrc/transport*`) and what its answers mean. Does not own: which groups
have a channel (`same_host.py`), bounded waits and error texts (`pending.py`, `watch.py`).
A `ShmWork` waits and fails as a work of gloo does, so `Pending` takes it for one.

Invariant: tensors named in a call are kept alive until the library is done with them, whatever becomes of the handle.
Tensors are contiguous and on the host; nothing here checks that.
"""

from __future__ import annotations

import ctypes
import functools
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm.activity import format_ranks
from deepspeed.comm.host_work import HostWork
from deepspeed.native.build import load

__all__ = ["Channel", "ShmWork", "library"]

# The numbers are those of `Dtype` and `Fold` in transport_sums.h.
_DTYPES = {
    torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.int8: 4, torch.uint8: 5,
    torch.int16: 6, torch.int32: 7, torch.int64: 8,
}  # fmt: skip
_FOLDS: dict[Any, int] = {"sum": 0, "avg": 0, "product": 1, "min": 2, "max": 3}
for _number, _name in enumerate(("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")):
    _FOLDS[getattr(torch_dist.ReduceOp, _name)] = _number

# Most waits are over before this; only a longer one looks at clocks and limits.
_FIRST_US = 100_000

_DONE, _TIMED_OUT, _INTERRUPTED, _ENDED, _LEFT, _FAILED, _MISMATCH = range(7)
# The words "closed" and "timed out" are what `watch.py` looks for in the text of a backend.
_TEXTS = {
    _ENDED: "connection closed: the process of {rank} has ended",
    _LEFT: "connection closed: {rank} has left the group",
    _FAILED: "connection closed: {rank} has given up on this group",
    _MISMATCH: "{rank} has started another collective, or one of another size, as the same call",
}


@functools.cache
def library() -> Any:
    """The native library with its prototypes. Raises `NativeUnavailable`."""
    found = load("transport")
    pointer, integer, number, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
    prototypes: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "open": (pointer, (number, number, ctypes.c_uint64, integer)),
        "fd": (number, (pointer,)),
        "attach": (number, (pointer, number, number, ctypes.c_uint64, number, ctypes.c_uint64)),
        "close_fd": (None, (pointer,)),
        "leave": (None, (pointer,)),
        "abandon": (None, (pointer,)),
        "wait": (number, (pointer, integer, integer)),
        "finished": (integer, (pointer, number)),
        "background": (None, (pointer,)),
        "culprits": (ctypes.c_uint64, (pointer,)),
        "barrier": (integer, (pointer,)),
        "broadcast": (integer, (pointer, pointer, integer, number)),
        "all_gather": (integer, (pointer, pointer, pointer, integer, integer)),
        "all_to_all": (integer, (pointer, pointer, pointer, pointer)),
        "knows": (number, (number,)),
        "reduce_scatter": (integer, (pointer, pointer, pointer, integer, number, text)),
        "all_reduce": (integer, (pointer, pointer, integer, number, text)),
    }
    for name, (result, arguments) in prototypes.items():
        function = getattr(found, f"ds_shm_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def fold_of(op: Any) -> int | None:
    """The library's number of a reduction (a name of `collectives.all_reduce` or torch's); None: it has none."""
    number = _FOLDS.get(op)
    if number is None and isinstance(op, torch_dist.ReduceOp):  # one made by hand: equal, but another object
        number = next((number for known, number in _FOLDS.items() if op == known), None)
    return number


@functools.cache
def reduction_code(source: torch.dtype, result: torch.dtype, fold: int, accumulate: bool) -> int | None:
    """The library's number of a reduction of these dtypes; None: it has no kernel for it."""
    if source not in _DTYPES or result not in _DTYPES:
        return None
    code = _DTYPES[source] | _DTYPES[result] << 4 | fold << 8 | accumulate << 12
    return code if library().ds_shm_knows(code) else None


class ShmWork(HostWork):
    """A collective under way, with the methods of torch's `Work` that a caller may use."""

    __slots__ = ("_error", "_finished", "_waited_since", "channel", "number", "outputs")

    def __init__(self, channel: Channel, number: int, outputs: tuple[torch.Tensor, ...]) -> None:
        self.channel = channel
        self.number = number
        self.outputs: tuple[torch.Tensor, ...] | None = outputs
        self._finished = False
        self._waited_since = 0.0
        self._error: str | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the result is in place; RuntimeError after `timeout`, at the group's limit, or when it failed."""
        if self._finished:
            return True
        channel = self.channel
        if self._error is None and channel.wait_us(self.number, _FIRST_US) == _DONE:
            self._finished = True
            channel.let_go(self.number)
            return True
        limit_s = channel.timeout_s if timeout is None else min(timeout.total_seconds(), channel.timeout_s)
        while self._error is None:
            status = channel.wait_us(self.number, int(limit_s * 1e6))
            if status == _DONE:
                self._finished = True
                channel.let_go(self.number)
                return True
            if status == _INTERRUPTED:
                continue  # the interpreter handles the signal here
            if status != _TIMED_OUT:
                self._error = channel.describe(status)
                channel.abandon()
                break
            now = time.monotonic()
            self._waited_since = self._waited_since or now - limit_s
            if now - self._waited_since < channel.timeout_s:
                raise RuntimeError(f"timed out after {limit_s:g} s")
            self._error = f"timed out: {channel.describe(status)}"
            channel.abandon()
        raise RuntimeError(self._error)

    def fail(self, error: str) -> None:
        """It could not be started: `wait` says so."""
        self._error = error

    def is_done_within(self, limit_us: int) -> bool:
        """Wait so long; whether the result is in place. A failure is left for `wait` to tell."""
        if self._error is not None or self.channel.wait_us(self.number, limit_us) != _DONE:
            return False
        self._finished = True
        self.channel.let_go(self.number)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._finished or self._error is not None or self.channel.has_finished(self.number)


_GONE = "connection closed: this process has left the group, or was forked from one that is in it"


class _Gone:
    """Stands for the library where it must not be called any more."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(_GONE)


class Channel:
    """The shared memory of one group, seen by this rank. Every rank must make the same calls in the same order."""

    __slots__ = ("__weakref__", "_handle", "_held", "_lib", "rank", "ranks", "size", "timeout_s")

    def __init__(self, handle: int, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        """`handle`: an opened group to which all ranks are attached; `ranks`: their numbers in the job."""
        self._handle: int | None = handle
        self._lib = library()
        self._held: dict[int, tuple[torch.Tensor, ...]] = {}
        self.rank = rank
        self.size = len(ranks)
        self.ranks = list(ranks)
        self.timeout_s = timeout_s
        _channels.add(self)

    def all_reduce(self, tensor: torch.Tensor, code: int, factor: float | None = None) -> ShmWork:
        """Reduce in place. `code`: of `reduction_code`; the sum of floats is multiplied by `factor` in fp32."""
        scale = 1.0 if factor is None else factor
        number = self._lib.ds_shm_all_reduce(self._handle, tensor.data_ptr(), tensor.numel(), code, scale)
        return self._work(number, (tensor,))

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, code: int, factor: float | None = None
    ) -> ShmWork:
        """Reduce `input`; rank r keeps slice r. `output` may be this rank's slice of `input`."""
        scale = 1.0 if factor is None else factor
        number = self._lib.ds_shm_reduce_scatter(
            self._handle, input.data_ptr(), output.data_ptr(), output.numel(), code, scale
        )
        return self._work(number, (output, input))

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, stride_bytes: int | None = None) -> ShmWork:
        """Rank r's `input` lands `r * stride_bytes` (default: end to end) behind the start of `output`."""
        nbytes = input.nbytes
        stride = nbytes if stride_bytes is None else stride_bytes
        number = self._lib.ds_shm_all_gather(self._handle, input.data_ptr(), output.data_ptr(), nbytes, stride)
        return self._work(number, (output, input))

    def broadcast(self, tensor: torch.Tensor, root: int) -> ShmWork:
        """Copy the tensor of the rank `root` (counted inside the group) to all."""
        return self._work(self._lib.ds_shm_broadcast(self._handle, tensor.data_ptr(), tensor.nbytes, root), (tensor,))

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, receive_bytes: Sequence[int], send_bytes: Sequence[int]
    ) -> ShmWork:
        """Pieces of these bytes, end to end in `input` and `output`, in the order of the ranks."""
        sizes = (ctypes.c_int64 * (2 * self.size))(*send_bytes, *receive_bytes)
        number = self._lib.ds_shm_all_to_all(self._handle, input.data_ptr(), output.data_ptr(), sizes)
        return self._work(number, (output, input))

    def barrier(self) -> ShmWork:
        """Done when every rank has started it."""
        return self._work(self._lib.ds_shm_barrier(self._handle), ())

    def background(self) -> None:
        """Let what has been started go on while the program computes."""
        if self._handle is not None:
            self._lib.ds_shm_background(self._handle)

    def wait_us(self, number: int, limit_us: int) -> int:
        """Status of the operation after waiting at most so long."""
        if self._handle is None:
            return _LEFT
        status: int = self._lib.ds_shm_wait(self._handle, number, limit_us)
        return status

    def has_finished(self, number: int) -> bool:
        """Whether a wait would return at once."""
        if self._handle is None or self._lib.ds_shm_finished(self._handle, 1) >= number:
            return True
        return bool(self._lib.ds_shm_wait(self._handle, number, 0) != _TIMED_OUT)

    def describe(self, status: int) -> str:
        """The status in words, naming ranks by their numbers in the job."""
        if self._handle is None:
            return _GONE
        bits = self._lib.ds_shm_culprits(self._handle)
        culprits = format_ranks(sorted(rank for place, rank in enumerate(self.ranks) if bits >> place & 1))
        if status in _TEXTS:
            return _TEXTS[status].format(rank=culprits)
        if status == _TIMED_OUT:
            return f"nothing has come from {culprits}"
        return "this rank has given up on this group"

    def abandon(self) -> None:
        """Give up on the group: the others' waits end."""
        if self._handle is not None:
            self._lib.ds_shm_abandon(self._handle)
            self._held.clear()

    def let_go(self, number: int) -> None:
        """The library is done with the operation's tensors."""
        self._held.pop(number, None)

    def release_buffers(self) -> int:
        """Nothing is kept beside the blocks."""
        return 0

    def close(self) -> None:
        """Leave the group and unmap its memory. Idempotent."""
        handle, lib, held = self._handle, self._lib, self._held
        self._held = {}  # the library's thread may be writing to these until it has left
        self.forget()
        if handle is not None:
            lib.ds_shm_leave(handle)
        held.clear()

    def forget(self) -> None:
        """Use the group no more. In a forked child, which has no part in it, that is all that may be done."""
        self._handle, self._lib = None, _Gone()
        self._held.clear()

    def _work(self, number: int, tensors: tuple[torch.Tensor, ...]) -> ShmWork:
        if number < 0:  # the group is broken: as with gloo, the wait tells
            broken = ShmWork(self, 0, ())
            broken.fail(self.describe(-number))
            return broken
        if len(self._held) >= 64:  # handles nobody waits for
            finished = self._lib.ds_shm_finished(self._handle, 0)
            for done in [held for held in self._held if held <= finished]:
                del self._held[done]
        self._held[number] = tensors
        return ShmWork(self, number, tensors[:1])


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def forget_all() -> None:
    """In a forked child: see `Channel.forget`."""
    for channel in list(_channels):
        channel.forget()
