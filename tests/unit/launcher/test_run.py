"""Runs of the real command on this host: arguments, environment, exit codes, output, options."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.launcher.hostfile import encode_world_info
from tests.unit.launcher.launching import ROOT, Folder, clean_environment

# Writes what a worker sees to <folder>/seen<rank>.
SHOW = """
import json, os, sys
seen = {"argv": sys.argv[1:], "environment": dict(os.environ), "affinity": sorted(os.sched_getaffinity(0)),
        "stdin": os.readlink("/proc/self/fd/0"), "cwd": os.getcwd(), "session": os.getsid(0) == os.getpid()}
with open("seen" + os.environ["RANK"], "w") as out:
    json.dump(seen, out)
"""
ARGUMENTS = [
    "--name=a b", "--q", 'he said "x"', "--d=$HOME", "--j", '{"k": [1, 2]}', "--e=", "", "it's", "100% %n %h %%",
    "two\nlines", "`ls` $(ls)", "\\", "*", "--", "~", "ü ☃", "-x", ";", "--num_gpus", "9",
]  # fmt: skip


def seen(folder: Folder, rank: int) -> dict[str, object]:
    return json.loads((folder.path / f"seen{rank}").read_text())


def test_every_rank_sees_the_arguments_byte_for_byte(folder: Folder) -> None:
    script = folder.script("show.py", SHOW)
    done = folder.launch("--num_gpus", "2", "--no_local_rank", script, *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert seen(folder, rank)["argv"] == ARGUMENTS


def test_workers_get_the_rendezvous_variables_and_keep_the_users(folder: Folder) -> None:
    script = folder.script("show.py", SHOW)
    done = folder.launch("--num_gpus", "3", script, "x", extra={"MINE": 'a "b" $c', "RANK": "77"})
    assert done.returncode == 0, done.stderr
    ports = set()
    for rank in range(3):
        worker = seen(folder, rank)
        environment = worker["environment"]
        assert isinstance(environment, dict)
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_SIZE": "3",
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "CUDA_VISIBLE_DEVICES": "0,1,2",
            "MINE": 'a "b" $c',
            "HOME": str(folder.home),
        }
        assert {name: environment[name] for name in expected} == expected
        ports.add(environment["MASTER_PORT"])
        assert worker["argv"] == [f"--local_rank={rank}", "x"]
        assert worker["cwd"] == str(folder.path)
        assert worker["session"], "a worker leads its own session, so its children can be ended with it"
    assert len(ports) == 1


def test_threads_are_shared_out_unless_the_user_says(folder: Folder) -> None:
    script = folder.script("show.py", SHOW)
    cores = len(os.sched_getaffinity(0))
    folder.launch("--num_gpus", "2", script)
    threads = int(seen(folder, 0)["environment"]["OMP_NUM_THREADS"])  # type: ignore[index]
    assert 1 <= threads <= max(1, cores // 2)
    folder.launch("--num_gpus", "2", script, extra={"OMP_NUM_THREADS": "5"})
    assert seen(folder, 0)["environment"]["OMP_NUM_THREADS"] == "5"  # type: ignore[index]
    folder.launch("--num_gpus", "1", script)
    assert "OMP_NUM_THREADS" not in seen(folder, 0)["environment"]  # type: ignore[operator]


def test_environment_files_of_home_and_folder_reach_the_workers(folder: Folder) -> None:
    script = folder.script("show.py", SHOW)
    (folder.home / ".deepspeed_env").write_text("FROM_HOME=1\nBOTH=home\n")
    (folder.path / ".deepspeed_env").write_text('BOTH=here\nJSON={"a": "b=c"}\nPYTHONPATH=/mine\n')
    done = folder.launch("--num_gpus", "1", script, extra={"BOTH": "shell"})
    environment = seen(folder, 0)["environment"]
    assert isinstance(environment, dict)
    assert (environment["FROM_HOME"], environment["BOTH"], environment["JSON"]) == ("1", "here", '{"a": "b=c"}')
    assert environment["PYTHONPATH"] == f"/mine:{ROOT}"
    assert "in place of the environment's own: BOTH, PYTHONPATH" in done.stderr


def test_environment_file_can_have_another_name(folder: Folder) -> None:
    script = folder.script("show.py", SHOW)
    (folder.path / "settings").write_text("FROM_FILE=1\n")
    folder.launch("--num_gpus", "1", script, extra={"DS_ENV_FILE": "settings"})
    assert seen(folder, 0)["environment"]["FROM_FILE"] == "1"  # type: ignore[index]


def test_hidden_gpus_stay_hidden_in_the_workers(folder: Folder) -> None:
    script = folder.script("show.py", SHOW)
    assert folder.launch("--num_gpus", "2", script, extra={"CUDA_VISIBLE_DEVICES": ""}).returncode == 0
    assert seen(folder, 1)["environment"]["CUDA_VISIBLE_DEVICES"] == ""  # type: ignore[index]


def test_slots_with_gaps_become_consecutive_local_ranks(folder: Folder) -> None:
    script = folder.script("show.py", SHOW)
    done = folder.launch("--include", "localhost:1,3", script)
    assert done.returncode == 0, done.stderr
    assert [seen(folder, rank)["argv"] for rank in range(2)] == [["--local_rank=0"], ["--local_rank=1"]]
    assert seen(folder, 1)["environment"]["CUDA_VISIBLE_DEVICES"] == "1,3"  # type: ignore[index]


def test_one_line_says_how_many_ranks_where_and_why(folder: Folder) -> None:
    script = folder.script("nothing.py", "")
    done = folder.launch("--num_gpus", "2", script)
    (line,) = done.stderr.splitlines()
    assert line.startswith("[deepspeed] 2 ranks on cpu 0,1 (--num_gpus 2; DS_ACCELERATOR=cpu); rank 0 at 127.0.0.1:")
    assert line.endswith("Order: --include/--exclude, --num_gpus, CUDA_VISIBLE_DEVICES, all")
    assert folder.launch("-q", "--num_gpus", "2", script).stderr == ""


def test_output_of_the_workers_passes_unchanged(folder: Folder) -> None:
    script = folder.script(
        "talk.py", "import os, sys\nos.write(1, b'out \\xff\\x00 no newline')\nos.write(2, b'err \\xfe')\n"
    )
    done = subprocess.run(
        folder.command("-q", "--num_gpus", "1", script),
        cwd=folder.path, env=clean_environment(folder.home), capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (b"out \xff\x00 no newline", b"err \xfe")


def test_python_of_the_workers_is_unbuffered_and_ours(folder: Folder) -> None:
    script = folder.script("who.py", "import sys\nsys.stdout.write(sys.executable)\nimport os\nos._exit(0)\n")
    done = folder.launch("-q", "--num_gpus", "1", script)
    assert done.stdout == sys.executable, "os._exit skips flushing, so only unbuffered output arrives"


def test_modules_and_programs(folder: Folder) -> None:
    (folder.path / "package").mkdir()
    folder.script("package/__init__.py", "")
    folder.script("package/job.py", "import sys; print(__name__, __package__, sys.argv[1:])")
    done = folder.launch("-q", "--num_gpus", "1", "--module", "package.job", "a b")
    assert done.stdout == "__main__ package ['--local_rank=0', 'a b']\n"
    program = folder.script("program.sh", '#!/bin/sh\nprintf "%s|" "$RANK" "$@"\n')
    (folder.path / program).chmod(0o755)
    done = folder.launch("-q", "--num_gpus", "1", "--no_python", "--no_local_rank", "./program.sh", "a b", "")
    assert done.stdout == "0|a b||"


@pytest.mark.parametrize(
    ("body", "code"),
    (
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("import os; os.abort()", 134),
        ("import os; os.environ['RANK'] == '1' and 1 / 0", 1),
    ),
)
def test_exit_code_is_handed_on(folder: Folder, body: str, code: int) -> None:
    assert folder.launch("--num_gpus", "2", folder.script("end.py", body)).returncode == code


def test_programs_that_cannot_start_give_the_shells_codes(folder: Folder) -> None:
    folder.script("plain.txt", "")
    (folder.path / "plain.txt").chmod(0o644)
    for program, code, said in (
        ("./none", 127, "./none: no such program"),
        ("plain.txt", 127, "for the file in this folder write ./plain.txt"),
        ("./plain.txt", 126, "not executable"),
    ):
        done = folder.launch("--num_gpus", "2", "--no_python", program)
        assert done.returncode == code
        assert said in done.stderr


def test_a_script_that_does_not_exist_is_refused_before_any_start(folder: Folder) -> None:
    done = folder.launch("--num_gpus", "2", "none.py")
    assert done.returncode == 2
    assert done.stderr == f"[deepspeed] none.py: no such script (current folder: {folder.path})\n"


def test_refusals_are_one_message_without_traceback(folder: Folder) -> None:
    script = folder.script("show.py", SHOW)
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = folder.launch("--num_gpus", "2", "--master_port", str(port), script)
    assert done.returncode == 2
    assert f"--master_port {port}: port busy" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder.path / "seen0").exists()


def test_given_port_and_address_reach_the_workers(folder: Folder) -> None:
    script = folder.script("show.py", SHOW)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    done = folder.launch("--num_gpus", "1", "--master_port", port, "--master_addr", "localhost", script)
    assert done.returncode == 0, done.stderr
    environment = seen(folder, 0)["environment"]
    assert isinstance(environment, dict)
    assert (environment["MASTER_PORT"], environment["MASTER_ADDR"]) == (port, "localhost")


def test_ranks_find_each_other(folder: Folder) -> None:
    script = folder.script(
        "meet.py",
        "import torch, torch.distributed as dist\n"
        "from say import say\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([dist.get_rank() + 1.0])\n"
        "dist.all_reduce(total)\n"
        "say(dist.get_rank(), total.item())\n"
        "dist.destroy_process_group()\n",
    )
    done = folder.launch("-q", "--num_gpus", "2", "--no_local_rank", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 3.0", "1 3.0"]


def test_each_rank_can_have_its_own_log(folder: Folder) -> None:
    script = folder.script("talk.py", "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)")
    done = folder.launch("-q", "--num_gpus", "2", "--enable_each_rank_log", "logs/deep", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    logs = sorted((folder.path / "logs" / "deep").iterdir())
    assert [log.name[14:] for log in logs] == ["_rank0.log", "_rank1.log"]
    assert logs[0].name[:14].isdigit()
    assert [log.read_text() for log in logs] == ["out 0\nerr\n", "out 1\nerr\n"]


def test_pid_file_names_the_launcher_and_goes_away(folder: Folder) -> None:
    script = folder.script("wait.py", "import time; print('up', flush=True); time.sleep(60)")
    with folder.started("--num_gpus", "1", "--save_pid", script) as process:
        assert process.stdout is not None
        process.stdout.readline()
        file = Path(f"/tmp/{process.pid}.deepspeed")
        assert file.read_text() == str(process.pid)
        process.terminate()
        process.wait(timeout=10)
    assert not file.exists()


def test_cores_are_shared_out_among_the_ranks(folder: Folder) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    script = folder.script("show.py", SHOW)
    listing = ",".join(map(str, cores))
    # An empty PATH: no numactl, so the launcher binds by itself.
    extra = {"PATH": str(folder.home)}
    done = folder.launch("--num_gpus", "2", "--bind_cores_to_rank", "--bind_core_list", listing, script, extra=extra)
    assert done.returncode == 0, done.stderr
    assert [seen(folder, rank)["affinity"] for rank in range(2)] == [[cores[0]], [cores[1]]]
    assert seen(folder, 0)["environment"]["OMP_NUM_THREADS"] == "1"  # type: ignore[index]
    assert "numactl is not installed" in done.stderr


THREADS = """
import json, os
import torch
import deepspeed
from deepspeed import comm as dist
from deepspeed.comm import same_host
from deepspeed.ops import native_kernels
from deepspeed.ops.op_builder import AsyncIOBuilder

deepspeed.init_distributed("gloo")
rank = dist.get_rank()
for _ in range(4):
    dist.all_reduce(torch.ones(4))
dist.all_reduce(torch.ones(1 << 20), async_op=True).wait()  # the transport's thread
native_kernels.sumsq([torch.ones(1 << 20)])  # those of the optimizers
handle = AsyncIOBuilder().load().aio_handle(1 << 20, 8, False, True, 2)  # those of files
data = torch.zeros(4 << 20, dtype=torch.uint8)
handle.async_pwrite(data, f"data{rank}", 0)
handle.wait()
cores = sorted({core for task in os.listdir("/proc/self/task") for core in os.sched_getaffinity(int(task))})
with open(f"cores{rank}", "w") as file:
    json.dump([same_host.describe(), len(os.listdir("/proc/self/task")), cores], file)
dist.barrier()
"""


def test_every_thread_of_a_bound_rank_keeps_to_its_cores(folder: Folder) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    script = folder.script("threads.py", THREADS)
    listing = ",".join(map(str, cores))
    extra = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    done = folder.launch("--num_gpus", "2", "--bind_cores_to_rank", "--bind_core_list", listing, script, extra=extra)
    assert done.returncode == 0, done.stderr
    for rank, core in enumerate(cores):
        way, threads, used = json.loads((folder.path / f"cores{rank}").read_text())
        assert way == "shared memory"
        assert threads > 3
        assert used == [core]


def test_numactl_goes_in_front_of_the_command_where_it_is_installed(folder: Folder) -> None:
    stub = folder.path / "bin"
    stub.mkdir()
    (stub / "numactl").write_text('#!/bin/sh\necho "numactl $*" >> numactl.log\nshift 2\nexec "$@"\n')
    (stub / "numactl").chmod(0o755)
    script = folder.script("show.py", SHOW)
    extra = {"PATH": f"{stub}:{os.environ['PATH']}"}
    done = folder.launch("--num_gpus", "1", "--bind_cores_to_rank", "--bind_core_list", "0", script, "a b", extra=extra)
    assert done.returncode == 0, done.stderr
    assert (folder.path / "numactl.log").read_text().startswith(f"numactl -C 0 {sys.executable} -u show.py")
    assert seen(folder, 0)["argv"] == ["--local_rank=0", "a b"]


def test_binding_is_refused_when_it_cannot_hold(folder: Folder) -> None:
    script = folder.script("show.py", SHOW)
    done = folder.launch("--num_gpus", "1", "--bind_cores_to_rank", script, extra={"KMP_AFFINITY": "compact"})
    assert done.returncode == 2
    assert "KMP_AFFINITY" in done.stderr
    done = folder.launch("--num_gpus", "2", "--bind_cores_to_rank", "--bind_core_list", "0", script)
    assert done.returncode == 2
    assert "2 ranks on this machine but only 1 cores" in done.stderr


def test_options_without_effect_on_one_node_are_named(folder: Folder) -> None:
    script = folder.script("nothing.py", "")
    done = folder.launch("--num_gpus", "1", "--ssh_port", "22", "--launcher_args", "-v", script)
    assert done.returncode == 0
    assert "--launcher_args, --ssh_port: without effect" in done.stderr


def test_a_missing_hostfile_that_was_asked_for_is_named(folder: Folder) -> None:
    done = folder.launch("--hostfile", "none", "--num_gpus", "1", folder.script("nothing.py", ""))
    assert done.returncode == 0
    assert "--hostfile none: no such file; using this host alone" in done.stderr


def test_one_host_of_a_hostfile_runs_here(folder: Folder) -> None:
    (folder.path / "hosts").write_text("localhost slots=3\nother slots=2\n")
    script = folder.script("show.py", SHOW)
    done = folder.launch("--hostfile", "hosts", "--include", "localhost:0,2", script)
    assert done.returncode == 0, done.stderr
    assert seen(folder, 1)["environment"]["CUDA_VISIBLE_DEVICES"] == "0,2"  # type: ignore[index]


def test_nodes_can_start_themselves_without_ssh(folder: Folder) -> None:
    script = folder.script("show.py", SHOW)
    (folder.path / "hosts").write_text("h0 slots=1\nh1 slots=2\n")
    for node in ("0", "1"):
        done = folder.launch(
            "--hostfile", "hosts", "--no_ssh", "--node_rank", node, "--master_addr", "10.1.2.3", script
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    found = [seen(folder, rank)["environment"] for rank in range(3)]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [tuple(environment[name] for name in names) for environment in found] == [  # type: ignore[index]
        ("0", "0", "3", "1", "0", "2", "10.1.2.3", "29500"),
        ("1", "0", "3", "2", "1", "2", "10.1.2.3", "29500"),
        ("2", "1", "3", "2", "1", "2", "10.1.2.3", "29500"),
    ]


def test_nodes_of_a_scheduler_need_no_hostfile(folder: Folder) -> None:
    script = folder.script("show.py", SHOW)
    extra = {"MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "4321"}
    words = ("--no_ssh", "--num_nodes", "2", "--num_gpus", "1")
    assert folder.launch(*words, "--node_rank", "1", script, extra=extra).returncode == 0
    environment = seen(folder, 1)["environment"]
    assert isinstance(environment, dict)
    assert (environment["WORLD_SIZE"], environment["MASTER_PORT"], environment["CROSS_SIZE"]) == ("2", "4321", "2")
    done = folder.launch(*words, script, extra=extra)
    assert (done.returncode, "needs --node_rank" in done.stderr) == (2, True)
    done = folder.launch(*words, "--node_rank", "0", script)
    assert (done.returncode, "needs --master_addr" in done.stderr) == (2, True)


def test_node_launcher_runs_as_a_module(folder: Folder) -> None:
    script = folder.script("show.py", SHOW)
    command = [
        sys.executable, "-u", "-m", "deepspeed.launcher.launch",
        f"--world_info={encode_world_info({'a': [0], 'b': [0, 3]})}", "--node_rank=1", "--master_addr=10.0.0.9",
        "--master_port=1234", "--log_level=info", script, *ARGUMENTS,
    ]  # fmt: skip
    done = folder.launch(command=command)
    assert done.returncode == 0, done.stderr
    worker = seen(folder, 2)
    assert worker["argv"] == ["--local_rank=1", *ARGUMENTS]
    environment = worker["environment"]
    assert isinstance(environment, dict)
    assert (environment["WORLD_SIZE"], environment["CUDA_VISIBLE_DEVICES"]) == ("3", "0,3")
    assert folder.launch(command=[*command[:4], script]).returncode == 2


def test_the_launcher_loads_nothing_heavy(folder: Folder) -> None:
    """A whole run in this interpreter; what start-up time is made of is which modules get loaded."""
    script = folder.script("nothing.py", "")
    code = (
        "import sys\n"
        "from deepspeed.launcher.runner import main\n"
        f"main(['-q', '--num_gpus', '2', {script!r}])\n"
        "print(' '.join(sorted(sys.modules)))\n"
    )
    done = folder.launch(command=[sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    heavy = {"torch", "numpy", "pydantic", "rich", "hjson", "psutil", "tqdm", "packaging", "multiprocessing", "asyncio",
             "logging", "json", "email", "http", "xml", "deepspeed.utils.logging"}  # fmt: skip
    assert not loaded & heavy
    assert {name for name in loaded if name.startswith("deepspeed.")} <= {
        "deepspeed.git_version_info", "deepspeed.launcher", "deepspeed.unbuilt",
        *(name for name in loaded if name.startswith("deepspeed.launcher.")),
    }  # fmt: skip


def test_importing_the_launcher_package_loads_nothing_else(folder: Folder) -> None:
    code = (
        "import sys, deepspeed; before = set(sys.modules); import deepspeed.launcher\n"
        "print(*(set(sys.modules) - before))"
    )
    assert folder.launch(command=[sys.executable, "-c", code]).stdout.split() == ["deepspeed.launcher"]


def test_main_returns_in_the_callers_process_and_restores_its_signal_handlers(folder: Folder) -> None:
    script = folder.script("nothing.py", "")
    code = (
        "import signal\n"
        "from deepspeed.launcher.runner import main\n"
        "numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)\n"
        "before = [signal.getsignal(n) for n in numbers]\n"
        f"main(['-q', '--num_gpus', '2', {script!r}])\n"
        "assert [signal.getsignal(n) for n in numbers] == before\n"
        "print(signal.set_wakeup_fd(-1))\n"
    )
    assert folder.launch(command=[sys.executable, "-c", code]).stdout == "-1\n"


def test_main_works_outside_the_main_thread(folder: Folder) -> None:
    script = folder.script("end.py", "import os; os.environ['RANK'] == '1' and exit(5)")
    code = (
        "import concurrent.futures\n"
        "from deepspeed.launcher.runner import main\n"
        "with concurrent.futures.ThreadPoolExecutor(1) as pool:\n"
        f"    problem = pool.submit(main, ['-q', '--num_gpus', '2', {script!r}]).exception()\n"
        "print(repr(problem))\n"
    )
    assert folder.launch(command=[sys.executable, "-c", code]).stdout == "SystemExit(5)\n"
