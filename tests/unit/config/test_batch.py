"""The batch equation: what is inferred, and the text when it does not hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_batch import BatchTriple, accumulation_note, resolve_batch
from deepspeed.runtime.config_problems import Problem

sizes = st.integers(1, 64)


@given(micro=sizes, steps=sizes, ranks=sizes, absent=st.sampled_from([(), (0,), (1,), (2,)]))
def test_one_missing_number_is_inferred(micro: int, steps: int, ranks: int, absent: tuple[int, ...]) -> None:
    full = (micro * steps * ranks, micro, steps)
    asked = [None if place in absent else value for place, value in enumerate(full)]
    result = resolve_batch(*asked, ranks)
    assert isinstance(result, BatchTriple)
    assert (result.train_batch_size, result.micro_batch_size, result.accumulation_steps) == full
    assert len(result.inferred) == len(absent)


@given(micro=sizes, ranks=sizes)
def test_one_number_means_one_accumulation_step(micro: int, ranks: int) -> None:
    assert resolve_batch(None, micro, None, ranks) == BatchTriple(
        micro * ranks, micro, 1, ranks, ("train_batch_size", "gradient_accumulation_steps")
    )
    assert resolve_batch(micro * ranks, None, None, ranks) == BatchTriple(
        micro * ranks, micro, 1, ranks, ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )


@given(train=st.none() | sizes, micro=st.none() | sizes, steps=st.none() | sizes, ranks=sizes)
def test_the_equation_holds_or_is_written_out(train, micro, steps, ranks: int) -> None:
    result = resolve_batch(train, micro, steps, ranks)
    if isinstance(result, BatchTriple):
        product = result.micro_batch_size * result.accumulation_steps * result.dp_world_size
        assert product == result.train_batch_size
        given_values = {
            "train_batch_size": train,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
        }
        assert set(result.inferred) == {key for key, value in given_values.items() if value is None}
    else:
        assert isinstance(result, Problem)
        assert result.change
        if train is not None:
            assert f"found {train}" in result.detail
            assert f"data-parallel ranks {ranks}" in result.detail


@pytest.mark.parametrize(
    ("batch", "ranks", "text"),
    (
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
            4,
            "train_batch_size: found 32; expected 24 = train_micro_batch_size_per_gpu 3 x gradient_accumulation_steps 2"
            " x data-parallel ranks 4; set train_batch_size to 24, or remove one of the three keys and let it be"
            " inferred",
        ),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4},
            2,
            "train_batch_size: found 10; expected a multiple of 8 = train_micro_batch_size_per_gpu 4 x data-parallel"
            " ranks 2; set train_batch_size to 8 or 16, or change the other numbers",
        ),
        (
            {"train_batch_size": 3, "gradient_accumulation_steps": 2},
            2,
            "train_batch_size: found 3; expected a multiple of 4 = gradient_accumulation_steps 2 x data-parallel"
            " ranks 2;"
            " set train_batch_size to 4, or change the other numbers",
        ),
        ({"gradient_accumulation_steps": 2}, 1, "gradient_accumulation_steps 2 alone does not fix a batch"),
        ({}, 1, "train_batch_size: missing, and so is train_micro_batch_size_per_gpu: no batch size is given"),
    ),
)
def test_texts(batch: dict[str, int], ranks: int, text: str) -> None:
    with pytest.raises(AssertionError) as caught:
        DeepSpeedConfig.parse(batch).resolve(ranks)
    assert text in str(caught.value)


def test_a_config_resolves_for_several_worlds() -> None:
    parsed = DeepSpeedConfig.parse({"train_batch_size": 24, "gradient_accumulation_steps": 2})
    assert parsed.train_micro_batch_size_per_gpu is None
    for ranks, micro in ((1, 12), (2, 6), (4, 3)):
        resolved = parsed.resolve(ranks)
        assert (resolved.train_micro_batch_size_per_gpu, resolved.world_size) == (micro, ranks)
    with pytest.raises(DeepSpeedConfigError, match="multiple of 10"):
        parsed.resolve(5)
    with pytest.raises(ValueError, match="dp_world_size is 0"):
        parsed.resolve(0)


def test_one_error_for_sections_and_batch() -> None:
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig.parse({"train_batch_size": 3, "fp16": {"enabled": 7}}, dp_world_size=2)
    assert [problem.path for problem in caught.value.problems] == ["fp16.enabled", "train_batch_size"]
    assert DeepSpeedConfig.parse({"train_batch_size": 4}, dp_world_size=2).train_micro_batch_size_per_gpu == 2


def test_the_triple_says_what_was_not_in_the_config() -> None:
    triple = DeepSpeedConfig.parse({"train_batch_size": 8}).resolve(2).batch_triple
    assert str(triple) == (
        "train_batch_size 8 = train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 1 x data-parallel ranks 2"
        " (not in the config: train_micro_batch_size_per_gpu, gradient_accumulation_steps)"
    )


class Mpu:
    def get_data_parallel_world_size(self) -> int:
        return 3


def test_ranks_of_an_mpu() -> None:
    assert DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2}, mpu=Mpu()).train_batch_size == 6


def test_ranks_of_a_device_mesh() -> None:
    class Axis:
        def size(self) -> int:
            return 5

    config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2}, mesh_device={"data_parallel": Axis()})
    assert config.train_batch_size == 10


def test_without_a_process_group_there_is_one_rank() -> None:
    config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 4})
    assert (config.world_size, config.train_batch_size) == (1, 2)


@pytest.mark.parametrize(
    ("config_steps", "wrapper", "words"),
    (
        (4, 4, None),
        (2, 8, "Trainer accumulates 8 micro-batches, the config says 2"),
        (None, 8, "Trainer accumulates 8 micro-batches, the config does not set it (1 is taken)"),
    ),
)
def test_a_wrapper_with_another_number(config_steps: int | None, wrapper: int, words: str | None) -> None:
    note = accumulation_note(config_steps, wrapper, "Trainer")
    assert note is None if words is None else words in str(note)
