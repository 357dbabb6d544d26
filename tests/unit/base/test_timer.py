"""Timers measure what lies between start and stop, on the host's clock or by device events."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.host_queue import HostEvent
from deepspeed.utils import timer as timer_module
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, trim_mean


class EventDevice(CPU_Accelerator):
    """Stands for a device that is timed by events; counts how often it is waited for."""

    waits = 0

    def use_host_timers(self) -> bool:
        return False

    @property
    def Event(self) -> Any:
        class Counting(HostEvent):
            def synchronize(self) -> None:
                EventDevice.waits += 1

        return Counting


@pytest.fixture(params=["host clock", "events"])
def timers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SynchronizedWallClockTimer:
    device = CPU_Accelerator() if request.param == "host clock" else EventDevice()
    monkeypatch.setattr(real_accelerator, "ds_accelerator", device)
    monkeypatch.setattr(EventDevice, "waits", 0)
    return SynchronizedWallClockTimer()


def interval(timers: SynchronizedWallClockTimer, name: str, seconds: float = 0.01) -> None:
    timers(name).start()
    time.sleep(seconds)
    timers(name).stop()


def test_elapsed_is_the_sum_of_intervals_in_milliseconds(timers: SynchronizedWallClockTimer) -> None:
    interval(timers, "a")
    interval(timers, "a")
    assert 20 <= timers("a").elapsed(reset=False) < 500
    assert timers("a").elapsed() >= 20
    assert timers("a").elapsed() == 0


def test_a_device_is_waited_for_only_when_the_timer_is_read(timers: SynchronizedWallClockTimer) -> None:
    interval(timers, "a")
    assert EventDevice.waits == 0
    timers("a").elapsed(reset=False)
    timers("a").mean()
    assert EventDevice.waits <= 1


def test_mean_leaves_out_extremes(timers: SynchronizedWallClockTimer) -> None:
    for _ in range(9):
        interval(timers, "a", 0.001)
    interval(timers, "a", 0.2)
    assert 1 <= timers("a").mean() < 21  # the mean of all would be above 20.9
    assert timers.get_mean(["a", "unknown"], normalizer=2.0)["a"] < 10.5
    assert timers("a").elapsed() == 0


def test_reading_a_running_timer_goes_on(timers: SynchronizedWallClockTimer) -> None:
    timers("a").start()
    time.sleep(0.01)
    assert timers("a").elapsed() >= 10
    time.sleep(0.01)
    timers("a").stop()
    assert 10 <= timers("a").elapsed() < 500


def test_stop_with_reset_keeps_the_last_interval_only(timers: SynchronizedWallClockTimer) -> None:
    interval(timers, "a", 0.05)
    timers("a").start()
    timers("a").stop(reset=True)
    assert timers("a").elapsed() < 50


def test_wrong_order_is_refused(timers: SynchronizedWallClockTimer) -> None:
    with pytest.raises(RuntimeError, match="timer 'a' is not running"):
        timers("a").stop()
    timers("a").start()
    with pytest.raises(RuntimeError, match="timer 'a' is running already"):
        timers("a").start()


def test_log_line(timers: SynchronizedWallClockTimer, capsys: pytest.CaptureFixture[str]) -> None:
    interval(timers, "fwd")
    timers.log(["fwd", "unknown"], memory_breakdown=True)
    out = capsys.readouterr().out
    assert out.startswith("[Rank -1] time (ms) | fwd: ")
    assert "unknown" not in out
    assert " | mem_allocated: " in out
    assert "max_cache_allocated: " in out
    timers.log(["unknown"])
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="`normalizer` must be positive"):
        timers.log(["fwd"], normalizer=0)


def test_noop_timer_has_the_same_methods() -> None:
    noop, real = NoopTimer(), SynchronizedWallClockTimer()
    for owner, twin in ((noop, real), (noop("x"), real("x"))):
        public = {name for name in dir(twin) if not name.startswith("_") and callable(getattr(twin, name))}
        assert public - {"Timer", "memory_usage"} <= set(dir(owner))
    noop("x").start()
    noop("x").stop(record=True)
    noop("x").reset()
    noop.log(["x"])
    assert noop("x").elapsed(reset=False) == noop("x").mean() == 0
    assert noop.get_mean(["x"]) == noop.get_timers() == {}


def test_trim_mean() -> None:
    assert trim_mean([100, 1, 2, 3, 4], 0.2) == 3.0
    assert trim_mean([1, 2], 0.0) == 1.5
    assert trim_mean([], 0.1) == 0
    with pytest.raises(ValueError, match=r"below 0\.5"):
        trim_mean([1], 0.5)


class Clock:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timer_module, "time", made)
    return made


def meter(**options: Any) -> tuple[ThroughputTimer, list[str]]:
    lines: list[str] = []
    config = SimpleNamespace(enabled=options.pop("enabled", True), synchronized=True)
    return ThroughputTimer(config, batch_size=8, logging_fn=lines.append, **options), lines


def micro_step(timer: ThroughputTimer, clock: Clock, seconds: float, last: bool) -> None:
    timer.start()
    clock.now += seconds
    timer.stop(global_step=last)


def test_samples_per_second_after_the_warm_up(clock: Clock) -> None:
    timer, lines = meter(start_step=2, steps_per_output=2)
    for step in range(6):
        # Two micro-steps a step; the two warm-up steps are slow and do not count.
        for micro in range(2):
            micro_step(timer, clock, 10.0 if step < 2 else 0.5, last=micro == 1)
        if step < 2:
            assert timer.avg_samples_per_sec() == float("-inf")
        else:
            assert timer.avg_samples_per_sec() == pytest.approx(8.0, rel=1e-5)
    assert timer.total_elapsed_time == pytest.approx(4.0)
    assert [line.split(",")[0] for line in lines] == [
        "epoch=0/micro_step=8/global_step=4",
        "epoch=0/micro_step=12/global_step=6",
    ]
    assert "RunningAvgSamplesPerSec=7.99" in lines[0]
    assert "CurrSamplesPerSec=7.99" in lines[0]


def test_an_open_step_does_not_spoil_the_average(clock: Clock) -> None:
    timer, _ = meter(start_step=0)
    micro_step(timer, clock, 1.0, last=True)
    micro_step(timer, clock, 50.0, last=False)
    assert timer.avg_samples_per_sec() == pytest.approx(8.0, rel=1e-5)


def test_report_can_be_withheld_and_epochs_count(clock: Clock) -> None:
    timer, lines = meter(start_step=0, steps_per_output=1, monitor_memory=True)
    timer.start()
    clock.now += 1
    timer.stop(global_step=True, report_speed=False)
    assert lines == []
    timer.update_epoch_count()
    micro_step(timer, clock, 1.0, last=True)
    assert lines[0].startswith("epoch=1/micro_step=1/global_step=2")
    assert "MemAllocated=" in lines[0]


def test_disabled_meter_measures_nothing(clock: Clock) -> None:
    timer, lines = meter(start_step=0, steps_per_output=1, enabled=False)
    micro_step(timer, clock, 1.0, last=True)
    assert (timer.global_step_count, lines) == (0, [])


def test_stop_without_start_is_no_step(clock: Clock) -> None:
    timer, _ = meter(start_step=0)
    timer.stop(global_step=True)
    assert timer.global_step_count == 0
