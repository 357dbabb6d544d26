"""Starts on several hosts, with stand-ins for pdsh, ssh and the MPI starters on PATH."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.launcher import multinode_runner as backends
from deepspeed.launcher import runner
from deepspeed.launcher.hostfile import decode_world_info, encode_world_info
from deepspeed.launcher.launcher_helper import env_mapping
from deepspeed.launcher.multinode_runner import LAUNCHER_CLASSES, export_statement, remote_word
from tests.unit.launcher.launching import Folder, is_running, wait_until
from tests.unit.launcher.test_run import ARGUMENTS, SHOW, seen

# Like pdsh: options, hosts, then the words of the command joined by blanks; %n and %h are replaced, one local shell per
# host stands for the other side. With LOSE it shows what a dying pdsh leaves: nothing on the remote side is told.
PDSH = r"""
import os, re, signal, subprocess, sys, json
words = sys.argv[1:]
with open("pdsh.json", "a") as log:
    log.write(json.dumps({"words": words, "environment": dict(os.environ)}) + "\n")
hosts = []
while words and words[0].startswith("-"):
    word = words.pop(0)
    if word == "-w": hosts = words.pop(0).split(",")
    elif word == "-f": words.pop(0)
started = []
for number, host in enumerate(hosts):
    swap = {"%n": str(number), "%h": host, "%u": "user", "%%": "%"}
    text = re.sub("%[nhu%]", lambda match: swap[match[0]], " ".join(words))
    started.append(subprocess.Popen(["bash", "-c", text], start_new_session=True))
def end(number, frame):
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
sys.exit(max(process.wait() for process in started))
"""
SSH = r"""
import os, sys, json
words = sys.argv[1:]
with open("ssh.json", "a") as log:
    log.write(json.dumps(words) + "\n")
while words[0].startswith("-"):
    word = words.pop(0)
    if word in ("-p", "-o"): words.pop(0)
host = words.pop(0)
if host == "unreachable":
    sys.exit("ssh: connect to host unreachable port 22: No route to host")
os.execvp("bash", ["bash", "-c", " ".join(words)])
"""
PRINTER = """
import json, os, sys
with open(os.path.basename(sys.argv[0]) + ".json", "w") as log:
    json.dump({"words": sys.argv[1:], "environment": dict(os.environ)}, log)
"""


@pytest.fixture
def cluster(folder: Folder) -> Folder:
    """A folder with a hostfile of two hosts and stand-ins in ``bin``."""
    (folder.path / "hosts").write_text("h0 slots=1\nh1 slots=1\n")
    bin_folder = folder.path / "bin"
    bin_folder.mkdir()
    for name, text in (("pdsh", PDSH), ("ssh", SSH)):
        (bin_folder / name).write_text(f"#!{sys.executable}{text}")
        (bin_folder / name).chmod(0o755)
    return folder


def install(folder: Folder, *names: str) -> None:
    for name in names:
        path = folder.path / "bin" / name
        path.write_text(f"#!{sys.executable}{PRINTER}")
        path.chmod(0o755)


def start(folder: Folder, *words: str, extra: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    path = {"PATH": f"{folder.path / 'bin'}:{os.environ['PATH']}"}
    return folder.launch("--hostfile", "hosts", *words, extra={**path, **(extra or {})})


def logged(folder: Folder, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder.path / f"{name}.json").read_text().splitlines()]


@pytest.mark.parametrize("launcher", ("pdsh", "ssh"))
def test_every_rank_on_every_host_sees_the_arguments_byte_for_byte(cluster: Folder, launcher: str) -> None:
    script = cluster.script("show.py", SHOW)
    done = start(cluster, "--force_multi", "--launcher", launcher, "--no_local_rank", script, *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        worker = seen(cluster, rank)
        assert worker["argv"] == ARGUMENTS
        environment = worker["environment"]
        assert isinstance(environment, dict)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_PORT")
        assert [environment[name] for name in names] == [str(rank), "0", "2", "1", str(rank), "2", "29500"]


@pytest.mark.parametrize("launcher", ("pdsh", "ssh"))
def test_variables_reach_the_workers_and_python_paths_are_extended(cluster: Folder, launcher: str) -> None:
    script = cluster.script("show.py", SHOW)
    (cluster.path / ".deepspeed_env").write_text("FROM_FILE=a b;$c %n\nPYTHONPATH=/from/file\nJSON={\"k\": \"v=w\"}\n")
    extra = {"NCCL_DEBUG": 'x "y" %h', "UCX_NET_DEVICES": "mlx", "NCCL_IB_HCA": "mlx", "AISC_JOB_NAME": "job"}
    # The other side starts from an environment of its own.
    other_side = cluster.path / "bin" / "bash"
    other_side.write_text('#!/bin/sh\nexec env -i PATH="$PATH" HOME=/ PYTHONPATH=/remote/own /bin/bash "$@"\n')
    other_side.chmod(0o755)
    done = start(cluster, "--launcher", launcher, "--master_addr", "10.9.8.7", script, extra={**extra, "DS_X": "1"})
    assert done.returncode == 0, done.stderr
    environment = seen(cluster, 1)["environment"]
    assert isinstance(environment, dict)
    assert environment["FROM_FILE"] == "a b;$c %n"
    assert environment["JSON"] == '{"k": "v=w"}'
    assert environment["NCCL_DEBUG"] == 'x "y" %h'
    assert environment["DS_X"] == "1"
    assert environment["MASTER_ADDR"] == "10.9.8.7"
    assert "UCX_NET_DEVICES" not in environment, "held back where AISC_JOB_NAME is set"
    assert "NCCL_IB_HCA" not in environment
    folders = environment["PYTHONPATH"].split(":")
    assert folders[:2] == [str(cluster.path), "/from/file"]
    assert folders[-1] == "/remote/own", "what the other host has comes last, and stays"


def test_prefixes_that_a_client_adds_are_read_when_the_run_starts(cluster: Folder) -> None:
    script = cluster.script("show.py", SHOW)
    code = (
        "from deepspeed.launcher import runner\n"
        "runner.EXPORT_ENVS.append('CLIENT')\n"
        f"runner.main(['--hostfile', 'hosts', {script!r}])\n"
    )
    extra = {"PATH": f"{cluster.path / 'bin'}:{os.environ['PATH']}", "CLIENT_KEY": "1", "OTHER_KEY": "1"}
    cluster.launch(command=[sys.executable, "-c", code], extra=extra)
    (call,) = logged(cluster, "pdsh")
    text = call["words"][-1]  # type: ignore[index]
    assert "export CLIENT_KEY=1;" in text
    assert "OTHER_KEY" not in text


@pytest.mark.parametrize(("preset", "expected"), ((None, " -p 2200"), ("-p 2222 -i key", "-p 2222 -i key -p 2200")))
def test_arguments_for_ssh_are_extended(cluster: Folder, preset: str | None, expected: str) -> None:
    script = cluster.script("nothing.py", "")
    extra = {} if preset is None else {"PDSH_SSH_ARGS_APPEND": preset}
    done = start(cluster, "--launcher", "pdsh", "--ssh_port", "2200", script, extra=extra)
    assert done.returncode == 0, done.stderr
    (call,) = logged(cluster, "pdsh")
    environment = call["environment"]
    assert isinstance(environment, dict)
    assert (environment["PDSH_RCMD_TYPE"], environment["PDSH_SSH_ARGS_APPEND"]) == ("ssh", expected)


def test_launcher_args_reach_pdsh_and_ssh(cluster: Folder) -> None:
    script = cluster.script("nothing.py", "")
    assert start(cluster, "--launcher", "pdsh", "--launcher_args", "-v -b", script).returncode == 0
    words = logged(cluster, "pdsh")[0]["words"]
    assert words[:8] == ["-S", "-f", "1024", "-w", "h0,h1", "-v", "-b", words[-1]]  # type: ignore[index]
    assert start(cluster, "--launcher", "ssh", "--launcher_args", "-o 'User=me you'", script).returncode == 0
    last = logged(cluster, "ssh")[-1]
    assert last[:2] == ["-o", "User=me you"]  # type: ignore[index]


def test_options_for_the_workers_reach_every_node(cluster: Folder) -> None:
    (cluster.path / "package").mkdir()
    cluster.script("package/job.py", SHOW)
    options = ("--module", "--no_local_rank", "--enable_each_rank_log", "a b", "-q")
    done = start(cluster, *options, "package.job", "--", "x")
    assert done.returncode == 0, done.stderr
    assert seen(cluster, 1)["argv"] == ["--", "x"]
    assert len(list((cluster.path / "a b").iterdir())) == 2


def test_a_script_to_source_comes_first(cluster: Folder) -> None:
    (cluster.path / "my venv.sh").write_text("export FROM_VENV=1\n")
    done = start(cluster, "--venv_script", str(cluster.path / "my venv.sh"), cluster.script("show.py", SHOW))
    assert done.returncode == 0, done.stderr
    assert seen(cluster, 0)["environment"]["FROM_VENV"] == "1"  # type: ignore[index]


@pytest.mark.parametrize("launcher", ("pdsh", "ssh"))
def test_worst_exit_code_of_the_nodes_is_handed_on(cluster: Folder, launcher: str) -> None:
    script = cluster.script("end.py", "import os, sys; sys.exit(5 if os.environ['RANK'] == '1' else 0)")
    done = start(cluster, "--launcher", launcher, script)
    assert done.returncode == 5
    assert re.search(r"rank 1 on \S+ \(pid \d+, local rank 0, cpu\) ended with exit code 5", done.stderr)


def test_ssh_is_tried_before_the_start(cluster: Folder) -> None:
    script = cluster.script("nothing.py", "")
    (cluster.path / "hosts").write_text("unreachable slots=1\nh1 slots=1\n")
    done = start(cluster, script)
    assert done.returncode == 2
    assert "ssh -o PasswordAuthentication=no unreachable hostname" in done.stderr
    assert "No route to host" in done.stderr
    assert not (cluster.path / "pdsh.json").exists()
    words = ("--no_ssh_check", "--master_addr", "10.0.0.1", "--ssh_port", "7")
    done = start(cluster, *words, script, extra={"MASTER_PORT": "4000"})
    assert done.returncode == 0, done.stderr
    assert "MASTER_PORT=4000 of the environment is not used; --master_port sets it" in done.stderr
    assert "--master_addr=10.0.0.1" in logged(cluster, "pdsh")[0]["words"][-1]  # type: ignore[index]


def test_master_address_is_what_the_first_host_says(cluster: Folder) -> None:
    answers = cluster.path / "bin" / "hostname"
    answers.write_text("#!/bin/sh\n[ \"$1\" = -I ] && echo '10.7.7.7 10.8.8.8 ' || echo h0\n")
    answers.chmod(0o755)
    assert start(cluster, "--ssh_port", "7", cluster.script("show.py", SHOW)).returncode == 0
    assert ["-p", "7", "h0", "hostname", "-I"] in logged(cluster, "ssh")
    assert seen(cluster, 0)["environment"]["MASTER_ADDR"] == "10.7.7.7"  # type: ignore[index]


def test_filters_and_counts_choose_the_hosts(cluster: Folder) -> None:
    (cluster.path / "hosts").write_text("h0 slots=4\nh1 slots=4\nh2 slots=4\n")
    script = cluster.script("nothing.py", "")
    assert start(cluster, "--include", "h0:1,3@h2", "-q", script).returncode == 0
    assert start(cluster, "--num_nodes", "2", "--num_gpus", "1", "-q", script).returncode == 0
    worlds = []
    for call in logged(cluster, "pdsh"):
        text = call["words"][-1]  # type: ignore[index]
        worlds.append(decode_world_info(re.search(r"--world_info=(\S+)", text)[1]))  # type: ignore[index]
    assert worlds == [{"h0": [1, 3], "h2": [0, 1, 2, 3]}, {"h0": [0], "h1": [0]}]
    done = start(cluster, "--num_nodes", "4", script)
    assert (done.returncode, "only 3 available: h0, h1, h2" in done.stderr) == (2, True)


def test_force_multi_takes_the_long_way_for_this_host(cluster: Folder) -> None:
    script = cluster.script("show.py", SHOW)
    path = {"PATH": f"{cluster.path / 'bin'}:{os.environ['PATH']}"}
    done = cluster.launch("--force_multi", "--num_nodes", "1", "--num_gpus", "2", script, "I am 6' tall", extra=path)
    assert done.returncode == 0, done.stderr
    assert logged(cluster, "pdsh")[0]["words"][4] == "localhost"  # type: ignore[index]
    assert seen(cluster, 1)["argv"] == ["--local_rank=1", "I am 6' tall"]


@pytest.mark.parametrize("launcher", ("pdsh", "ssh"))
def test_ending_the_front_end_ends_the_workers_on_every_host(cluster: Folder, launcher: str) -> None:
    script = cluster.script("wait.py", "import os; from say import say, wait; say(os.getpid()); wait()")
    path = {"PATH": f"{cluster.path / 'bin'}:{os.environ['PATH']}"}
    with cluster.started("--hostfile", "hosts", "--launcher", launcher, script, extra=path) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        process.wait(timeout=15)
        assert process.returncode != 0
        assert wait_until(lambda: not any(is_running(pid) for pid in pids), 3.0)


def test_ssh_nodes_end_when_the_front_end_is_killed_or_another_node_fails(cluster: Folder) -> None:
    script = cluster.script(
        "wait.py",
        "import os, sys, time; from say import say; say(os.getpid())\n"
        "if sys.argv[1] == 'fail' and os.environ['RANK'] == '1': time.sleep(.3); sys.exit(6)\n"
        "time.sleep(600)",
    )
    path = {"PATH": f"{cluster.path / 'bin'}:{os.environ['PATH']}"}
    words = ("--hostfile", "hosts", "--launcher", "ssh", "--no_local_rank", script)
    for how in ("kill", "fail"):
        with cluster.started(*words, how, extra=path) as process:
            assert process.stdout is not None
            pids = [int(process.stdout.readline()) for _ in range(2)]
            if how == "kill":
                process.kill()
            assert process.wait(timeout=15) == (-signal.SIGKILL if how == "kill" else 6)
            assert wait_until(lambda pids=pids: not any(is_running(pid) for pid in pids), 3.0)  # type: ignore[misc]


@pytest.fixture
def refused(cluster: Folder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Text with which a start is refused; in this process, since nothing gets as far as a worker."""
    monkeypatch.chdir(cluster.path)
    monkeypatch.setenv("PATH", f"{cluster.path / 'bin'}:{os.environ['PATH']}")

    def text(*words: str, kind: type[Exception] = ValueError) -> str:
        with pytest.raises(kind) as caught:
            runner.main(["--hostfile", "hosts", "--master_addr", "a", *words])
        return str(caught.value)

    return text


@pytest.mark.parametrize("launcher", ("openmpi", "mpich", "impi", "slurm", "mvapich"))
def test_launchers_that_are_not_installed_are_refused(refused: Callable[..., str], launcher: str) -> None:
    text = refused("--launcher", launcher, "--no_ssh_check", "s.py", kind=RuntimeError)
    assert text.startswith(f"--launcher {launcher}: it is not installed on this host; --launcher ssh needs only ssh")


def test_unknown_launchers_are_refused(refused: Callable[..., str]) -> None:
    text = refused("--launcher", "teleport", "s.py", kind=NotImplementedError)
    assert text.startswith("--launcher teleport: unknown; known are pdsh")


def test_what_an_mpi_starter_cannot_do_is_refused_by_name(cluster: Folder, refused: Callable[..., str]) -> None:
    install(cluster, "ompi_info", "mpirun")
    for words, said in (
        (["--include", "h0@h1"], "--include / --exclude: the openmpi launcher cannot choose hosts"),
        (["--num_gpus", "1"], "--num_nodes / --num_gpus: the openmpi launcher starts all slots"),
        (["--enable_each_rank_log", "x", "--save_pid"], "--enable_each_rank_log, --save_pid: the openmpi launcher"),
        (["--bind_cores_to_rank"], "--bind_cores_to_rank: the openmpi launcher"),
        (["--venv_script", "x"], "--venv_script: the openmpi launcher"),
    ):
        assert refused("--launcher", "openmpi", *words, "s.py").startswith(said)
    assert "argument ':' would be taken" in refused("--launcher", "openmpi", "s.py", "a", ":", "b")


def test_openmpi_runs_the_command_with_exact_words(cluster: Folder) -> None:
    install(cluster, "ompi_info", "mpirun")
    script = cluster.script("nothing.py", "")
    extra = {"NCCL_DEBUG": "a b;$c"}
    done = start(cluster, "--launcher", "openmpi", "--master_addr", "a", script, *ARGUMENTS, extra=extra)
    assert done.returncode == 0, done.stderr
    words = json.loads((cluster.path / "mpirun.json").read_text())["words"]
    assert words[:4] == ["-n", "2", "-hostfile", "hosts"]
    assert words[4:10] == ["--mca", "btl", "^openib", "--mca", "btl_tcp_if_include", "eth0"]
    assert words[words.index("NCCL_DEBUG=a b;$c") - 1] == "-x"
    assert "UCX_TLS=tcp" in words
    assert words[words.index(sys.executable) :] == [sys.executable, "-u", script, *ARGUMENTS]


# --- commands, without running them


POOL = {"w0": 4, "w1": 4}


def command_of(
    launcher: str, *words: str, active: dict[str, Any] | None = None, exports: dict[str, str] | None = None
) -> tuple[Any, dict[str, str]]:
    """(what get_cmd returns, what it put into the environment)"""
    args = runner.parse_args([*words, "--launcher", launcher, "s.py", "--a=x y", "$HOME"])
    args.master_addr = "10.0.0.1"
    world = encode_world_info(active or POOL)
    cls = LAUNCHER_CLASSES[launcher]
    made = cls(args, world) if launcher in ("pdsh", "ssh") else cls(args, world, POOL)  # type: ignore[call-arg]
    for name, content in (exports or {}).items():
        made.add_export(name, content)
    environment: dict[str, str] = {}
    return made.get_cmd(environment, active or POOL), environment


TAIL = [sys.executable, "-u", "s.py", "--a=x y", "$HOME"]


def test_pdsh_command_ends_the_run_by_its_world_and_port() -> None:
    (command, end, environment), _ = command_of("pdsh", "--master_port", "7")
    assert command[:6] == ["pdsh", "-S", "-f", "1024", "-w", "w0,w1"]
    assert "--node_rank=%n" in command[-1]
    assert environment["PDSH_RCMD_TYPE"] == "ssh"
    assert end[:6] == command[:6]
    pattern = shlex.split(end[-1])[2]
    assert re.search(pattern, command[-1])
    assert not re.search(pattern, end[-1]), "it would end the shell that carries it"


def test_mpich_command() -> None:
    command, _ = command_of("mpich", "--launcher_args", "-v", exports={"A": "b c"})
    helper = os.path.join(os.path.dirname(backends.__file__), "launcher_helper.py")
    assert command == [
        "mpirun", "-n", "8", "-ppn", "4", "-v", "-genv", "A", "b c", "-genv", "MASTER_ADDR", "10.0.0.1",
        "-genv", "MASTER_PORT", "29500", "-genv", "WORLD_SIZE", "8", "-genv", "LOCAL_SIZE", "4", "-hosts", "w0,w1",
        sys.executable, "-u", helper, "--launcher", "mpich", "s.py", "--a=x y", "$HOME",
    ]  # fmt: skip


def test_impi_command_has_one_segment_per_rank() -> None:
    command, _ = command_of("impi", "--module")
    assert command[:3] == ["mpirun", "-ppn", "4"]
    assert command[command.index("I_MPI_PIN") - 1 : command.index("I_MPI_PIN") + 2] == ["-genv", "I_MPI_PIN", "0"]
    body = command[command.index("-hosts") + 2 :]
    segments = " \0".join(body).split(" \0: \0")
    assert [segment.split(" \0") for segment in segments] == [
        [*f"-n 1 -env RANK {rank} -env LOCAL_RANK {rank % 4}".split(), sys.executable, "-u", "-m", *TAIL[2:]]
        for rank in range(8)
    ]


def test_mvapich_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = tmp_path / "hosts"
    monkeypatch.setattr(backends, "MVAPICH_TMP_HOSTFILE", str(hosts))
    command, _ = command_of("mvapich", "--no_python")
    assert command[:7] == ["mpirun", "-np", "8", "-ppn", "4", "--hostfile", str(hosts)]
    assert {"MV2_SMP_USE_CMA=0", "MV2_USE_CUDA=1", "MV2_SUPPORT_DL=1", "MV2_ENABLE_AFFINITY=0"} <= set(command)
    assert command[-3:] == ["s.py", "--a=x y", "$HOME"]
    assert hosts.read_text() == "w0\nw1\n"


@pytest.mark.parametrize(
    ("words", "active", "head"),
    (
        ([], {"w0": [0, 1], "w1": [0, 1]}, ["srun", "-n", "4"]),
        (["--num_nodes", "1"], {"w0": [0, 1]}, ["srun", "-n", "2", "--nodes", "1"]),
        (["--num_gpus", "1"], {"w0": [0], "w1": [0]}, ["srun", "-n", "2", "--gpus-per-node", "1"]),
        (["--include", "w0:0"], {"w0": [0]}, ["srun", "-n", "1", "--nodelist", "w0", "--nodes", "1"]),
        (["--launcher_args", "-p x"], {"w0": [0]}, ["srun", "-n", "1", "-p", "x"]),
    ),
)
def test_slurm_command(words: list[str], active: dict[str, object], head: list[str]) -> None:
    command, environment = command_of("slurm", *words, active=active, exports={"A": "1", "B": "x,y z"})
    assert command == [*head, "--export=ALL,A=1", *TAIL]
    assert environment == {"A": "1", "B": "x,y z", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("active", ({"w0": [1]}, {"w0": [0, 1], "w1": [0]}))
def test_slurm_refuses_what_it_cannot_choose(active: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match="the slurm launcher"):
        LAUNCHER_CLASSES["slurm"].validate_active_resources(active)


def test_openmpi_defaults_give_way_to_the_users() -> None:
    for dashes in ("-mca", "--mca"):
        command, _ = command_of("openmpi", "--launcher_args", f"{dashes} btl_tcp_if_include eth1")
        assert "eth0" not in command
        assert "eth1" in command
        assert "^openib" in command


@pytest.mark.parametrize("launcher", ("mpich", "impi", "mvapich"))
def test_unequal_hosts_are_refused(launcher: str) -> None:
    args = runner.parse_args(["s.py"])
    args.master_addr = "a"
    made = LAUNCHER_CLASSES[launcher](args, "", {"w0": 4, "w1": 2})  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="same number of slots on every host; found w0: 4, w1: 2"):
        made.get_cmd({}, {"w0": 4, "w1": 2})


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_remote_words_survive_pdsh_and_a_shell(text: str) -> None:
    word = remote_word(text)
    assert "%" not in word
    assert shlex.split(word.replace('"$(printf \'\\045\')"', "%")) == [text] or "%" in text


def test_remote_words_are_read_back_by_real_shells() -> None:
    for shell in ("sh", "bash"):
        text = " ".join(remote_word(argument) for argument in ARGUMENTS)
        shown = subprocess.run(
            [shell, "-c", f"{sys.executable} -c 'import sys, json; print(json.dumps(sys.argv[1:]))' {text}"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert json.loads(shown.stdout) == ARGUMENTS


def test_exported_paths_extend_those_of_the_other_host() -> None:
    text = export_statement("PYTHONPATH", "/a b")
    for own, expected in ((None, "/a b"), ("/c", "/a b:/c")):
        environment = {} if own is None else {"PYTHONPATH": own}
        command = ["/bin/sh", "-c", f'{text} echo "$PYTHONPATH"']
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert shown.stdout == f"{expected}\n"


def test_mpich_helper_translates_rank_variables_and_becomes_the_worker(folder: Folder) -> None:
    script = folder.script("show.py", SHOW)
    helper = os.path.join(os.path.dirname(backends.__file__), "launcher_helper.py")
    extra = {"PMI_RANK": "3", "MPI_LOCALRANKID": "1"}
    done = folder.launch(command=[sys.executable, helper, "--launcher", "mpich", script, *ARGUMENTS], extra=extra)
    assert done.returncode == 0, done.stderr
    worker = seen(folder, 3)
    assert worker["argv"] == ARGUMENTS
    assert worker["environment"]["LOCAL_RANK"] == "1"  # type: ignore[index]


def test_rank_variables_must_be_there_and_agree() -> None:
    assert env_mapping({"A": "1", "B": "1"}, ["A", "B", "C"])["RANK"] == "1"
    assert env_mapping({"B": "2"}, None, ["A", "B"])["LOCAL_RANK"] == "2"
    with pytest.raises(ValueError, match="RANK: none of A, B is set"):
        env_mapping({}, ["A", "B"])
    with pytest.raises(ValueError, match="disagree"):
        env_mapping({"A": "1", "B": "2"}, ["A", "B"])


def test_ds_ssh_runs_pdsh_on_all_hosts(cluster: Folder) -> None:
    code = "from deepspeed.launcher.tools import ds_ssh; ds_ssh()"
    path = {"PATH": f"{cluster.path / 'bin'}:{os.environ['PATH']}"}
    done = cluster.launch(command=[sys.executable, "-c", code, "-f", "hosts", "echo", "hi", "%h"], extra=path)
    assert sorted(done.stdout.split("\n")) == ["", "hi h0", "hi h1"]
    done = cluster.launch(command=[sys.executable, "-c", code, "echo"], extra=path)
    assert (done.returncode, "/job/hostfile does not exist" in done.stderr) == (1, True)
    done = cluster.launch(command=[sys.executable, "-c", code, "-f", "hosts", "echo"], extra={"PATH": ""})
    assert (done.returncode, "pdsh is not installed" in done.stderr) == (1, True)


def test_args_are_plain_namespaces() -> None:
    assert isinstance(runner.parse_args(["s.py"]), argparse.Namespace)
