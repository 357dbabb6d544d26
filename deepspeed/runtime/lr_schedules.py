"""Learning rate schedules: LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR.

Owns: the rate (and, for OneCycle, the momentum) of every parameter group as a function of the number of updates.
Does not own: when a step counts (the engine calls `step()` after each update that was not skipped), and torch's own
schedules, which `build_scheduler` makes by name.

Invariant: the rates in `optimizer.param_groups` are always those that `get_lr()` and `get_last_lr()` report. They are
written when a schedule is made, at each `step()` and when its state is loaded, so the first update already uses the
reported rate, also after a resume.

With i = `last_batch_iteration` (-1 before the first `step()`), update number k = 1, 2, ... uses i = max(0, k - 2) in
the warm-up schedules (so the first two updates have the rate at i = 0) and t = i + 1 = k - 1 in LRRangeTest and
OneCycle. These are the rates of the reference implementation at every update, with two exceptions, where what it uses
in update 1 is not what its formula says: its WarmupCosineLR starts at 0 whatever `warmup_min_ratio` is, and its
OneCycle starts with the lowest momentum instead of the highest. A schedule made at a later `last_batch_iteration` sets
that position's rate at once.

    LRRangeTest     min * (1 + rate * t / size), the quotient rounded down with `staircase`
    OneCycle        min -> max over `first_step_size` updates, back over `second_step_size`, then
                    min / (1 + decay_lr_rate * n / decay_step_size) for the n-th update after the cycle; betas[0] goes
                    the other way, betas[1] is 0.99
    WarmupLR        min + (max - min) * w, with w = ln(i + 1) / ln(N) ("log") or i / N ("linear") for i < N, then 1
    WarmupDecayLR   the same, then w = max(0, (T - i) / max(1, T - N))
    WarmupCosineLR  the group's rate times r: from `warmup_min_ratio` to 1 by w, then
                    c + (1 - c) / 2 * (1 + cos(pi * (i - N + 1) / (T - N))) with c = `cos_min_ratio`

Where a rate is not given, each group has its own: its `initial_lr` if it has one (as in torch), else its `lr`. A number
applies to all groups; a list gives one number per group.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch.optim import Optimizer

from deepspeed.runtime.config_problems import DeepSpeedConfigError, nearest, show
from deepspeed.runtime.lr_schedule_arguments import (
    COS_MIN_RATIO,
    CYCLE_FIRST_STAIR_COUNT,
    CYCLE_FIRST_STEP_SIZE,
    CYCLE_MAX_LR,
    CYCLE_MAX_MOM,
    CYCLE_MIN_LR,
    CYCLE_MIN_MOM,
    CYCLE_SECOND_STAIR_COUNT,
    CYCLE_SECOND_STEP_SIZE,
    DECAY_LR_RATE,
    DECAY_MOM_RATE,
    DECAY_STEP_SIZE,
    EDGE_VALUE,
    LR_RANGE_TEST,
    LR_RANGE_TEST_MIN_LR,
    LR_RANGE_TEST_STAIRCASE,
    LR_RANGE_TEST_STEP_RATE,
    LR_RANGE_TEST_STEP_SIZE,
    LR_SCHEDULE,
    MID_VALUE,
    ONE_CYCLE,
    TOTAL_NUM_STEPS,
    VALID_LR_SCHEDULES,
    WARMUP_COSINE_LR,
    WARMUP_DECAY_LR,
    WARMUP_LINEAR_RATE,
    WARMUP_LOG_RATE,
    WARMUP_LR,
    WARMUP_MAX_LR,
    WARMUP_MIN_LR,
    WARMUP_MIN_RATIO,
    WARMUP_NUM_STEPS,
    WARMUP_TYPE,
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_1cycle_params,
    override_lr_range_test_params,
    override_params,
    override_warmupCosineLR_params,
    override_warmupLR_params,
    parse_arguments,
)
from deepspeed.runtime.lr_schedule_base import PerGroup, Schedule, get_torch_optimizer, positive_int, update_lr, warn
from deepspeed.runtime.optimizer_config import SCHEDULER_PARAMS, SCHEDULER_REQUIRED, other_name

__all__ = [
    "LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "build_scheduler",
    "get_torch_optimizer", "update_lr",
    "add_tuning_arguments", "get_config_from_args", "get_lr_from_config", "override_1cycle_params",
    "override_lr_range_test_params", "override_params", "override_warmupCosineLR_params", "override_warmupLR_params",
    "parse_arguments",
    "COS_MIN_RATIO", "CYCLE_FIRST_STAIR_COUNT", "CYCLE_FIRST_STEP_SIZE", "CYCLE_MAX_LR", "CYCLE_MAX_MOM",
    "CYCLE_MIN_LR", "CYCLE_MIN_MOM", "CYCLE_SECOND_STAIR_COUNT", "CYCLE_SECOND_STEP_SIZE", "DECAY_LR_RATE",
    "DECAY_MOM_RATE", "DECAY_STEP_SIZE", "EDGE_VALUE", "LR_RANGE_TEST", "LR_RANGE_TEST_MIN_LR",
    "LR_RANGE_TEST_STAIRCASE", "LR_RANGE_TEST_STEP_RATE", "LR_RANGE_TEST_STEP_SIZE", "LR_SCHEDULE", "MID_VALUE",
    "ONE_CYCLE", "TOTAL_NUM_STEPS", "VALID_LR_SCHEDULES", "WARMUP_COSINE_LR", "WARMUP_DECAY_LR",
    "WARMUP_LINEAR_RATE", "WARMUP_LOG_RATE", "WARMUP_LR", "WARMUP_MAX_LR", "WARMUP_MIN_LR", "WARMUP_MIN_RATIO",
    "WARMUP_NUM_STEPS", "WARMUP_TYPE",
]

# betas[1] while OneCycle moves betas[0].
_CYCLE_BETA2 = 0.99
# A momentum of 1 or more never forgets; `decay_mom_rate` would get there in the end.
_LARGEST_MOMENTUM = 0.9999


class LRRangeTest(Schedule):
    """Rates that grow without end, to see where training breaks.

    Args:
        optimizer: optimizer, or wrapper of one.
        lr_range_test_min_lr: first rate; a number, or a list with one per group.
        lr_range_test_step_size: updates after which the rate has grown by `step_rate` times the first rate.
        lr_range_test_step_rate: growth.
        lr_range_test_staircase: grow once every `step_size` updates instead of at each.
        last_batch_iteration: position to start from.

    Raises:
        ValueError: a step size that is no positive integer; a list that does not match the groups.

    Source: L. Smith, "A disciplined approach to neural network hyper-parameters", 2018, section 4.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup | None = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.step_size = positive_int(LR_RANGE_TEST_STEP_SIZE, lr_range_test_step_size)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._given_min = lr_range_test_min_lr
        super().__init__(optimizer, last_batch_iteration)

    def _bind(self) -> None:
        self.min_lr = self._spread(LR_RANGE_TEST_MIN_LR, self._given_min)

    def get_lr(self) -> list[float]:
        intervals = (self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [lr * growth for lr in self.min_lr]

    def step(self, batch_iteration: int | None = None) -> None:
        """Go on by one update, or to position `batch_iteration`."""
        self._advance(batch_iteration)


class OneCycle(Schedule):
    """One rise and fall of the rate, momentum the other way, then a decay.

    Args:
        optimizer: optimizer, or wrapper of one.
        cycle_min_lr, cycle_max_lr: bounds of the cycle; numbers, or lists with one per group.
        decay_lr_rate: after the cycle, the rate is min / (1 + decay_lr_rate * n / decay_step_size).
        cycle_first_step_size: updates up, > 0.
        cycle_second_step_size: updates down, >= 0; None: as many as up.
        cycle_first_stair_count: stairs on the way up, 0 or less: none.
        cycle_second_stair_count: stairs on the way down; None: as many as up.
        decay_step_size: updates per unit of decay; 0: no decay.
        cycle_momentum: move betas[0] between the two bounds below (and hold betas[1] at 0.99); needs an optimizer with
            `betas`, otherwise it is turned off with a warning.
        cycle_min_mom, cycle_max_mom: bounds of the momentum; numbers, or lists with one per group.
        decay_mom_rate: after the cycle, momentum is max * (1 + decay_mom_rate * n / decay_step_size), below 1.
        last_batch_iteration: position to start from.

    Raises:
        ValueError: a step size out of range; a list that does not match the groups.

    Source: L. Smith, 2018, section 4 (1cycle).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        if cycle_first_step_size <= 0:
            raise ValueError(f"{CYCLE_FIRST_STEP_SIZE} must be positive, got {cycle_first_step_size}")
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if second < 0:
            raise ValueError(f"{CYCLE_SECOND_STEP_SIZE} must be 0 or more (or left out), got {second}")
        if decay_step_size < 0:
            raise ValueError(f"{DECAY_STEP_SIZE} must be 0 (no decay) or more, got {decay_step_size}")
        self.first_step_size, self.second_step_size = cycle_first_step_size, second
        self.total_size = cycle_first_step_size + second
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        if decay_step_size == 0 and (decay_lr_rate or decay_mom_rate):
            warn(f"OneCycle: {DECAY_STEP_SIZE} is 0, so {DECAY_LR_RATE} and {DECAY_MOM_RATE} have no effect")
        self.cycle_momentum = cycle_momentum
        self._given = (cycle_min_lr, cycle_max_lr, cycle_min_mom, cycle_max_mom)
        super().__init__(optimizer, last_batch_iteration)

    def _bind(self) -> None:
        min_lr, max_lr, min_mom, max_mom = self._given
        self.min_lrs = self._spread(CYCLE_MIN_LR, min_lr)
        self.max_lrs = self._spread(CYCLE_MAX_LR, max_lr)
        if self.cycle_momentum and not any("betas" in group for group in self.optimizer.param_groups):
            kind = type(self.optimizer).__name__
            warn(f"OneCycle: cycle_momentum is off, because no parameter group of {kind} has betas")
            self.cycle_momentum = False
        if self.cycle_momentum:
            self.min_moms = [(m, _CYCLE_BETA2) for m in self._spread(CYCLE_MIN_MOM, min_mom)]
            self.max_moms = [(m, _CYCLE_BETA2) for m in self._spread(CYCLE_MAX_MOM, max_mom)]

    def get_lr(self) -> list[float]:
        height = self._height()
        if height is None:
            return [lr / (1 + self.decay_lr_rate * self._decay_intervals()) for lr in self.min_lrs]
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """(betas[0], betas[1]) of each group at the current position; None when momentum does not cycle."""
        if not self.cycle_momentum:
            return None
        height = self._height()
        if height is None:
            growth = 1 + self.decay_mom_rate * self._decay_intervals()
            first = [high * growth for high, _ in self.max_moms]
        else:
            pairs = zip(self.min_moms, self.max_moms, strict=True)
            first = [high - (high - low) * height for (low, _), (high, _) in pairs]
        return [(min(m, _LARGEST_MOMENTUM), _CYCLE_BETA2) for m in first]

    def step(self, batch_iteration: int | None = None) -> None:
        """Go on by one update, or to position `batch_iteration`."""
        self._advance(batch_iteration)

    def _apply(self) -> None:
        super()._apply()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            if "betas" in group:
                group["betas"] = (*betas, *group["betas"][2:])

    def _height(self) -> float | None:
        """Place between the bounds, 0 to 1; None after the cycle."""
        t = self.last_batch_iteration + 1
        if t >= self.total_size:
            # The cycle ends at the bottom also when the way down takes no update.
            return 0.0 if t == self.total_size else None
        if t <= self.first_step_size:
            part, size, stairs = t, self.first_step_size, self.first_stair_count
        else:
            part, size, stairs = self.total_size - t, self.second_step_size, self.second_stair_count
        return math.floor(part * stairs / size) / stairs if stairs > 0 else part / size

    def _decay_intervals(self) -> float:
        past = self.last_batch_iteration + 1 - self.total_size
        return past / self.decay_step_size if self.decay_step_size else 0.0


class _Warmup(Schedule):
    """The rising part that the three warm-up schedules share."""

    def __init__(self, optimizer: Any, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int) -> None:
        # With 1 step ln(N) would be 0; the reference raises it in the same way.
        self.warmup_num_steps = max(2, positive_int(WARMUP_NUM_STEPS, warmup_num_steps))
        if warmup_type not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            warn(
                f"{type(self).__name__}: {WARMUP_TYPE} = {warmup_type!r} is not known; using {WARMUP_LOG_RATE!r} "
                f"(known: {WARMUP_LOG_RATE!r}, {WARMUP_LINEAR_RATE!r})"
            )
            warmup_type = WARMUP_LOG_RATE
        self.warmup_type = warmup_type
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)
        super().__init__(optimizer, last_batch_iteration)

    @property
    def _position(self) -> int:
        return max(0, self.last_batch_iteration)

    def _warm(self) -> float | None:
        """Place within the warm-up, 0 to 1; None after it."""
        i = self._position
        if i >= self.warmup_num_steps:
            return None
        if self.warmup_type == WARMUP_LINEAR_RATE:
            return i / self.warmup_num_steps
        return self.inverse_log_warm_up * math.log(i + 1)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one update, or to position `last_batch_iteration`."""
        self._advance(last_batch_iteration)


class WarmupLR(_Warmup):
    """Rise from `warmup_min_lr` to `warmup_max_lr`, then stay.

    Args:
        optimizer: optimizer, or wrapper of one.
        warmup_min_lr: first rate; a number, or a list with one per group.
        warmup_max_lr: last rate, likewise; None: each group's own.
        warmup_num_steps: updates of the rise, > 0 (1 counts as 2).
        warmup_type: "log" or "linear"; anything else is "log", with a warning.
        last_batch_iteration: position to start from.

    Raises:
        ValueError: a number of steps that is no positive integer; a list that does not match the groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self._given = (warmup_min_lr, warmup_max_lr)
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def _bind(self) -> None:
        min_lr, max_lr = self._given
        self.min_lrs = self._spread(WARMUP_MIN_LR, min_lr)
        self.max_lrs = self._spread(WARMUP_MAX_LR, max_lr)
        self.delta_lrs = [high - low for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_lr(self) -> list[float]:
        warm = self._warm()
        height = self._after_warmup() if warm is None else warm
        return [low + delta * height for low, delta in zip(self.min_lrs, self.delta_lrs, strict=True)]

    def _after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a straight line down to `warmup_min_lr` at `total_num_steps`.

    Args:
        optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration: as in `WarmupLR`.
        total_num_steps: update at which the line ends.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )
        _warn_if_too_short(self, total_num_steps)

    def _after_warmup(self) -> float:
        left = self.total_num_steps - self._position
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Multiples of each group's own rate: a rise to 1, then half a cosine down to `cos_min_ratio`.

    Args:
        optimizer: optimizer, or wrapper of one.
        total_num_steps: update at which the cosine ends.
        warmup_min_ratio: first multiple.
        warmup_num_steps: updates of the rise, > 0 (1 counts as 2).
        cos_min_ratio: last multiple.
        warmup_type: "log" or "linear".
        last_batch_iteration: position to start from.

    Raises:
        ValueError: a number of steps that is no positive integer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_if_too_short(self, total_num_steps)

    def _bind(self) -> None:
        self.org_lrs = list(self.base_lrs)

    def get_lr_ratio(self) -> float:
        """The multiple at the current position."""
        warm = self._warm()
        if warm is not None:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * warm
        length = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (self._position - self.warmup_num_steps + 1) / length)
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


def build_scheduler(name: str, params: dict[str, Any] | None, optimizer: Any) -> Any:
    """Make the schedule of a config.

    A default rate (WarmupDecayLR.warmup_max_lr, LRRangeTest.lr_range_test_min_lr: 0.001) does not override groups whose
    rates differ: unless the config names it, each of them keeps its own.

    Args:
        name: `scheduler.type`: one of `VALID_LR_SCHEDULES`, or the exact name of a class in torch.optim.lr_scheduler.
        params: `scheduler.params`; not modified.
        optimizer: optimizer, or wrapper of one.

    Raises:
        DeepSpeedConfigError: unknown type or parameter (with the nearest known name), a missing one, or a value that
            the class refuses; names the full key.
    """
    given = dict(params or {})
    cls = _schedule_class(name)
    inner = get_torch_optimizer(optimizer)
    known = SCHEDULER_PARAMS.get(name) or frozenset(list(inspect.signature(cls).parameters)[1:])
    _check_params(name, given, known)
    _keep_own_rates(name, given, inner)
    try:
        return cls(inner, **given)
    except (TypeError, ValueError, KeyError) as error:
        raise DeepSpeedConfigError(f"scheduler.params: {name} refused {given}: {error}") from error


# Parameters whose value is a word (the last three: of torch's schedules); any other text is a mistake.
_WORDS = (WARMUP_TYPE, "mode", "threshold_mode", "anneal_strategy")


def _schedule_class(name: str) -> Any:
    if name in VALID_LR_SCHEDULES:
        return globals()[name]
    schedulers = torch.optim.lr_scheduler
    bases = (schedulers.LRScheduler, schedulers.ReduceLROnPlateau)
    names = [n for n, c in vars(schedulers).items() if isinstance(c, type) and issubclass(c, bases)]
    names = [n for n in names if n != "LRScheduler" and not n.startswith("_")]
    if name in names:
        return getattr(schedulers, name)
    meant = nearest(name, [*VALID_LR_SCHEDULES, *names])
    hint = f"; did you mean {meant!r}?" if meant else ""
    raise DeepSpeedConfigError(
        f"scheduler.type: found {show(name)}, which is neither one of {', '.join(VALID_LR_SCHEDULES)} nor a class of "
        f"torch.optim.lr_scheduler{hint}"
    )


def _check_params(name: str, params: dict[str, Any], known: frozenset[str]) -> None:
    lines = []
    for key, value in params.items():
        if key not in known:
            meant = other_name(key, known) or nearest(key, known)
            hint = f"; did you mean `{meant}`?" if meant else ""
            takes = ", ".join(sorted(known))
            lines.append(
                f"scheduler.params.{key}: found {show(value)}, which {name} does not take{hint} It takes {takes}"
            )
        elif isinstance(value, str) and key not in _WORDS:
            lines.append(f"scheduler.params.{key}: found {show(value)}; expected a value that is not text")
    missing = [key for key in SCHEDULER_REQUIRED.get(name, ()) if params.get(key) is None]
    lines += [f"scheduler.params.{key}: missing; {name} needs it" for key in missing]
    if lines:
        raise DeepSpeedConfigError("\n".join(lines))


def _keep_own_rates(name: str, params: dict[str, Any], optimizer: Optimizer) -> None:
    key = {WARMUP_DECAY_LR: WARMUP_MAX_LR, LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR}.get(name)
    if key is None or key in params:
        return
    own = {float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups}
    if len(own) > 1:
        params[key] = None
    elif own != {0.001} and name == WARMUP_DECAY_LR:
        warn(
            f"scheduler.params.{key} is not set: {name} rises to its default of 0.001, not to the optimizer's rate "
            f"{own.pop()}; set it to the rate you want"
        )


def _warn_if_too_short(schedule: _Warmup, total_num_steps: int) -> None:
    if total_num_steps < schedule.warmup_num_steps:
        warn(
            f"{type(schedule).__name__}: {TOTAL_NUM_STEPS} {total_num_steps} is less than {WARMUP_NUM_STEPS} "
            f"{schedule.warmup_num_steps}: the rate never reaches its peak before the end"
        )
