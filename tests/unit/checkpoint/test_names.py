"""File names as other releases write them; tags that would lead elsewhere are refused."""

from __future__ import annotations

import pytest

from deepspeed.checkpoint import names


def test_file_names() -> None:
    assert names.model_file(0) == "mp_rank_00_model_states.pt"
    assert names.optim_file(3, 0, bf16=False) == "zero_pp_rank_3_mp_rank_00_optim_states.pt"
    assert names.optim_file(12, 1, bf16=True) == "bf16_zero_pp_rank_12_mp_rank_01_optim_states.pt"


@pytest.mark.parametrize("rank", (0, 7, 123))
@pytest.mark.parametrize("bf16", (True, False))
def test_optim_names_are_read_back(rank: int, bf16: bool) -> None:
    assert names.parse_optim_file(names.optim_file(rank, 2, bf16=bf16)) == names.OptimName(rank, 2, bf16)


def test_old_and_foreign_optim_names() -> None:
    assert names.parse_optim_file("zero_pp_rank_0_mp_rank_00optim_states.pt") == names.OptimName(0, 0, False)
    assert names.parse_optim_file("fp16_zero_pp_rank_1_mp_rank_00_optim_states.pt") == names.OptimName(1, 0, False)
    for other in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt", "x_optim_states.pt"):
        assert names.parse_optim_file(other) is None


def test_files_a_save_replaces() -> None:
    for ours in (names.model_file(0), names.optim_file(9, 0, bf16=True), names.rng_file(3), names.MANIFEST):
        assert names.is_checkpoint_file(ours)
    for theirs in ("trainer_state.json", "notes.txt", "tokenizer.model", "rng_state.pth"):
        assert not names.is_checkpoint_file(theirs)


@pytest.mark.parametrize("tag", (1, "step7", "global_step100", "run/7", "a.b-c", "épreuve"))
def test_good_tags(tag: object) -> None:
    assert names.check_tag(tag) == str(tag)


@pytest.mark.parametrize(
    "tag",
    ("", " ", "/etc", "..", "../x", "a/../b", "a//b", ".", "./a", ".hidden", "a/.b", "a\\b", "a\nb", "C:x", "latest",
     "zero_to_fp32.py", "x" * 300),
)  # fmt: skip
def test_bad_tags_are_refused(tag: str) -> None:
    with pytest.raises(ValueError, match="checkpoint tag"):
        names.check_tag(tag)


def test_the_folder_itself_can_only_be_loaded() -> None:
    assert names.check_tag(".", loading=True) == "."


def test_hidden_names_are_read_back() -> None:
    for kind in names.Transit:
        hidden = names.HiddenName("step.7", kind, "0a1b")
        assert names.parse_hidden(str(hidden)) == hidden
    assert names.parse_hidden("step7") is None
    assert names.is_partial_file(names.partial_file("latest"))
    assert not names.is_partial_file("latest")


def test_compile_wrappers_leave_no_trace() -> None:
    assert names.clean_name("_orig_mod.layers.0._orig_mod.weight") == "layers.0.weight"


def test_files_of_shards() -> None:
    name = names.sharded_model_file(12, 3)
    assert name == "zero_pp_rank_12_mp_rank_03_model_states.pt"
    assert names.parse_sharded_model_file(name) == (12, 3)
    assert names.is_checkpoint_file(name)
    assert names.parse_optim_file(name) is None
    assert names.parse_sharded_model_file(names.model_file(3)) is None
    assert [names.shard_rank_of(file) for file in (name, names.optim_file(5, 0, bf16=True), names.model_file(0))] == [
        12, 5, None,
    ]  # fmt: skip
