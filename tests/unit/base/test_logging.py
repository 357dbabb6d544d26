"""Who speaks, at which level, and where it goes."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.utils import logging as ds_logging
from deepspeed.utils.logging import (
    LoggerFactory,
    get_dist_msg,
    get_log_level_from_string,
    log_dist,
    log_dist_once,
    logger,
    print_configuration,
    print_dist,
    print_json_dist,
    set_log_level_from_string,
    should_log_le,
    warning_once,
)


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    before = logger.level
    yield
    logger.setLevel(before)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


def test_import_prints_nothing_and_needs_no_torch() -> None:
    done = run("import sys, deepspeed.utils.logging; sys.exit('torch' in sys.modules)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_level_by_environment() -> None:
    code = "from deepspeed.utils.logging import logger; logger.info('seen'); print(logger.level)"
    assert run(code).stdout == "30\n"
    done = run(code, DS_LOG_LEVEL="Info")
    assert "seen" in done.stdout
    assert done.stdout.endswith("20\n")
    assert "DS_LOG_LEVEL: log level 'loud' is unknown; use one of debug, info" in run(code, DS_LOG_LEVEL="loud").stderr


def test_quiet_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    logger.info("hidden")
    log_dist("hidden", ranks=[0])
    logger.warning("shown")
    out = capsys.readouterr().out
    assert "hidden" not in out
    assert "[WARNING] [test_logging.py:" in out


def test_output_follows_redirection() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as caught:
        logger.warning("caught")
    assert "caught" in caught.getvalue()


def test_level_names() -> None:
    assert get_log_level_from_string("WARNING") == logging.WARNING
    with pytest.raises(ValueError, match="'foo' is unknown; use one of debug, info, warning, error, critical"):
        get_log_level_from_string("foo")
    set_log_level_from_string("info")
    assert ds_logging.get_current_level() == logging.INFO
    assert should_log_le("info")
    assert should_log_le("warning")
    assert not should_log_le("debug")
    with pytest.raises(ValueError, match="expected a level name"):
        should_log_le(3)  # type: ignore[arg-type]
    other = LoggerFactory.create_logger("other", logging.ERROR)
    set_log_level_from_string("debug", other)
    assert other.level == logging.DEBUG
    with pytest.raises(ValueError, match="`name` is missing"):
        LoggerFactory.create_logger()


def test_creating_a_logger_twice_does_not_double_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        made = LoggerFactory.create_logger("twice")
    made.warning("said once")
    assert capsys.readouterr().out.count("said once") == 1


def test_everybody_speaks_while_there_is_no_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert get_dist_msg("m") == get_dist_msg("m", [5]) == "[Rank -1] m"
    log_dist("warned", level=logging.WARNING)
    print_dist("printed", ranks=[7])
    out = capsys.readouterr().out
    assert "[Rank -1] warned" in out
    assert "test_logging.py" in out
    assert "[Rank -1] printed\n" in out


def spoken() -> list[str | None]:
    return [get_dist_msg("m", ranks) for ranks in ([0], [1], [-1], [0, 1], [], None)]


def test_listed_ranks_speak(ranks: Any) -> None:
    zero, one = ranks(spoken)
    assert zero == ["[Rank 0] m", None, "[Rank 0] m", "[Rank 0] m", None, None]
    assert one == [None, "[Rank 1] m", "[Rank 1] m", "[Rank 1] m", None, None]


def written(folder: str) -> None:
    print_json_dist({"a": 1}, ranks=[1], path=f"{folder}/{dist.get_rank()}.json")


def test_json_of_one_rank(ranks: Any, tmp_path: Path) -> None:
    ranks(written, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["1.json"]
    assert json.loads((tmp_path / "1.json").read_text()) == {"a": 1, "rank": 1}


def test_json_without_a_file_is_printed_and_the_message_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    message = {"a": 1}
    print_json_dist(message)
    assert json.loads(capsys.readouterr().out) == {"a": 1, "rank": -1}
    assert message == {"a": 1}


def test_once_is_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        warning_once("only %s", "this")
        log_dist_once("only that", ranks=[0], level=logging.WARNING)
    log_dist_once("only that", ranks=[1], level=logging.WARNING)
    out = capsys.readouterr().out
    assert out.count("only this") == 1
    assert out.count("only that") == 2
    assert "test_logging.py" in out.splitlines()[0]


def test_configuration_is_listed_sorted(capsys: pytest.CaptureFixture[str]) -> None:
    logger.setLevel(logging.INFO)
    print_configuration(SimpleNamespace(b=2, a="x"), "things")
    lines = [line.split("] ")[-1] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "things:"
    assert lines[1].startswith("  a ....")
    assert lines[1].endswith(" x")
    assert lines[2].endswith(" 2")


def test_logger_that_is_silent_while_compiling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISABLE_LOGS_WHILE_COMPILING", "1")
    monkeypatch.setenv("LOGGER_METHODS_TO_EXCLUDE_FROM_DISABLE", "error, critical")
    made = LoggerFactory.create_logger("silent-while-compiling")
    made.warning("one")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    made.warning("two")
    made.error("three")
    out = capsys.readouterr().out
    assert "one" in out
    assert "two" not in out
    assert "three" in out
    assert out.count("test_logging.py") == 2
