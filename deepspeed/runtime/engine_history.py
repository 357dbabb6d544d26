"""Historical attributes of the engine that are more than a setting: counters, timers, the optimizer clients assign.

Owns: the attributes below and what assigning them means. Does not own: the getters of the config
(``engine_accessors.py``), the loop (``engine.py``).
Invariant: who does not ask for a timer pays nothing for it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.callbacks import Callback
from deepspeed.runtime.watchers import WallClock
from deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer

if TYPE_CHECKING:
    from deepspeed.runtime.accumulation import GradAccumulation
    from deepspeed.runtime.callbacks import CallbackList
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

_DEPTH = 4  # wrappers around wrappers that are looked through


class NoMonitor:
    """The monitor of an engine without one: ``enabled`` is False, and each of the four kinds says so too."""

    enabled = False

    def __init__(self, kinds: bool = True) -> None:
        if kinds:
            self.tb_monitor = self.wandb_monitor = self.csv_monitor = self.comet_monitor = NoMonitor(kinds=False)

    def write_events(self, event_list: Sequence[tuple[str, Any, int]], flush: bool = True) -> None:
        """Write nothing: nobody has asked for a monitor. Events are ``(label, value, samples)``."""


_NO_MONITOR = NoMonitor()


class EngineHistory:
    """Mixed into ``DeepSpeedEngine``."""

    _config: DeepSpeedConfig
    accumulation: GradAccumulation
    callbacks: CallbackList
    module: nn.Module
    zero_optimizer: Any
    parameter_offload: Any
    _assigned: tuple[Any] | None = None  # what clients set `optimizer` to
    _compiled = False
    _window_mode: str | None

    # ---- optimizer -------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """The optimizer that clients see. Without one it is at stage 3 what they take the gathering hooks off by."""
        if self._assigned is not None:
            return self._assigned[0]
        return self.zero_optimizer if self.zero_optimizer is not None else self.parameter_offload

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        """Put a wrapper around the optimizer, take it off again, or set None to have no steps for a while.

        ``engine.step()`` then calls the wrapper's ``step()``. Raises TypeError for an object that does not lead to the
        engine's own optimizer: the gradients are in its shards, another optimizer would see none and change nothing.
        """
        own = self.zero_optimizer if self.zero_optimizer is not None else self.parameter_offload
        if value is own:
            self._assigned = None
        elif value is None or (self.zero_optimizer is not None and _leads_to(value, own, _DEPTH)):
            self._assigned = (value,)
        else:
            expected = "the engine's own optimizer, an object that holds it as an attribute, or None"
            raise TypeError(
                f"engine.optimizer = {type(value).__name__}: expected {expected}. The gradients of this engine are in "
                "its own optimizer; pass another one as optimizer= to deepspeed.initialize"
            )

    # ---- counters, places ------------------------------------------------------------------------------------------

    @property
    def holds_gradients(self) -> bool:
        """True from a backward until the optimizer step that uses it, or ``zero_grad()``."""
        return self._window_mode is not None

    @property
    def micro_steps(self) -> int:
        """Micro-steps so far: calls of ``step()``, at boundaries or not."""
        return self.accumulation.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        """Set the counter; ``value`` modulo the accumulation steps says where in its window the next micro-step is."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"engine.micro_steps = {value!r}: expected a count of micro-steps, 0 or more")
        self.accumulation.micro_steps, self.accumulation.origin = value, 0

    @property
    def local_rank(self) -> int:
        """Number of this process on its host, as the launcher says; 0 without a launcher."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    # ---- timers and monitors ---------------------------------------------------------------------------------------

    @functools.cached_property
    def timers(self) -> SynchronizedWallClockTimer:
        """Timers by name. ``wall_clock_breakdown`` runs "fwd", "bwd" and "step" here; other names are the caller's."""
        return SynchronizedWallClockTimer()

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds per step of "fwd", "bwd" and "step" in the last report of ``wall_clock_breakdown``.

        Empty without that setting and before the first report.
        """
        found = [item for item in self.callbacks.items if isinstance(item, WallClock)]
        return dict(found[0].last) if found else {}

    @functools.cached_property
    def tput_timer(self) -> ThroughputTimer:
        """Samples per second over all ranks, measured from the first time it is asked for."""
        settings = self._config.timers_config
        timer = ThroughputTimer(settings, self._config.train_batch_size or 1, steps_per_output=None)
        self.callbacks.add(_Throughput(timer))
        return timer

    @property
    def monitor(self) -> NoMonitor:
        """Where metrics go. No monitor can be switched on yet, so ``enabled`` is False and events go nowhere."""
        return _NO_MONITOR

    # ---- torch.compile ---------------------------------------------------------------------------------------------

    def compile(
        self,
        backend: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module in place with ``torch.compile(backend=backend, **compile_kwargs)``.

        Args:
            backend: a name or callable as torch takes it; default: the accelerator's ("inductor").
            compile_kwargs: further arguments of ``torch.compile``.
            schedule, compiled_autograd_enabled: graph passes by step, and a compiled backward, are DeepCompile's:
                refused with NotImplementedError.
        """
        if schedule is not None or compiled_autograd_enabled:
            asked = "schedule" if schedule is not None else "compiled_autograd_enabled"
            raise NotImplementedError(f"engine.compile({asked}=...): DeepCompile is not built yet; leave it out")
        options = dict(compile_kwargs or {})
        chosen = backend if backend is not None else options.pop("backend", get_accelerator().get_compile_backend())
        self.module.compile(**{**options, "backend": chosen})
        self._compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` has been called."""
        return self._compiled


class _Throughput(Callback):
    """Runs the throughput timer: a micro-step lasts from its forward to its backward, the last one to the update."""

    name = "throughput"

    def __init__(self, timer: ThroughputTimer) -> None:
        self.timer = timer

    def on_forward_begin(self, engine: DeepSpeedEngine) -> None:
        if engine.module.training and not self.timer.started:
            self.timer.start()

    def on_backward_end(self, engine: DeepSpeedEngine, loss: Any) -> None:
        if not engine.is_gradient_accumulation_boundary():
            self.timer.stop()

    def on_step_end(self, engine: DeepSpeedEngine, applied: bool) -> None:
        self.timer.batch_size = engine.train_batch_size()
        self.timer.stop(global_step=True)


def _leads_to(value: Any, own: Any, depth: int) -> bool:
    """Whether ``value`` is ``own`` or holds it, directly or through other wrappers."""
    if value is own:
        return True
    if depth == 0 or not hasattr(value, "__dict__"):
        return False
    return any(_leads_to(held, own, depth - 1) for name, held in vars(value).items() if "optim" in name or held is own)
