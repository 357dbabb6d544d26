"""The command lines: every documented flag with its default, and user arguments that arrive byte for byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.launcher import launch, launcher_helper, runner

RUNNER_DEFAULTS = {
    "hostfile": "/job/hostfile",
    "include": "",
    "exclude": "",
    "num_nodes": -1,
    "num_gpus": -1,
    "min_elastic_nodes": -1,
    "max_elastic_nodes": -1,
    "master_port": 29500,
    "master_addr": "",
    "node_rank": -1,
    "launcher": "pdsh",
    "launcher_args": "",
    "module": False,
    "no_python": False,
    "no_local_rank": False,
    "no_ssh": False,
    "no_ssh_check": False,
    "force_multi": False,
    "save_pid": False,
    "enable_each_rank_log": "None",
    "autotuning": "",
    "elastic_training": False,
    "bind_cores_to_rank": False,
    "bind_core_list": None,
    "ssh_port": None,
    "venv_script": None,
    "log_level": "info",
    "quiet": False,
    "user_script": "s.py",
    "user_args": [],
    "master_port_given": False,
}

LAUNCH_DEFAULTS = {
    "node_rank": 0,
    "master_addr": "127.0.0.1",
    "master_port": 29500,
    "world_info": "None",
    "module": False,
    "no_python": False,
    "no_local_rank": False,
    "save_pid": 0,
    "enable_each_rank_log": "None",
    "bind_cores_to_rank": False,
    "bind_core_list": None,
    "end_with_stdin": False,
    "log_level": "info",
    "quiet": False,
    "training_script": "s.py",
    "training_script_args": [],
}


def test_defaults_of_the_front_end() -> None:
    assert vars(runner.parse_args(["s.py"])) == RUNNER_DEFAULTS


def test_defaults_of_the_node_launcher() -> None:
    assert vars(launch.parse_args(["s.py"])) == LAUNCH_DEFAULTS


def test_defaults_of_the_mpich_helper() -> None:
    assert vars(launcher_helper.parse_args(["s.py"])) == {
        "launcher": "mpich",
        "module": False,
        "no_python": False,
        "bind_cores_to_rank": False,
        "bind_core_list": None,
        "user_script": "s.py",
        "user_args": [],
    }


@pytest.mark.parametrize(
    ("words", "attribute", "expected"),
    (
        (["-H", "h"], "hostfile", "h"),
        (["-Hh"], "hostfile", "h"),
        (["--hostfile=h"], "hostfile", "h"),
        (["-i", "a:0"], "include", "a:0"),
        (["-e", "a:0"], "exclude", "a:0"),
        (["--num_accelerators", "3"], "num_gpus", 3),
        (["--num_gpu", "3"], "num_gpus", 3),  # unique beginnings count, as everywhere in argparse
        (["--num_nodes", "-1"], "num_nodes", -1),
        (["--launcher", "OpenMPI"], "launcher", "openmpi"),
        (["--launcher_args", "-x y"], "launcher_args", "-x y"),
        (["--launcher_args", "-v"], "launcher_args", "-v"),  # a value may begin with a dash
        (["--launcher_arg", "-v"], "launcher_args", "-v"),
        (["-q"], "log_level", "error"),
        (["--master_port", "1"], "master_port_given", True),
    ),
)
def test_spellings(words: list[str], attribute: str, expected: object) -> None:
    parsed = runner.parse_args([*words, "s.py", "--num_nodes", "7"])
    assert getattr(parsed, attribute) == expected
    assert parsed.user_script == "s.py"
    assert parsed.user_args == ["--num_nodes", "7"]


def test_mistakes_end_with_the_usage_text(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--no_such_flag", "s.py"], ["--num_gpus", "two", "s.py"], [], ["--num_gpus", "2"]):
        with pytest.raises(SystemExit) as stopped:
            runner.parse_args(words)
        assert stopped.value.code == 2
    assert "usage: deepspeed" in capsys.readouterr().err


@pytest.mark.parametrize("words", (["--deepspeed_config", "ds.json", "s.py"], ["--deepspeed_config=ds.json", "s.py"]))
def test_an_option_of_the_script_in_front_of_it_is_sent_behind_it(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        runner.parse_args(["--num_gpus", "2", *words])
    assert "go behind it: deepspeed [options] USER_SCRIPT --deepspeed_config ..." in capsys.readouterr().err


@given(st.lists(st.text()))
def test_whatever_follows_the_script_is_passed_on_unchanged(arguments: list[str]) -> None:
    assert runner.parse_args(["--num_gpus", "2", "s.py", *arguments]).user_args == arguments
    assert launch.parse_args(["--node_rank=1", "s.py", *arguments]).training_script_args == arguments


def test_double_dashes_belong_to_the_user_once_the_script_is_known() -> None:
    parsed = runner.parse_args(["--num_gpus", "2", "--", "-odd.py", "--", "--num_gpus", "9", "--"])
    assert (parsed.user_script, parsed.user_args, parsed.num_gpus) == ("-odd.py", ["--", "--num_gpus", "9", "--"], 2)


@pytest.mark.parametrize(
    ("words", "said"),
    (
        (["--num_nodes", "1", "-i", "localhost"], "count devices"),
        (["--num_gpus", "1", "-e", "localhost"], "count devices"),
        (["-i", "localhost", "-e", "localhost:0"], "exclude each other"),
        (["--module", "--no_python"], "--module and --no_python"),
        (["--num_gpus", "0"], "at least one worker"),
        (["--num_nodes", "0"], "at least one node"),
        (["--num_nodes", "2"], "needs a hostfile"),
        (["--bind_core_list", "0"], "--bind_cores_to_rank"),
        (["--autotuning", "tune"], "--autotuning tune: the autotuner is not available"),
        (["--elastic_training"], "--elastic_training: elastic training is not available"),
        (["--min_elastic_nodes", "1", "--max_elastic_nodes", "2"], "--min_elastic_nodes, --max_elastic_nodes"),
        (["--no_ssh", "--force_multi"], "give one of them"),
    ),
)
def test_contradictions_and_what_is_not_there_are_refused_by_name(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        runner.main(["--hostfile", "/nonexistent", "-q", *words, __file__])
