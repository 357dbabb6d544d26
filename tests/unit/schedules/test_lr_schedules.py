"""The schedules: values, the rate used is the rate reported, groups keep their own rates, resume."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config_problems import DeepSpeedConfigError
from deepspeed.runtime.lr_schedules import (
    VALID_LR_SCHEDULES,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
    get_torch_optimizer,
    update_lr,
)

# Schedule, arguments, rate of a group with lr 0.1 in updates 1, 2, ...: recorded from DeepSpeed 0.19.8.
RECORDED: tuple[tuple[str, dict[str, Any], tuple[float, ...]], ...] = (
    (
        "WarmupLR",
        {"warmup_num_steps": 5},
        (0.0, 0.0, 0.0430676558073, 0.0682606194486, 0.0861353116147, 0.1, 0.1, 0.1),
    ),
    (
        "WarmupLR",
        {"warmup_num_steps": 5, "warmup_type": "linear", "warmup_min_lr": 0.05, "warmup_max_lr": 0.2},
        (0.05, 0.05, 0.08, 0.11, 0.14, 0.17, 0.2, 0.2),
    ),
    ("WarmupLR", {"warmup_num_steps": 1}, (0.0, 0.0, 0.1, 0.1, 0.1)),
    (
        "WarmupDecayLR",
        {"total_num_steps": 9, "warmup_num_steps": 4},
        (0.0, 0.0, 0.0005, 0.000792481250361, 0.001, 0.001, 0.0008, 0.0006, 0.0004, 0.0002, 0.0, 0.0),
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 3, "warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_lr": 0.0005},
        (0.0005, 0.0005, 0.000625, 0.00075, 0.000875, 0.0005, 0.0005),
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 9, "warmup_num_steps": 4},
        (
            *(0.0, 0.0, 0.05, 0.0792481250361, 0.1, 0.0904518046338, 0.0654543046338, 0.0345556953662),
            *(0.00955819536622, 1e-05, 1e-05, 1e-05),
        ),
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_type": "linear", "cos_min_ratio": 0.2},
        (
            *(0.0, 0.0, 0.0333333333333, 0.0666666666667, 0.0946410161514, 0.08, 0.06, 0.04, 0.0253589838486),
            *(0.02, 0.02, 0.02),
        ),
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 3, "warmup_num_steps": 5},
        (0.0, 0.0, 0.0430676558073, 0.0682606194486, 0.0861353116147, 0.1, 1e-05, 1e-05),
    ),
    (
        "LRRangeTest",
        {"lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0, "lr_range_test_min_lr": 0.001},
        (0.001, 0.00166666666667, 0.00233333333333, 0.003, 0.00366666666667, 0.00433333333333, 0.005),
    ),
    (
        "LRRangeTest",
        {"lr_range_test_step_size": 3, "lr_range_test_staircase": True, "lr_range_test_min_lr": 0.01},
        (0.01, 0.01, 0.01, 0.02, 0.02, 0.02, 0.03, 0.03, 0.03, 0.04),
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.1, "cycle_max_lr": 1.1, "cycle_first_step_size": 4},
        (0.1, 0.35, 0.6, 0.85, 1.1, 0.85, 0.6, 0.35, 0.1, 0.1, 0.1),
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.1,
            "cycle_first_step_size": 3,
            "cycle_second_step_size": 4,
            "decay_lr_rate": 0.5,
            "decay_step_size": 2,
        },
        (
            *(0.1, 0.433333333333, 0.766666666667, 1.1, 0.85, 0.6, 0.35, 0.1),
            *(0.08, 0.0666666666667, 0.0571428571429, 0.05),
        ),
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.1,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 5,
            "cycle_first_stair_count": 2,
            "cycle_second_stair_count": 3,
        },
        (0.1, 0.1, 0.6, 0.6, 1.1, 0.766666666667, 0.433333333333, 0.433333333333, 0.1, 0.1),
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.1, "cycle_max_lr": 1.1, "cycle_first_step_size": 2, "cycle_second_step_size": 0},
        (0.1, 0.6, 0.1, 0.1, 0.1),
    ),
)

PER_GROUP: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 3},
    "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 9},
    "LRRangeTest": {"lr_range_test_step_size": 2},
    "OneCycle": {"cycle_min_lr": [0.01, 0.0001], "cycle_max_lr": [0.1, 0.001], "cycle_first_step_size": 3},
}
"""Arguments under which two groups of rates 0.1 and 0.001 keep a ratio of 100."""


def optimizer_with(*rates: float, cls: type = torch.optim.Adam, **kw: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in rates]
    return cls(groups, lr=0.5, **kw)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def make(name: str, optimizer: torch.optim.Optimizer, **kw: Any) -> Any:
    return getattr(lr_schedules, name)(optimizer, **kw)


@pytest.mark.parametrize(("name", "kw", "expected"), RECORDED)
def test_rate_of_every_update(name: str, kw: dict[str, Any], expected: tuple[float, ...]) -> None:
    optimizer = optimizer_with(0.1)
    schedule = make(name, optimizer, **kw)
    used = []
    for _ in expected:
        used.append(rates(optimizer)[0])
        schedule.step()
    assert used == pytest.approx(expected, rel=1e-10, abs=1e-15)  # recorded with 12 digits


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
@pytest.mark.parametrize("start", (-1, 4))
def test_the_rate_in_the_groups_is_the_rate_reported_from_the_first_update(name: str, start: int) -> None:
    optimizer = optimizer_with(0.1, 0.001)
    schedule = make(name, optimizer, last_batch_iteration=start, **PER_GROUP[name])
    for _ in range(12):
        assert rates(optimizer) == schedule.get_lr() == schedule.get_last_lr()
        schedule.step()


def test_exceptions_from_the_reference_in_the_first_update() -> None:
    optimizer = optimizer_with(0.1)
    WarmupCosineLR(optimizer, total_num_steps=10, warmup_min_ratio=0.2, warmup_num_steps=4)
    assert rates(optimizer) == [pytest.approx(0.02)]
    optimizer = optimizer_with(0.1)
    OneCycle(optimizer, 0.1, 1.0)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
@pytest.mark.parametrize("resume_at", (0, 2, 7))
def test_groups_keep_the_ratio_of_their_rates_also_after_resume(name: str, resume_at: int) -> None:
    unbroken = optimizer_with(0.1, 0.001)
    schedule = build_scheduler(name, PER_GROUP[name], unbroken)
    seen, saved = [], None
    for k in range(10):
        if k == resume_at:
            saved = copy.deepcopy((unbroken.state_dict(), schedule.state_dict()))
        seen.append(rates(unbroken))
        schedule.step()
    for first, second in seen:
        assert first == pytest.approx(100 * second, rel=1e-12)
    assert any(first > 0 for first, _ in seen)

    assert saved is not None
    for order in ("optimizer first", "schedule first"):
        resumed = optimizer_with(0.1, 0.001)
        again = build_scheduler(name, PER_GROUP[name], resumed)
        if order == "optimizer first":
            resumed.load_state_dict(copy.deepcopy(saved[0]))
            again.load_state_dict(saved[1])
        else:
            again.load_state_dict(saved[1])
            resumed.load_state_dict(copy.deepcopy(saved[0]))
        for k in range(resume_at, 10):
            assert rates(resumed) == seen[k]
            again.step()


def test_a_schedule_made_after_loading_the_optimizer_starts_from_the_original_rates() -> None:
    old = optimizer_with(0.1, 0.001)
    schedule = WarmupCosineLR(old, total_num_steps=6, warmup_num_steps=2)
    for _ in range(5):
        schedule.step()
    new = optimizer_with(0.1, 0.001)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    again = WarmupCosineLR(new, total_num_steps=6, warmup_num_steps=2)
    again.load_state_dict(schedule.state_dict())
    assert rates(new) == rates(old)
    assert again.org_lrs == [0.1, 0.001]


def test_state_is_the_position_alone() -> None:
    schedule = WarmupLR(optimizer_with(0.1), warmup_num_steps=3)
    schedule.step()
    schedule.step()
    assert schedule.state_dict() == {"last_batch_iteration": 1}
    schedule.step(7)
    assert schedule.state_dict() == {"last_batch_iteration": 7}


LISTS: tuple[tuple[str, dict[str, Any], list[float], list[float]], ...] = (
    ("WarmupLR", {"warmup_min_lr": [0.1, 0.2], "warmup_max_lr": [1.0, 2.0], "warmup_num_steps": 2}, [0.1, 0.2], [1, 2]),
    (
        "WarmupDecayLR",
        {"warmup_max_lr": [1.0, 2.0], "warmup_num_steps": 2, "total_num_steps": 3},
        [0, 0],
        [1, 2],
    ),
    ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 2}, [0.1, 0.2], [0.2, 0.4]),
    (
        "OneCycle",
        {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": [1.0, 2.0], "cycle_first_step_size": 2},
        [0.1, 0.2],
        [1, 2],
    ),
)


@pytest.mark.parametrize(("name", "kw", "first", "third"), LISTS)
def test_lists_give_each_group_its_own_values(
    name: str, kw: dict[str, Any], first: list[float], third: list[float]
) -> None:
    optimizer = optimizer_with(0.1, 0.001)
    schedule = make(name, optimizer, **kw)
    assert rates(optimizer) == pytest.approx(first)
    schedule.step()
    schedule.step()
    assert rates(optimizer) == pytest.approx(third)
    for key, value in kw.items():
        if isinstance(value, list):
            with pytest.raises(ValueError, match=rf"{key}: expected 2 values.*got 1"):
                make(name, optimizer_with(0.1, 0.001), **{**kw, key: value[:1]})


def test_one_number_for_groups_with_different_rates_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with captured(caplog):
        WarmupLR(optimizer_with(0.1, 0.001), warmup_max_lr=0.5)
    assert "warmup_max_lr is the one number 0.5" in caplog.text
    caplog.clear()
    with captured(caplog):
        WarmupLR(optimizer_with(0.1, 0.1), warmup_max_lr=0.5)
    assert caplog.text == ""


def test_a_default_rate_does_not_override_groups_that_differ(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("WarmupDecayLR", "LRRangeTest"):
        optimizer = optimizer_with(0.1, 0.001)
        with captured(caplog):
            schedule = build_scheduler(name, PER_GROUP[name], optimizer)
        schedule.step()
        schedule.step()
        assert rates(optimizer)[0] == pytest.approx(100 * rates(optimizer)[1])
        assert rates(optimizer)[0] > 0.05
    assert caplog.text == ""
    same = optimizer_with(0.1, 0.1)
    with captured(caplog):
        schedule = build_scheduler("WarmupDecayLR", PER_GROUP["WarmupDecayLR"], same)
    assert schedule.max_lrs == [0.001, 0.001]
    assert "default of 0.001, not to the optimizer's rate 0.1" in caplog.text


def test_group_that_joins_later_gets_its_place_in_the_schedule() -> None:
    optimizer = optimizer_with(0.1)
    schedule = WarmupCosineLR(optimizer, total_num_steps=9, warmup_num_steps=3)
    for _ in range(4):
        schedule.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.001})
    schedule.step()
    assert rates(optimizer) == schedule.get_lr()
    assert schedule.org_lrs == [0.1, 0.001]
    listed = WarmupLR(optimizer_with(0.1), warmup_max_lr=[0.2])
    listed.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="warmup_max_lr: expected 2 values"):
        listed.step()


def test_rates_held_as_tensors_are_written_in_place() -> None:
    held = torch.tensor(0.1)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=held, foreach=False)
    schedule = WarmupLR(optimizer, warmup_num_steps=2)
    assert optimizer.param_groups[0]["lr"] is held
    assert float(held) == 0
    schedule.step()
    schedule.step()
    assert schedule.get_last_lr() == [pytest.approx(0.1)]
    assert update_lr(optimizer.param_groups, [0.5]) == [0.5]


def test_one_cycle_moves_momentum_against_the_rate_and_stays_below_one() -> None:
    optimizer = optimizer_with(0.1, betas=(0.7, 0.999))
    schedule = OneCycle(
        optimizer,
        0.1,
        1.1,
        cycle_first_step_size=3,
        cycle_second_step_size=4,
        decay_step_size=20,
        decay_mom_rate=0.1,
        cycle_min_mom=0.5,
        cycle_max_mom=0.8,
    )
    # Updates 2, 3, ...: recorded from DeepSpeed 0.19.8.
    expected = (0.7, 0.6, 0.5, 0.575, 0.65, 0.725, 0.8, 0.804, 0.808, 0.812, 0.816, 0.82, 0.824)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    for value in expected:
        schedule.step()
        assert optimizer.param_groups[0]["betas"] == (pytest.approx(value), 0.99)
        assert schedule.get_mom() == [optimizer.param_groups[0]["betas"]]
    schedule.step(10**6)
    assert optimizer.param_groups[0]["betas"][0] == 0.9999


def test_one_cycle_leaves_an_optimizer_without_betas_alone(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = optimizer_with(0.1, cls=torch.optim.SGD, momentum=0.7)
    with captured(caplog):
        schedule = OneCycle(optimizer, 0.1, 1.0)
    schedule.step()
    assert "cycle_momentum is off" in caplog.text
    assert schedule.get_mom() is None
    assert optimizer.param_groups[0]["momentum"] == 0.7


def test_decay_without_a_step_size_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with captured(caplog):
        OneCycle(optimizer_with(0.1), 0.1, 1.0, decay_lr_rate=0.5)
    assert "decay_lr_rate and decay_mom_rate have no effect" in caplog.text


def test_unknown_warmup_type_is_log_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with captured(caplog):
        schedule = WarmupLR(optimizer_with(0.1), warmup_type="cubic")
    assert schedule.warmup_type == "log"
    assert "'cubic' is not known" in caplog.text


def test_schedule_shorter_than_its_warmup_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for cls in (WarmupDecayLR, WarmupCosineLR):
        caplog.clear()
        with captured(caplog):
            cls(optimizer_with(0.1), total_num_steps=3, warmup_num_steps=5)  # type: ignore[operator]
        assert "total_num_steps 3 is less than warmup_num_steps 5" in caplog.text


@pytest.mark.parametrize("bad", (0, -1, 2.5, "4", True, None))
def test_steps_must_be_positive_integers(bad: Any) -> None:
    with pytest.raises(ValueError, match="warmup_num_steps must be a positive integer"):
        WarmupLR(optimizer_with(0.1), warmup_num_steps=bad)
    with pytest.raises(ValueError, match="lr_range_test_step_size must be a positive integer"):
        make("LRRangeTest", optimizer_with(0.1), lr_range_test_step_size=bad)


def test_whole_numbers_written_as_floats_count() -> None:
    assert WarmupLR(optimizer_with(0.1), warmup_num_steps=1e3).warmup_num_steps == 1000  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kw", "text"),
    (
        ({"cycle_first_step_size": 0}, "cycle_first_step_size must be positive"),
        ({"cycle_second_step_size": -1}, "cycle_second_step_size must be 0 or more"),
        ({"decay_step_size": -1}, "decay_step_size must be 0"),
    ),
)
def test_one_cycle_sizes_are_checked(kw: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OneCycle(optimizer_with(0.1), 0.1, 1.0, **kw)


def test_wrappers_are_unwrapped_and_others_refused() -> None:
    class Wrapper:
        optimizer = optimizer_with(0.1)

    assert get_torch_optimizer(Wrapper()) is Wrapper.optimizer
    with pytest.raises(TypeError, match="found int"):
        get_torch_optimizer(3)


def test_torch_schedules_are_made_by_name() -> None:
    optimizer = optimizer_with(0.1)
    assert type(build_scheduler("StepLR", {"step_size": 3}, optimizer)) is torch.optim.lr_scheduler.StepLR
    plateau = build_scheduler("ReduceLROnPlateau", {"patience": 1, "mode": "max"}, optimizer)
    assert type(plateau) is torch.optim.lr_scheduler.ReduceLROnPlateau


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("WarmupLr", {}, r"scheduler\.type: found \"WarmupLr\".*did you mean 'WarmupLR'"),
    ("steplr", {}, r"scheduler\.type: found \"steplr\".*did you mean 'StepLR'"),
    ("LRScheduler", {}, r"scheduler\.type"),
    ("math", {}, r"scheduler\.type"),
    ("WarmupLR", {"warmup_steps": 3}, r"scheduler\.params\.warmup_steps.*did you mean `warmup_num_steps`"),
    ("WarmupDecayLR", {}, r"scheduler\.params\.total_num_steps: missing"),
    ("WarmupDecayLR", {"total_num_steps": "auto"}, r"scheduler\.params\.total_num_steps: found \"auto\""),
    ("WarmupLR", {"warmup_num_steps": 0}, r"scheduler\.params: WarmupLR refused.*positive integer, got 0"),
    ("StepLR", {"step_siz": 3}, r"scheduler\.params\.step_siz.*did you mean `step_size`"),
)


@pytest.mark.parametrize(("name", "params", "text"), REFUSED)
def test_refusals_name_the_full_key(name: str, params: dict[str, Any], text: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=text):
        build_scheduler(name, params, optimizer_with(0.1))


class captured:
    """Let caplog see the package's logger, which does not propagate."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog, self.logger = caplog, logging.getLogger("DeepSpeed")

    def __enter__(self) -> None:
        self.logger.addHandler(self.caplog.handler)

    def __exit__(self, *exc: object) -> None:
        self.logger.removeHandler(self.caplog.handler)
