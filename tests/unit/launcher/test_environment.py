"""The user's environment files and path lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.launcher.environment import (
    join_paths,
    merge_environment,
    parse_environment_lines,
    read_environment_files,
    threads_per_rank,
)


def test_lines_are_taken_byte_for_byte_apart_from_shell_dressing() -> None:
    text = """A=1

# B=2
export C=x y
D="a b"
E='it''s'
F={"k": "v=w"}
G=
H=$HOME
 I=%n "q" """
    assert dict(parse_environment_lines(text.splitlines(), "file")) == {
        "A": "1",
        "C": "x y",
        "D": "a b",
        "E": "it''s",
        "F": '{"k": "v=w"}',
        "G": "",
        "H": "$HOME",
        "I": '%n "q"',
    }


@pytest.mark.parametrize("line", ("A", "=1", "A B=1"))
def test_a_bad_line_is_refused_with_its_place(line: str) -> None:
    with pytest.raises(ValueError, match="file line 2"):
        list(parse_environment_lines(["OK=1", line], "file"))


def test_the_current_folder_wins_over_home_and_absent_files_are_skipped(tmp_path: Path) -> None:
    for name, text in (("home", "A=home\nB=home\n"), ("here", "A=here\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".env").write_text(text)
    folders = [str(tmp_path / name) for name in ("home", "none", "here")]
    assert read_environment_files(folders, ".env") == {"A": "here", "B": "home"}


def test_path_lists_are_extended_and_other_variables_replaced() -> None:
    merged = merge_environment({"PYTHONPATH": "/a:/b", "X": "1"}, {"PYTHONPATH": "/c:/a", "X": "2"})
    assert merged == {"PYTHONPATH": "/c:/a:/b", "X": "2"}


def test_joined_paths_keep_the_first_place_of_each_folder() -> None:
    assert join_paths(["/a", "", "/b:/a", ":/c:"]) == "/a:/b:/c"


def test_threads_are_shared_out_and_never_zero() -> None:
    assert threads_per_rank(10_000) == 1
    assert threads_per_rank(1) >= threads_per_rank(2)
