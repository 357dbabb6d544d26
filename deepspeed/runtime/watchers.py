"""Callbacks every engine can have: progress line, wall-clock and memory breakdown, the garbage collector's switch.

Off costs nothing. What they print was asked for by a config key, so it does not pass the log level.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.callbacks import Callback
from deepspeed.utils.timer import BACKWARD_GLOBAL_TIMER, FORWARD_GLOBAL_TIMER, STEP_GLOBAL_TIMER

if TYPE_CHECKING:
    import torch

    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine


class ProgressLine(Callback):
    """Rank 0 prints step, skipped steps, rates and momentum every ``interval`` optimizer steps.

    ``throughput`` adds samples per second over all ranks since the last line; ``synchronized`` waits for the device.
    """

    name = "progress"

    def __init__(self, interval: int, *, throughput: bool = False, synchronized: bool = True) -> None:
        self.interval = interval
        self.throughput, self.synchronized = throughput, synchronized
        self.since: tuple[float, int] | None = None  # time and samples at the last line

    def on_step_end(self, engine: DeepSpeedEngine, applied: bool) -> None:
        if engine.global_steps % self.interval or dist.get_rank() != 0:
            return
        print(
            f"step={engine.global_steps}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, mom={engine.get_mom()}"
            + (self._rate(engine.global_samples) if self.throughput else ""),
            flush=True,
        )

    def _rate(self, samples: int) -> str:
        if self.synchronized:
            get_accelerator().synchronize()
        now, last = time.perf_counter(), self.since
        self.since = (now, samples)
        if last is None or samples < last[1]:  # a checkpoint was loaded
            return ""
        return f", samples/s={(samples - last[1]) / (now - last[0]):.2f}"


class WallClock(Callback):
    """Mean milliseconds of forward, backward and step between two reports; the device is synchronised at each edge.

    The timers are ``engine.timers``, under their historical names.
    """

    name = "wall_clock"
    PHASES = (("forward", FORWARD_GLOBAL_TIMER), ("backward", BACKWARD_GLOBAL_TIMER), ("step", STEP_GLOBAL_TIMER))

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.last: dict[str, float] = {}  # milliseconds per optimizer step, by timer, of the last report

    def _begin(self, engine: DeepSpeedEngine, timer: str) -> None:
        get_accelerator().synchronize()
        if engine.timers(timer).started_:  # its phase ended in an exception
            engine.timers(timer).cancel()
        engine.timers(timer).start()

    def _end(self, engine: DeepSpeedEngine, timer: str) -> None:
        get_accelerator().synchronize()
        if engine.timers(timer).started_:
            engine.timers(timer).stop()

    def on_forward_begin(self, engine: DeepSpeedEngine) -> None:
        self._begin(engine, FORWARD_GLOBAL_TIMER)

    def on_forward_end(self, engine: DeepSpeedEngine) -> None:
        self._end(engine, FORWARD_GLOBAL_TIMER)

    def on_backward_begin(self, engine: DeepSpeedEngine) -> None:
        self._begin(engine, BACKWARD_GLOBAL_TIMER)

    def on_backward_end(self, engine: DeepSpeedEngine, loss: torch.Tensor) -> None:
        self._end(engine, BACKWARD_GLOBAL_TIMER)

    def on_step_begin(self, engine: DeepSpeedEngine) -> None:
        self._begin(engine, STEP_GLOBAL_TIMER)

    def on_step_end(self, engine: DeepSpeedEngine, applied: bool) -> None:
        self._end(engine, STEP_GLOBAL_TIMER)
        if engine.global_steps % self.interval:
            return
        self.last = {timer: engine.timers(timer).elapsed(reset=True) / self.interval for _, timer in self.PHASES}
        if dist.get_rank() == 0:
            parts = " | ".join(f"{phase}: {self.last[timer]:.2f}" for phase, timer in self.PHASES)
            print(f"time (ms) per step | {parts}", flush=True)


class MemoryReport(Callback):
    """Rank 0 prints the accelerator's memory after every boundary."""

    name = "memory"

    def on_step_end(self, engine: DeepSpeedEngine, applied: bool) -> None:
        if dist.get_rank() == 0:
            accelerator = get_accelerator()
            now, peak = accelerator.memory_allocated(), accelerator.max_memory_allocated()
            print(
                f"memory after step {engine.global_steps}: {now / 1e6:.1f} MB now, {peak / 1e6:.1f} MB peak", flush=True
            )


class PythonGarbage(Callback):
    """``disable_python_gc``: no automatic cycle collection while such an engine lives; ``collect_python_gc`` does it.

    The collector is switched back on with the last of these engines, if this class is what switched it off.
    """

    name = "python_gc"
    _alive = 0
    _switched_off = False

    def __init__(self) -> None:
        self.alive = True
        cls = PythonGarbage
        if cls._alive == 0 and gc.isenabled():
            gc.disable()
            cls._switched_off = True
        cls._alive += 1

    def on_destroy(self, engine: DeepSpeedEngine | None) -> None:
        if not self.alive:
            return
        self.alive = False
        cls = PythonGarbage
        cls._alive -= 1
        if cls._alive == 0 and cls._switched_off:
            gc.enable()
            cls._switched_off = False

    def __del__(self) -> None:
        self.on_destroy(None)  # an engine dropped without destroy()


def default_callbacks(config: DeepSpeedConfig) -> list[Callback]:
    """The callbacks this config asks for."""
    chosen: list[Any] = []
    every = config.steps_per_print
    if every:
        timer = config.timers_config
        chosen.append(ProgressLine(every, throughput=timer.enabled, synchronized=timer.synchronized))
    if config.wall_clock_breakdown:
        chosen.append(WallClock(every or 1))
    if config.memory_breakdown:
        chosen.append(MemoryReport())
    if config.disable_python_gc:
        chosen.append(PythonGarbage())
    return chosen
