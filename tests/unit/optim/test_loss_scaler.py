"""The loss scaler as a state machine: its rule, its limits, its files."""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.runtime.fp16.loss_scaler import (
    CreateLossScaler,
    DynamicLossScaler,
    LossScaleConfig,
    LossScaleError,
    LossScaleProfile,
    LossScaler,
    to_python_float,
)

# (init_scale, scale_window, min_scale, delayed_shift, consecutive_hysteresis), overflow flags, log2 of the scale after
# each step, final hysteresis, last overflow: recorded from DeepSpeed 0.19.8.
RECORDED: tuple[tuple[tuple[Any, ...], str, str, int, int], ...] = (
    (
        (128, 4, 1, 3, False),
        "0000000100100000000010000001001000010010",
        "7 7 7 7 8 8 8 8 8 8 8 8 8 8 8 9 9 9 9 10 10 10 10 10 10 11 11 11 11 11 11 11 11 11 11 10 10 10 9 9",
        1,
        38,
    ),
    (
        (4, 2, 0.25, 2, True),
        "0010000000000000000000000100000000000000",
        "2 2 2 2 2 3 3 4 4 5 5 6 6 7 7 8 8 9 9 10 10 11 11 12 12 12 12 12 13 13 14 14 15 15 16 16 17 17 18 18",
        2,
        25,
    ),
    (
        (128, 3, 2, 4, False),
        "0010100101101011011010100111011011100111",
        "7 7 7 7 7 7 7 7 7 6 5 5 4 4 3 2 2 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
        1,
        39,
    ),
    (
        (32, 1, 1, 1, False),
        "0100001000001001101001000000010010010000",
        "5 4 4 5 6 7 6 6 7 8 9 10 9 9 10 9 8 8 7 7 8 7 7 8 9 10 11 12 13 12 12 13 12 12 13 12 12 13 14 15",
        1,
        35,
    ),
    (
        (1024, 2, 0.25, 3, True),
        "0100110000100001100000110010000000110011",
        "10 10 10 10 10 10 10 10 11 11 11 11 11 12 12 12 12 12 12 13 13 14 14 14 14 14 14 14 14 15 15 16 16 17 17 17 "
        "17 17 17 17",
        1,
        39,
    ),
    (
        (64, 1, 1, 3, True),
        "1111111111111101001101100001001101111111",
        "6 6 5 4 3 2 1 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 2 3 4 4 4 5 5 5 5 5 5 4 3 2 1 0",
        1,
        39,
    ),
    (
        (16, 4, 1, 3, True),
        "0111001001010000100010000000000000010000",
        "4 4 4 3 3 3 3 3 3 3 3 3 3 3 3 3 3 3 3 3 3 3 3 3 3 4 4 4 4 5 5 5 5 6 6 6 6 6 6 6",
        3,
        35,
    ),
)


def scaler(**changes: Any) -> DynamicLossScaler:
    settings_: dict[str, Any] = {
        "init_scale": 256,
        "scale_window": 3,
        "min_scale": 1,
        "delayed_shift": 2,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": False,
    }
    return DynamicLossScaler(**{**settings_, **changes})


@pytest.mark.parametrize("case", RECORDED)
def test_scales_of_recorded_runs(case: tuple[tuple[Any, ...], str, str, int, int]) -> None:
    args, flags, exponents, hysteresis, last_overflow = case
    tested = DynamicLossScaler(*args, raise_error_at_min_scale=False)
    seen = []
    for flag in flags:
        tested.update_scale(flag == "1")
        seen.append(int(math.log2(tested.loss_scale)))
    assert seen == [int(e) for e in exponents.split()]
    assert (tested.cur_hysteresis, tested.last_overflow_iter) == (hysteresis, last_overflow)
    assert (tested.cur_iter, tested.num_overflows) == (len(flags), flags.count("1"))


def test_first_growth_follows_a_full_clean_window_then_once_a_window() -> None:
    tested, scales = scaler(), []
    for _ in range(8):
        tested.update_scale(False)
        scales.append(tested.loss_scale)
    assert scales == [256, 256, 256, 512, 512, 512, 1024, 1024]


@pytest.mark.parametrize("delayed_shift", (1, 0))
def test_hysteresis_of_one_or_less_shrinks_at_each_overflow(delayed_shift: int) -> None:
    tested = scaler(delayed_shift=delayed_shift)
    tested.update_scale(True)
    tested.update_scale(True)
    assert tested.loss_scale == 64


def test_scale_never_goes_below_a_minimum_that_is_no_power_of_two() -> None:
    tested = scaler(init_scale=4, min_scale=1.5, delayed_shift=1)
    for _ in range(4):
        tested.update_scale(True)
    assert tested.loss_scale == 1.5


def test_overflow_at_the_minimum_raises_with_counts_and_remedy_and_leaves_the_state() -> None:
    tested = scaler(init_scale=2, delayed_shift=1, raise_error_at_min_scale=True)
    tested.update_scale(False)
    tested.update_scale(True)
    assert tested.loss_scale == 1
    with pytest.raises(LossScaleError, match=r"fp16\.min_loss_scale = 1\).*2 steps in a row and 2 of 3 steps.*bf16"):
        tested.update_scale(True)
    assert (tested.cur_iter, tested.loss_scale, tested.last_overflow_iter) == (2, 1, 1)


def test_hysteresis_still_applies_at_the_minimum_before_the_error() -> None:
    tested = scaler(init_scale=1, delayed_shift=3, raise_error_at_min_scale=True)
    tested.update_scale(True)
    tested.update_scale(True)
    with pytest.raises(LossScaleError):
        tested.update_scale(True)


def test_skipped_steps_are_counted_in_all_and_in_a_row() -> None:
    tested = scaler()
    for flag in (True, False, True, True):
        tested.update_scale(flag)
    assert (tested.num_overflows, tested.consecutive_overflows) == (3, 2)


@given(
    flags=st.lists(st.booleans(), max_size=60),
    cut=st.integers(0, 60),
    window=st.integers(1, 5),
    shift=st.integers(1, 4),
    refill=st.booleans(),
    by_pickle=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_saved_and_restored_scaler_continues_exactly(
    flags: list[bool], cut: int, window: int, shift: int, refill: bool, by_pickle: bool
) -> None:
    kwargs = {"scale_window": window, "delayed_shift": shift, "consecutive_hysteresis": refill}
    unbroken, first = scaler(**kwargs), scaler(**kwargs)
    for flag in flags:
        unbroken.update_scale(flag)
    for flag in flags[:cut]:
        first.update_scale(flag)
    if by_pickle:
        second = pickle.loads(pickle.dumps(first))
    else:
        second = scaler()
        second.load_state_dict(first.state_dict())
    for flag in flags[cut:]:
        second.update_scale(flag)
    assert second.state_dict() == unbroken.state_dict()
    assert second.loss_scale >= second.min_scale


def test_pickle_of_an_older_release_loads_and_runs() -> None:
    old = scaler(init_scale=32)
    for added in ("num_overflows", "consecutive_overflows"):
        del old.__dict__[added]
    buffer = io.BytesIO()
    torch.save({"loss_scaler": old}, buffer)
    buffer.seek(0)
    new = torch.load(buffer, weights_only=False)["loss_scaler"]
    assert type(new).__module__ == "deepspeed.runtime.fp16.loss_scaler"
    new.update_scale(True)
    assert (new.loss_scale, new.num_overflows, new.cur_hysteresis) == (32, 1, 1)


def test_pickled_attribute_names_are_those_of_the_format() -> None:
    assert set(LossScaler(4).__dict__) == {"cur_scale", "dynamic"}
    assert set(scaler().__dict__) >= {
        "cur_scale",
        "cur_iter",
        "last_overflow_iter",
        "scale_factor",
        "scale_window",
        "min_scale",
        "delayed_shift",
        "cur_hysteresis",
        "consecutive_hysteresis",
        "raise_error_at_min_scale",
        "dynamic",
        "dtype",
    }


def test_state_of_another_kind_of_scaler_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="scale_window"):
        LossScaler(1).load_state_dict(scaler().state_dict())


def test_constant_scaler_never_moves_and_scales_loss_and_gradients() -> None:
    tested = LossScaler(4)
    tested.update_scale(True)
    p = torch.nn.Parameter(torch.ones(2))
    tested.backward((p * 3).sum())
    assert p.grad is not None
    assert p.grad.tolist() == [12, 12]
    assert (tested.loss_scale, tested.dynamic, tested.has_overflow([p])) == (4, False, False)
    assert tested.scale_gradient(None, (torch.ones(1), None), None) == (torch.tensor([4.0]), None)


@pytest.mark.parametrize("bad", (float("inf"), float("-inf"), float("nan")))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_serial_overflow_search_finds_every_kind_of_non_finite_value(bad: float, dtype: torch.dtype) -> None:
    p = torch.nn.Parameter(torch.ones(5, dtype=dtype))
    unused = torch.nn.Parameter(torch.ones(1))
    p.grad = torch.full((5,), 6e4, dtype=dtype)
    assert not scaler().has_overflow_serial([unused, p])
    p.grad[3] = bad
    assert scaler().has_overflow_serial([unused, p])


def test_serial_overflow_search_looks_into_sparse_gradients() -> None:
    p = torch.nn.Parameter(torch.ones(4, 2))
    p.grad = torch.sparse_coo_tensor([[1]], torch.tensor([[1.0, float("nan")]]), (4, 2), check_invariants=True)
    assert scaler().has_overflow_serial([p])


def test_factory_chooses_by_dtype() -> None:
    args = {"init_scale": 16, "scale_window": 7, "min_scale": 2, "delayed_shift": 3, "consecutive_hysteresis": True}
    dynamic = CreateLossScaler(torch.float16, 8, True, args)
    assert isinstance(dynamic, DynamicLossScaler)
    assert (dynamic.loss_scale, dynamic.dtype, dynamic.raise_error_at_min_scale) == (16, torch.float16, True)
    assert CreateLossScaler(torch.float16, 8, False, None).loss_scale == 8
    for dtype in (torch.bfloat16, torch.float32):
        constant = CreateLossScaler(dtype, 8, True, args)
        assert (type(constant), constant.loss_scale) == (LossScaler, 1.0)
    with pytest.raises(ValueError, match="init_scale"):
        CreateLossScaler(torch.float16, 8, True, None)


def test_settings_of_the_historical_wrappers() -> None:
    fused = LossScaleConfig(torch.float16, True, 64.0, None)
    assert (fused.cur_scale, fused.scale_window, fused.min_loss_scale) == (2**32, 1000, 1)
    unfused = LossScaleConfig(torch.float16, True, 64.0, None, profile=LossScaleProfile.UNFUSED)
    assert (unfused.cur_scale, unfused.min_loss_scale, unfused.last_overflow_iter) == (2.0**16, 0.25, -1)
    given_args = LossScaleConfig(torch.float16, True, 64.0, {"init_scale": 16, "min_scale": 2, "scale_window": 7})
    assert (given_args.cur_scale, given_args.scale_window, given_args.min_loss_scale) == (16, 7, 2)
    static = LossScaleConfig(torch.float16, False, 64.0, None)
    assert (static.cur_scale, static.dynamic_loss_scale, static.scale_window) == (64.0, False, None)
    bf16 = LossScaleConfig(torch.bfloat16, True, 64.0, None)
    assert (bf16.cur_scale, bf16.use_grad_scaling, bf16.dynamic_loss_scale) == (1.0, False, False)


def test_numbers_from_tensors() -> None:
    assert to_python_float(torch.tensor([3.0])) == 3.0
    assert to_python_float(2) == 2.0
