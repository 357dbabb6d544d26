"""`optimizer.step()` and `optimizer.zero_grad()` called by the client, past `engine.step()`.

Lightning Fabric and plain PyTorch loops step the optimizer that ``deepspeed.initialize`` returned. The engine's window
of micro-steps holds for them too: before its end such a step is counted and nothing is updated, as by
``engine.step()``, and the ``zero_grad()`` that such loops call next to it keeps the gradients of the window. A client
may as well run all backward passes of a window and step once.

Owns: that decision, and the line that tells it. Does not own: the counters (``accumulation.py``), the update (the
optimizer). Invariant: without accumulation every step of the client's updates. A schedule is the client's to step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from deepspeed.utils.logging import log_dist

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


class ClientSteps:
    """The engine's view of calls on its optimizer."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._by_engine = False
        self._stepped_at = -1  # backward passes of the whole run at the client's last step
        self._told: set[str] = set()

    @contextlib.contextmanager
    def by_engine(self) -> Iterator[None]:
        """The step inside is the engine's own."""
        self._by_engine = True
        try:
            yield
        finally:
            self._by_engine = False

    def step(self, update: Callable[[], None]) -> None:
        """``optimizer.step()``: ``update`` at the end of a window, else only count the micro-step."""
        engine, accumulation = self._engine, self._engine.accumulation
        if self._by_engine or not accumulation.passes:
            update()
            return
        self._stepped_at = accumulation.all_passes
        if not accumulation.is_complete():
            accumulation.finish_micro_step()
            self._tell(
                f"optimizer.step() and zero_grad() inside a window of {accumulation.steps} micro-steps: the step is "
                "counted and nothing is updated before the last of them, as with engine.step(); its gradients are "
                "kept. For an update at every call set gradient_accumulation_steps to 1"
            )
            return
        update()
        accumulation.finish_window()
        engine.count_update()
        if engine.lr_scheduler is not None and engine.lr_scheduler is not engine.client_lr_scheduler:
            self._tell(
                "optimizer.step() does not step the schedule of the config, as engine.step() does: the learning rate "
                "stays what it is. Call scheduler.step() after every update, or engine.step() in place of both"
            )

    def already_stepped(self) -> bool:
        """Before ``engine.step()``: True when the client has stepped the optimizer since the last backward."""
        if self._stepped_at != self._engine.accumulation.all_passes:
            return False
        self._tell(
            "engine.step() after optimizer.step() without a backward between them: the micro-step has been counted "
            "already, and this call does nothing. Call one of the two"
        )
        return True

    def expect_steps(self) -> None:
        """At a backward: tell whoever waits for a boundary that only steps bring nearer."""
        accumulation = self._engine.accumulation
        accumulates = accumulation.steps > 1
        if accumulates and accumulation.micro_steps == 0 and accumulation.passes == 8 * accumulation.steps:
            self._tell(
                f"{accumulation.passes} backward passes and no step yet: micro-steps are counted by engine.step() (or "
                "optimizer.step()), which is called after every one of them; is_gradient_accumulation_boundary() does "
                "not become true before"
            )

    def keep_window(self) -> bool:
        """Before ``optimizer.zero_grad()`` drops gradients: True when it follows a step that only counted."""
        accumulation = self._engine.accumulation
        if not accumulation.passes:
            return False
        if self._stepped_at == accumulation.all_passes:  # no backward since: the zero_grad() beside that step
            return True
        if accumulation.in_window and accumulation.forced is None:
            self._tell(
                f"optimizer.zero_grad() inside a window of {accumulation.steps} micro-steps drops the gradients of its "
                "first ones. Leave it out: engine.step() clears them after the update"
            )
        accumulation.passes = 0
        return False

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            log_dist(line, [0], level=logging.WARNING)
