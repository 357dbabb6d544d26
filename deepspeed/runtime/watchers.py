"""Callbacks every engine can have: the progress line and the wall-clock breakdown. Off costs nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.callbacks import Callback
from deepspeed.utils.logging import logger

if TYPE_CHECKING:
    import torch

    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine


class ProgressLine(Callback):
    """Rank 0 prints step, skipped steps, rates and momentum every ``interval`` optimizer steps."""

    name = "progress"

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def on_step_end(self, engine: DeepSpeedEngine, applied: bool) -> None:
        if engine.global_steps % self.interval or dist.get_rank() != 0:
            return
        print(
            f"step={engine.global_steps}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, mom={engine.get_mom()}",
            flush=True,
        )


class WallClock(Callback):
    """Mean milliseconds of forward, backward and step between two reports; the device is synchronised at each edge."""

    name = "wall_clock"
    PHASES = ("forward", "backward", "step")

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.totals = dict.fromkeys(self.PHASES, 0.0)
        self.started: dict[str, float] = {}
        self.last: dict[str, float] = {}  # milliseconds per optimizer step, of the last report

    def _begin(self, phase: str) -> None:
        get_accelerator().synchronize()
        self.started[phase] = time.perf_counter()

    def _end(self, phase: str) -> None:
        get_accelerator().synchronize()
        if phase in self.started:
            self.totals[phase] += time.perf_counter() - self.started.pop(phase)

    def on_forward_begin(self, engine: DeepSpeedEngine) -> None:
        self._begin("forward")

    def on_forward_end(self, engine: DeepSpeedEngine) -> None:
        self._end("forward")

    def on_backward_begin(self, engine: DeepSpeedEngine) -> None:
        self._begin("backward")

    def on_backward_end(self, engine: DeepSpeedEngine, loss: torch.Tensor) -> None:
        self._end("backward")

    def on_step_begin(self, engine: DeepSpeedEngine) -> None:
        self._begin("step")

    def on_step_end(self, engine: DeepSpeedEngine, applied: bool) -> None:
        self._end("step")
        if engine.global_steps % self.interval:
            return
        self.last = {phase: 1e3 * seconds / self.interval for phase, seconds in self.totals.items()}
        self.totals = dict.fromkeys(self.PHASES, 0.0)
        if dist.get_rank() == 0:
            logger.info("time (ms) per step | " + " | ".join(f"{phase}: {ms:.2f}" for phase, ms in self.last.items()))


class MemoryReport(Callback):
    """Rank 0 logs device memory after every boundary."""

    name = "memory"

    def on_step_end(self, engine: DeepSpeedEngine, applied: bool) -> None:
        if dist.get_rank() == 0:
            accelerator = get_accelerator()
            now, peak = accelerator.memory_allocated(), accelerator.max_memory_allocated()
            logger.info(f"memory after step {engine.global_steps}: {now / 1e6:.1f} MB now, {peak / 1e6:.1f} MB peak")


def default_callbacks(config: DeepSpeedConfig) -> list[Callback]:
    """The callbacks this config asks for."""
    chosen: list[Any] = []
    every = config.steps_per_print
    if every:
        chosen.append(ProgressLine(every))
    if config.wall_clock_breakdown:
        chosen.append(WallClock(every or 1))
    if config.memory_breakdown:
        chosen.append(MemoryReport())
    return chosen
