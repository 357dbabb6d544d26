"""Micro-steps and boundaries: when a window of accumulated gradients is complete. Counters only, no tensors.

A *window* is ``steps`` micro-steps; the last one is the boundary, where gradients are reduced and the optimizer
steps. ``micro_steps`` counts over the whole run, so a window may straddle an epoch. Windows are counted from
``origin``, which moves when their length changes: the first window of the new length is a whole one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class GradAccumulation:
    """``steps`` micro-steps per window. ``managed`` False: the caller scales losses, every ``step()`` is a boundary."""

    steps: int
    managed: bool = True
    micro_steps: int = 0
    passes: int = 0  # backward passes in the present window
    all_passes: int = 0  # of the whole run
    origin: int = 0  # micro_steps at the start of some window of the present length
    forced: bool | None = None  # set_gradient_accumulation_boundary
    in_no_sync: bool = False

    def is_boundary(self) -> bool:
        """True when the micro-step in progress ends its window."""
        if self.forced is not None:
            return self.forced
        if not self.managed:
            return True
        return (self.in_window + 1) % self.steps == 0

    def is_complete(self) -> bool:
        """True when the window may be stepped on: at its boundary, or with a backward pass for each micro-step."""
        if self.forced is not None:
            return self.forced
        return self.is_boundary() or self.passes >= self.steps

    def begin_pass(self) -> None:
        """A backward pass has been started."""
        self.passes += 1
        self.all_passes += 1

    def force(self, is_boundary: bool | None) -> None:
        self.forced = is_boundary

    @property
    def loss_divisor(self) -> int:
        """What a managed backward divides the loss by."""
        return self.steps if self.managed else 1

    @property
    def in_window(self) -> int:
        """Micro-steps done in the present window."""
        return (self.micro_steps - self.origin) % self.steps

    def change_steps(self, steps: int) -> None:
        """Windows of ``steps`` from now on. What the present one holds already counts as its first micro-steps."""
        self.origin = self.micro_steps - self.in_window
        self.steps = steps

    def begin_window_at(self, micro_steps: int) -> None:
        """Set the counter, for example from a checkpoint; the next micro-step is the first of a window."""
        self.micro_steps = self.origin = micro_steps
        self.passes = 0

    def finish_micro_step(self) -> None:
        """After ``step()``. A boundary set by hand ends its window wherever it stands, and the next one begins."""
        if self.is_boundary():
            self.passes = 0
        self.micro_steps += 1
        if self.forced:
            self.origin = self.micro_steps

    def finish_window(self) -> None:
        """After an update wherever the counter stands: micro-steps that were not counted one by one are counted."""
        if self.managed and not self.forced:
            self.micro_steps += self.steps - 1 - self.in_window
        self.passes = 0
        self.finish_micro_step()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep their gradients local. Raises RuntimeError when entered twice."""
        if self.in_no_sync:
            raise RuntimeError("engine.no_sync() is already active; leave it before entering it again")
        self.in_no_sync = True
        try:
            yield
        finally:
            self.in_no_sync = False
