"""The only file that registers autograd hooks for gradients, and the phase every backward goes through.

    IDLE --engine.backward--> MANAGED --returns--> IDLE
    IDLE --first gradient or output hook of a plain loss.backward()--> RAW --autograd's end callback--> IDLE

A managed backward is opened and closed by the engine around ``loss.backward()``. A raw one is the user's own call:
the first hook that fires opens it and queues a callback that autograd runs when the whole graph is done. The hook on
the outputs of ``engine.forward`` fires in the outermost graph, so re-entrant checkpointing inside does not end the
backward early.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch.autograd.variable import Variable

from deepspeed.runtime.zero.local_grads import Reducer


class Phase(Enum):
    """Where a backward stands."""

    IDLE = "idle"
    MANAGED = "managed"
    RAW = "raw"


class BackwardWatch:
    """Follows backward passes over the parameters of ``reducer`` and tells it what happens.

    ``on_raw_begin`` is called when the user's own backward starts (it may raise), ``on_ending`` when autograd is done
    with any backward and its last gradients have not been sent, ``on_end`` when they have; ``should_reduce`` decides
    whether the backward that starts now sends gradients.
    """

    def __init__(
        self,
        reducer: Reducer,
        *,
        should_reduce: Callable[[], bool],
        on_raw_begin: Callable[[], None],
        on_ending: Callable[[], None],
        on_end: Callable[[], None],
        hook_parameters: bool,
    ) -> None:
        self.reducer = reducer
        self.phase = Phase.IDLE
        self.backwards = 0  # finished in this window
        self._should_reduce = should_reduce
        self._on_raw_begin = on_raw_begin
        self._on_ending = on_ending
        self._on_end = on_end
        self._lock = threading.Lock()  # CUDA backward runs hooks on autograd's device threads
        self._handles: list[Any] = []
        if hook_parameters:
            for number, group in enumerate(reducer.groups):
                for position, param in enumerate(group.params):
                    self._handles.append(
                        param.register_post_accumulate_grad_hook(self._gradient_hook(number, position))
                    )

    # ---- phases ----------------------------------------------------------------------------------------------------

    def begin_managed(self) -> None:
        """The engine is about to call ``loss.backward()``."""
        if self.phase is Phase.MANAGED:
            raise RuntimeError("engine.backward was called inside another engine.backward of the same engine")
        self._abandon_raw()
        self.phase = Phase.MANAGED
        self.reducer.begin_backward(reduce=self._should_reduce())

    def end_managed(self) -> None:
        self._end()

    def _end(self) -> None:
        self.phase = Phase.IDLE
        self.backwards += 1
        self._on_ending()
        self.reducer.end_backward()
        self._on_end()

    def abort(self) -> None:
        """Backward raised: close the phase, leave what has accumulated to the caller."""
        self.phase = Phase.IDLE
        self.reducer.active = False
        self._on_end()

    def _begin_raw(self) -> None:
        with self._lock:
            if self.phase is not Phase.IDLE:
                return
            self._on_raw_begin()
            self.phase = Phase.RAW
            self.reducer.begin_backward(reduce=self._should_reduce())
        Variable._execution_engine.queue_callback(self._end_raw)

    def _end_raw(self) -> None:
        if self.phase is Phase.RAW:
            self._end()

    def _abandon_raw(self) -> None:
        # A raw backward that raised never reaches its callback; its phase must not leak into the next one.
        if self.phase is Phase.RAW:
            self.phase = Phase.IDLE

    # ---- hooks -----------------------------------------------------------------------------------------------------

    def _gradient_hook(self, number: int, position: int) -> Callable[[torch.Tensor], None]:
        # Weak: the hook lives in C++ beside the parameter, where the garbage collector cannot see a cycle.
        reference = weakref.ref(self)

        def hook(_: torch.Tensor) -> None:
            watch = reference()
            if watch is None:
                return
            if watch.phase is Phase.IDLE:
                watch._begin_raw()
            watch.reducer.grad_ready(number, position)

        return hook

    def watch_outputs(self, outputs: object) -> None:
        """Notice a plain ``loss.backward()`` through these outputs as soon as it starts."""
        for tensor in tensors_with_graph(outputs):
            tensor.register_hook(_OutputHook(self))

    def new_window(self) -> None:
        self.backwards = 0
        if self.phase is Phase.RAW:
            self.phase = Phase.IDLE

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _OutputHook:
    """Opens a raw backward. Weak, as graphs may live on in C++ for a while, where no cycle is seen."""

    __slots__ = ("watch",)

    def __init__(self, watch: BackwardWatch) -> None:
        self.watch = weakref.ref(watch)

    def __call__(self, grad: torch.Tensor) -> None:
        watch = self.watch()
        if watch is not None and watch.phase is Phase.IDLE:
            watch._begin_raw()


def tensors_with_graph(value: object) -> Iterator[torch.Tensor]:
    """The tensors with a graph in ``value`` (nested dicts, lists and tuples of them)."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad and value.grad_fn is not None:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_with_graph(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_with_graph(item)
