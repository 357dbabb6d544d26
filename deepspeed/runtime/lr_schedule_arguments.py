"""Names of the schedules and their parameters, and the command-line flags that set them.

Owns: the names, the flags and their defaults, and turning parsed flags into a `scheduler` block. Does not own: the
schedules (`lr_schedules.py`, which also exports everything here under its historical place).
Invariant: importing this module loads no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"

EDGE_VALUE = "edge_value"
MID_VALUE = "mid_value"

CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"

WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"

_RANGE_TEST = (LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE, LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE)
_ONE_CYCLE = (
    *(CYCLE_FIRST_STEP_SIZE, CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT),
    *(DECAY_STEP_SIZE, CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE, CYCLE_MIN_MOM, CYCLE_MAX_MOM, DECAY_MOM_RATE),
)
_WARMUP = (WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS, WARMUP_TYPE)
_WARMUP_COSINE = (WARMUP_NUM_STEPS, WARMUP_TYPE, WARMUP_MIN_RATIO, COS_MIN_RATIO)

# The parameter that says how high a schedule goes.
_PEAK = {
    LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR,
    ONE_CYCLE: CYCLE_MAX_LR,
    WARMUP_LR: WARMUP_MAX_LR,
    WARMUP_DECAY_LR: WARMUP_MAX_LR,
}

# flag -> (type, default, help)
_FLAGS: dict[str, tuple[type, Any, str]] = {
    LR_SCHEDULE: (str, None, f"schedule: {', '.join(VALID_LR_SCHEDULES)}"),
    LR_RANGE_TEST_MIN_LR: (float, 0.001, "LRRangeTest: first rate"),
    LR_RANGE_TEST_STEP_RATE: (float, 1.0, "LRRangeTest: growth per step size, in units of the first rate"),
    LR_RANGE_TEST_STEP_SIZE: (int, 1000, "LRRangeTest: updates per growth"),
    LR_RANGE_TEST_STAIRCASE: (bool, False, "LRRangeTest: grow in stairs"),
    CYCLE_FIRST_STEP_SIZE: (int, 1000, "OneCycle: updates from the lower to the upper rate"),
    CYCLE_FIRST_STAIR_COUNT: (int, -1, "OneCycle: stairs on the way up (0 or less: none)"),
    CYCLE_SECOND_STEP_SIZE: (int, -1, "OneCycle: updates back to the lower rate (-1: as many as up)"),
    CYCLE_SECOND_STAIR_COUNT: (int, -1, "OneCycle: stairs on the way down (0 or less: none)"),
    DECAY_STEP_SIZE: (int, 1000, "OneCycle: updates per decay after the cycle"),
    CYCLE_MIN_LR: (float, 0.01, "OneCycle: lower rate"),
    CYCLE_MAX_LR: (float, 0.1, "OneCycle: upper rate"),
    DECAY_LR_RATE: (float, 0.0, "OneCycle: decay of the rate after the cycle"),
    "cycle_momentum": (bool, False, "OneCycle: move the momentum against the rate"),
    CYCLE_MIN_MOM: (float, 0.8, "OneCycle: lower momentum"),
    CYCLE_MAX_MOM: (float, 0.9, "OneCycle: upper momentum"),
    DECAY_MOM_RATE: (float, 0.0, "OneCycle: growth of the momentum after the cycle"),
    WARMUP_MIN_LR: (float, 0, "WarmupLR: first rate"),
    WARMUP_MAX_LR: (float, 0.001, "WarmupLR: rate after the warm-up"),
    WARMUP_NUM_STEPS: (int, 1000, "warm-up schedules: updates of the warm-up"),
    WARMUP_TYPE: (str, WARMUP_LOG_RATE, "warm-up schedules: shape, log or linear"),
    WARMUP_MIN_RATIO: (float, 0.01, "WarmupCosineLR: first ratio"),
    COS_MIN_RATIO: (float, 0.01, "WarmupCosineLR: last ratio"),
}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of the schedules; returns the parser."""
    group = parser.add_argument_group("learning rate schedules")
    for name, (kind, default, text) in _FLAGS.items():
        if kind is bool:
            group.add_argument(f"--{name}", default=default, action="store_true", help=text)
        else:
            group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the flags of the schedules from the command line; returns them and the arguments that are none."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _override(names: tuple[str, ...], args: Any, params: dict[str, Any]) -> None:
    for name in names:
        value = getattr(args, name, None)
        if value is not None:
            params[name] = value


def override_lr_range_test_params(args: Any, params: dict[str, Any]) -> None:
    """Copy the flags of LRRangeTest that `args` has into `params`."""
    _override(_RANGE_TEST, args, params)


def override_1cycle_params(args: Any, params: dict[str, Any]) -> None:
    """Copy the flags of OneCycle that `args` has into `params`."""
    _override(_ONE_CYCLE, args, params)


def override_warmupLR_params(args: Any, params: dict[str, Any]) -> None:
    """Copy the flags of WarmupLR (and WarmupDecayLR) that `args` has into `params`."""
    _override(_WARMUP, args, params)


def override_warmupCosineLR_params(args: Any, params: dict[str, Any]) -> None:
    """Copy the flags of WarmupCosineLR that `args` has into `params`."""
    _override(_WARMUP_COSINE, args, params)


def override_params(args: Any, params: dict[str, Any]) -> None:
    """Copy the flags of all schedules that `args` has into `params`."""
    for names in (_RANGE_TEST, _ONE_CYCLE, _WARMUP, _WARMUP_COSINE):
        _override(names, args, params)


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """A `scheduler` block from parsed flags.

    Returns:
        (block, None), or (None, what is missing or wrong).
    """
    kind = getattr(args, LR_SCHEDULE, None)
    if kind is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    names = {
        LR_RANGE_TEST: _RANGE_TEST,
        ONE_CYCLE: _ONE_CYCLE,
        WARMUP_LR: _WARMUP,
        WARMUP_DECAY_LR: _WARMUP,
        WARMUP_COSINE_LR: _WARMUP_COSINE,
    }.get(kind)
    if names is None:
        return None, f"--{LR_SCHEDULE} {kind} is not a known schedule; expected one of {', '.join(VALID_LR_SCHEDULES)}"
    params: dict[str, Any] = {}
    _override(names, args, params)
    if params.get(CYCLE_SECOND_STEP_SIZE) == -1:
        # The default of the flag; OneCycle itself says "as many as up" by leaving the parameter out.
        del params[CYCLE_SECOND_STEP_SIZE]
    return {"type": kind, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """The highest rate (LRRangeTest: the first) a `scheduler` block names.

    Returns:
        (rate, ""), or (None, why there is none).
    """
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    kind, params = config["type"], config["params"]
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not a valid LR schedule; expected one of {', '.join(VALID_LR_SCHEDULES)}"
    peak = _PEAK.get(kind)
    if peak is None:
        return None, f"{kind} scales the optimizer's rate by a ratio; its params name no rate"
    if params.get(peak) is None:
        return None, f"params.{peak} not defined for {kind}; the optimizer's rate is used"
    return params[peak], ""
