"""Named timers of training phases and the samples-per-second meter.

Owns: measuring and reporting. Does not own when a phase begins or ends (the engine says), nor how the device is timed
(the accelerator: the host's clock where calls are synchronous, device events otherwise, read only when asked so that a
running timer never stops the device).

All durations are milliseconds unless a name says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.utils.logging import logger, print_dist

__all__ = [
    "BACKWARD_GLOBAL_TIMER",
    "BACKWARD_INNER_GLOBAL_TIMER",
    "BACKWARD_INNER_MICRO_TIMER",
    "BACKWARD_MICRO_TIMER",
    "BACKWARD_REDUCE_GLOBAL_TIMER",
    "BACKWARD_REDUCE_MICRO_TIMER",
    "CudaEventTimer",
    "FORWARD_GLOBAL_TIMER",
    "FORWARD_MICRO_TIMER",
    "NoopTimer",
    "PSUTILS_INSTALLED",
    "STEP_GLOBAL_TIMER",
    "STEP_MICRO_TIMER",
    "SynchronizedWallClockTimer",
    "TIME_EPSILON",
    "ThroughputTimer",
    "trim_mean",
]

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"

TIME_EPSILON = 1e-6
"""Seconds added to a measured time before dividing by it."""

PSUTILS_INSTALLED = True
"""psutil is a dependency of this package."""

_GIB = 1024.0**3


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Mean of ``data`` without the share ``trim_percent`` of its elements at each end; 0 for no data.

    ``trim_percent`` is a fraction from 0 to below 0.5.
    """
    if not 0.0 <= trim_percent < 0.5:
        raise ValueError(f"trim_mean: `trim_percent` must be at least 0 and below 0.5, found {trim_percent}")
    if len(data) == 0:
        return 0.0
    cut = int(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut]
    return sum(kept) / len(kept)


class CudaEventTimer:
    """Time between two events of a device queue."""

    def __init__(self, start_event: Any, end_event: Any) -> None:
        self.start_event = start_event
        self.end_event = end_event

    def get_elapsed_msec(self) -> float:
        """Milliseconds between the events; waits until the device has passed the second one."""
        self.end_event.synchronize()
        return self.start_event.elapsed_time(self.end_event)


class _PhaseTimer:
    """One named timer: any number of start/stop pairs until it is reset."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._start: Any = None
        # Finished intervals: milliseconds, or event pairs not read yet.
        self._intervals: list[float | CudaEventTimer] = []

    def start(self) -> None:
        """Begin an interval. RuntimeError if one has begun."""
        if self.started_:
            raise RuntimeError(f"timer {self.name_!r} is running already; stop it before it is started again")
        accelerator = get_accelerator()
        if accelerator.use_host_timers():
            accelerator.synchronize()
            self._start = time.perf_counter()
        else:
            self._start = accelerator.Event(enable_timing=True)
            self._start.record()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the interval. RuntimeError if none has begun.

        Args:
            reset: forget the intervals before this one.
            record: accepted for old callers; every interval counts in `mean`.
        """
        if not self.started_:
            raise RuntimeError(f"timer {self.name_!r} is not running; start it before it is stopped")
        accelerator = get_accelerator()
        if reset:
            self._intervals.clear()
        if isinstance(self._start, float):
            accelerator.synchronize()
            self._intervals.append((time.perf_counter() - self._start) * 1000.0)
        else:
            end = accelerator.Event(enable_timing=True)
            end.record()
            self._intervals.append(CudaEventTimer(self._start, end))
        self._start = None
        self.started_ = False

    def _read(self) -> list[float]:
        durations = [
            interval.get_elapsed_msec() if isinstance(interval, CudaEventTimer) else interval
            for interval in self._intervals
        ]
        self._intervals[:] = durations
        return durations

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds of all intervals since the last reset; an interval under way is split here."""
        running = self.started_
        if running:
            self.stop()
        total = sum(self._read())
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Mean milliseconds of an interval, without the fastest and slowest tenth."""
        return trim_mean(self._read(), 0.1)

    def cancel(self) -> None:
        """Forget the interval under way; those that have ended stay."""
        self._start = None
        self.started_ = False

    def reset(self) -> None:
        """Forget all intervals, one under way included."""
        self._intervals.clear()
        self.cancel()


def _memory_text() -> str:
    accelerator = get_accelerator()
    figures = (
        ("mem_allocated", accelerator.memory_allocated()),
        ("max_mem_allocated", accelerator.max_memory_allocated()),
        ("cache_allocated", accelerator.memory_cached()),
        ("max_cache_allocated", accelerator.max_memory_cached()),
    )
    return "".join(f" | {label}: {nbytes / _GIB:.4f} GB" for label, nbytes in figures)


class SynchronizedWallClockTimer:
    """Named timers: ``timers("fwd").start()``."""

    Timer = _PhaseTimer

    def __init__(self) -> None:
        self.timers: dict[str, _PhaseTimer] = {}

    def __call__(self, name: str) -> _PhaseTimer:
        timer = self.timers.get(name)
        if timer is None:
            timer = self.timers[name] = _PhaseTimer(name)
        return timer

    def get_timers(self) -> dict[str, _PhaseTimer]:
        """All timers by name."""
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """Memory in use and held by the allocator, now and at most."""
        return _memory_text()

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print one line with the milliseconds of the named timers divided by ``normalizer``, on ``ranks`` (default 0).

        Unknown names are left out; nothing is printed when none is known. ``memory_breakdown`` adds `memory_usage`.
        """
        if normalizer <= 0.0:
            raise ValueError(f"timers.log: `normalizer` must be positive, found {normalizer}")
        known = [name for name in names if name in self.timers]
        if known:
            parts = [f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in known]
            memory = self.memory_usage() if memory_breakdown else ""
            print_dist("time (ms) | " + " | ".join(parts) + memory, ranks=[0] if ranks is None else ranks)

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Mean milliseconds of an interval of each known named timer, divided by ``normalizer``."""
        if normalizer <= 0.0:
            raise ValueError(f"timers.get_mean: `normalizer` must be positive, found {normalizer}")
        means = {}
        for name in names:
            if name in self.timers:
                means[name] = self.timers[name].mean() / normalizer
                if reset:
                    self.timers[name].reset()
        return means


class NoopTimer:
    """Has the methods of `SynchronizedWallClockTimer` and measures nothing."""

    class Timer:
        """One timer that measures nothing."""

        def start(self) -> None:
            """Do nothing."""

        def stop(self, **kwargs: Any) -> None:
            """Do nothing."""

        def cancel(self) -> None:
            """Do nothing."""

        def reset(self) -> None:
            """Do nothing."""

        def elapsed(self, **kwargs: Any) -> float:
            """0."""
            return 0.0

        def mean(self) -> float:
            """0."""
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        """No timers."""
        return {}

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print nothing."""

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """No means."""
        return {}


class ThroughputConfig(Protocol):
    """What `ThroughputTimer` reads of the config section ``timers.throughput``."""

    enabled: bool
    synchronized: bool


class ThroughputTimer:
    """Samples per second from the global step ``start_step`` on.

    One `start`/`stop` pair a micro-step; ``stop(global_step=True)`` at the last one of a step. A report line is due at
    each ``steps_per_output``-th step (None: never).

    Args:
        config: object with ``enabled`` and ``synchronized`` (wait for the device at start and stop).
        batch_size: samples of one global step over all ranks.
        start_step: first global step that is measured; earlier ones warm up.
        steps_per_output: global steps between report lines.
        monitor_memory: add memory figures to the report line.
        logging_fn: takes the report line; default: the package's logger at level INFO.
    """

    def __init__(
        self,
        config: ThroughputConfig,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = max(1, batch_size)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or logger.info
        self.started = False
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0  # seconds, measured steps
        self.step_elapsed_time = 0.0  # seconds, of the global step under way
        self._measured_steps = 0
        self._finished_time = 0.0  # seconds, of measured steps that have ended
        self._start_time = 0.0

    def _now(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()

    def update_epoch_count(self) -> None:
        """A new epoch begins: its micro-steps count from 0."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A micro-step begins."""
        if not self.config.enabled:
            return
        self.started = True
        if self.global_step_count >= self.start_step:
            self._start_time = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-step ends; ``global_step`` says that the optimizer step ends with it."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        measured = self.global_step_count >= self.start_step
        if global_step:
            self.global_step_count += 1
        if not measured:
            return
        duration = self._now() - self._start_time
        self.total_elapsed_time += duration
        self.step_elapsed_time += duration
        if global_step:
            self._measured_steps += 1
            self._finished_time += self.step_elapsed_time
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                self.logging(self._report())
            self.step_elapsed_time = 0.0

    def _report(self) -> str:
        text = (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
            f"CurrSamplesPerSec={self.batch_size / (self.step_elapsed_time + TIME_EPSILON)}"
        )
        if not self.monitor_memory:
            return text
        accelerator = get_accelerator()
        return (
            f"{text}, MemAllocated={accelerator.memory_allocated() / _GIB:.2f}GB, "
            f"MaxMemAllocated={accelerator.max_memory_allocated() / _GIB:.2f}GB"
        )

    def avg_samples_per_sec(self) -> float:
        """Samples per second over all measured steps; minus infinity before the first one has ended."""
        if self._measured_steps == 0:
            return float("-inf")
        return self.batch_size * self._measured_steps / (self._finished_time + TIME_EPSILON)
