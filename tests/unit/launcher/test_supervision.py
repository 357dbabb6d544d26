"""One worker dies, or the launcher is told to end or is killed: nothing stays behind, and the message explains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from deepspeed.launcher import diagnosis
from deepspeed.launcher.diagnosis import FailureContext, failure_report
from deepspeed.launcher.worker import Worker, WorkerSpec
from tests.unit.launcher.launching import Folder, is_running, state, wait_until

# Starts an ordinary child and one with a session of its own, tells all three numbers, then does what LAST says.
FAMILY = """
import os, signal, subprocess, sys, time
from say import say
if "deaf" in sys.argv:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
sleeper = [sys.executable, "-uc", code]
children = [subprocess.Popen(sleeper, stdout=subprocess.PIPE, start_new_session=own) for own in (False, True)]
for child in children:
    child.stdout.read(2)
say(os.getpid(), *(child.pid for child in children))
if os.environ["RANK"] == "1" and "die" in sys.argv:
    sys.stdin.readline() if sys.stdin.isatty() else time.sleep(0.3)
    os._exit(3)
if os.environ["RANK"] == "1" and "killed" in sys.argv:
    memory = bytearray(64 << 20)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def told_pids(process: subprocess.Popen[str], workers: int) -> list[int]:
    assert process.stdout is not None
    return [int(word) for _ in range(workers) for word in process.stdout.readline().split()]


@pytest.mark.parametrize(("how", "code"), (("die", 3), ("killed", 137)))
@pytest.mark.parametrize("others", ("polite", "deaf"))
def test_a_dead_worker_ends_all_others_and_their_children_within_a_second(
    folder: Folder, how: str, code: int, others: str
) -> None:
    script = folder.script("family.py", FAMILY)
    with folder.started("--num_gpus", "2", script, how, others) as process:
        pids = told_pids(process, 2)
        assert len(pids) == 6
        worker_of_rank_1_is_gone = wait_until(lambda: not all(is_running(pid) for pid in pids), 5)
        assert worker_of_rank_1_is_gone
        assert wait_until(lambda: not any(is_running(pid) for pid in pids), 1.0)
        assert process.wait(timeout=10) == code


def test_workers_that_obey_are_gone_at_once(folder: Folder) -> None:
    """Without handlers nothing has to wait for the end of the grace period, however long it is."""
    body = "import os, time\nif os.environ['RANK'] == '0': time.sleep(.2); os._exit(9)\ntime.sleep(60)"
    done = folder.launch("--num_gpus", "3", folder.script("end.py", body), extra={"DS_LAUNCH_GRACE": "20"})
    match = re.search(r"ended within (\d+\.\d\d) s", done.stderr)
    assert match is not None, done.stderr
    assert float(match[1]) < 5.0


@pytest.mark.parametrize("others", ("polite", "deaf"))
def test_nothing_survives_the_launcher_when_it_is_killed(folder: Folder, others: str) -> None:
    script = folder.script("family.py", FAMILY)
    with folder.started("--num_gpus", "2", script, others) as process:
        pids = told_pids(process, 2)
        process.kill()
        process.wait(timeout=5)
        assert wait_until(lambda: not any(is_running(pid) for pid in pids), 1.0)


def test_workers_die_with_the_launcher_even_without_the_guardian(folder: Folder) -> None:
    """Somebody kills every process with the launcher's command line, the guardian among them."""
    script = folder.script("family.py", FAMILY)
    with folder.started("--num_gpus", "2", script) as process:
        pids = told_pids(process, 2)
        workers = (pids[0], pids[3])
        kin = [int(pid) for pid in children_of(process.pid) if int(pid) not in workers]
        assert len(kin) == 1
        for pid in (*kin, process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(timeout=5)
        assert wait_until(lambda: not any(is_running(pid) for pid in workers), 1.0)
        for pid in pids:  # the workers' children had nobody left to care for them
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as text:
        return text.read().split()


def test_a_run_that_ends_well_leaves_background_programs_alone(folder: Folder) -> None:
    script = folder.script(
        "viewer.py",
        "import subprocess, sys\n"
        "viewer = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)\n"
        "print(viewer.pid)\nviewer.returncode = 0\n",
    )
    done = folder.launch("-q", "--num_gpus", "1", script)
    viewer = int(done.stdout)
    assert is_running(viewer)
    os.kill(viewer, signal.SIGKILL)


GRACEFUL = """
import os, signal, sys, time
from say import say, wait
def finish(number, frame):
    time.sleep(0.3)
    say("rank", os.environ["RANK"], "finished after", signal.Signals(number).name)
    sys.exit(int(os.environ.get("CODE", "0")))
signal.signal(signal.SIGTERM, finish)
signal.signal(signal.SIGINT, finish)
signal.signal(signal.SIGUSR1, lambda number, frame: say("noted"))
say("up")
wait()
"""


@pytest.mark.parametrize("signum", (signal.SIGTERM, signal.SIGINT))
@pytest.mark.parametrize("code", (0, 4))
def test_signals_are_forwarded_and_workers_may_finish(folder: Folder, signum: signal.Signals, code: int) -> None:
    script = folder.script("graceful.py", GRACEFUL)
    with folder.started("--num_gpus", "2", script, extra={"CODE": str(code)}) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        process.send_signal(signal.SIGUSR1)
        assert [process.stdout.readline() for _ in range(2)] == ["noted\n"] * 2
        process.send_signal(signum)
        process.send_signal(signum)  # schedulers signal the process and its group: one request, not two
        out, err = process.communicate(timeout=10)
    assert sorted(out.splitlines()) == [f"rank {rank} finished after {signum.name}" for rank in range(2)]
    assert process.returncode == code
    assert f"{signum.name} passed on to 2 workers" in err
    assert "likely cause" not in err


# The launcher, with a signal to itself after the start of the second worker.
INTERRUPTED_START = """
import os, signal, sys
from deepspeed.launcher import runner, supervisor
started = []
class Worker(supervisor.Worker):
    def __init__(self, spec):
        super().__init__(spec)
        started.append(spec.name)
        if len(started) == 2:
            os.kill(os.getpid(), int(sys.argv[1]))
supervisor.Worker = Worker
try:
    runner.main(["--num_gpus", "4", "wait.py"])
finally:
    print(*started, sep=",")
"""


@pytest.mark.parametrize("signum", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_between_two_starts_ends_the_starting(folder: Folder, signum: signal.Signals) -> None:
    # They end well on the signal, so the exit code is that of those that never ran.
    folder.script("wait.py", "import time\ntry:\n    time.sleep(60)\nfinally:\n    import os; os._exit(0)")
    done = folder.launch(command=[sys.executable, "-c", INTERRUPTED_START, str(int(signum))])
    assert done.stdout == "rank 0,rank 1\n", done.stderr
    assert f"{signum.name} passed on to 2 workers, 2 more are not started" in done.stderr
    assert done.returncode == 128 + signum


def test_default_reaction_to_a_signal_gives_the_shells_code(folder: Folder) -> None:
    script = folder.script("wait.py", "import time; from say import say; say('up'); time.sleep(60)")
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        with folder.started("-q", "--num_gpus", "2", script) as process:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
            process.send_signal(signum)
            assert process.wait(timeout=10) == 128 + signum


def test_second_interrupt_ends_deaf_workers_and_their_children_at_once(folder: Folder) -> None:
    script = folder.script("family.py", FAMILY)
    with folder.started("--num_gpus", "2", script, "deaf") as process:
        pids = told_pids(process, 2)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert all(is_running(pid) for pid in pids)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
        assert wait_until(lambda: not any(is_running(pid) for pid in pids), 2.0)


def test_deaf_workers_are_killed_when_the_grace_is_over(folder: Folder) -> None:
    script = folder.script("family.py", FAMILY)
    with folder.started("--num_gpus", "1", script, "deaf", extra={"DS_LAUNCH_GRACE": "0.4"}) as process:
        pids = told_pids(process, 1)
        process.terminate()
        assert process.wait(timeout=10) == 143
        assert wait_until(lambda: not any(is_running(pid) for pid in pids), 2.0)


def test_children_of_a_wrapper_get_what_the_wrapper_leaves(folder: Folder) -> None:
    """A shell ends at once on SIGTERM; its child still gets the chance to finish."""
    folder.script("graceful.py", GRACEFUL)
    wrapper = folder.script("wrap.sh", f"#!/bin/sh\n{sys.executable} graceful.py\necho never\n")
    (folder.path / wrapper).chmod(0o755)
    with folder.started("--num_gpus", "1", "--no_python", "--no_local_rank", "./wrap.sh") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        out, _ = process.communicate(timeout=10)
    assert out == "rank 0 finished after SIGTERM\n"
    assert process.returncode == 143


def test_signals_ignored_at_the_start_stay_ignored(folder: Folder) -> None:
    """nohup: the launcher and its workers go on when the terminal goes away."""
    script = folder.script("wait.py", "import time; print('up', flush=True); time.sleep(0.6); print('done')")
    command = ["nohup", *folder.command("-q", "--num_gpus", "1", script)]
    code = (
        "import os, signal, subprocess, sys\n"
        f"process = subprocess.Popen({command!r}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)\n"
        "process.stdout.readline()\n"
        "process.send_signal(signal.SIGHUP)\n"
        "print(process.communicate()[0], process.returncode)\n"
    )
    assert folder.launch(command=[sys.executable, "-c", code]).stdout == "done\n 0\n"


def test_stop_and_continue_reach_the_workers(folder: Folder) -> None:
    script = folder.script("wait.py", "import os, time; from say import say; say(os.getpid()); time.sleep(60)")
    with folder.started("-q", "--num_gpus", "2", script) as process:
        pids = [*told_pids(process, 2), process.pid]

        def states() -> str:
            return "".join(state(pid) for pid in pids)

        process.send_signal(signal.SIGTSTP)
        assert wait_until(lambda: states() == "TTT", 2), states()
        process.send_signal(signal.SIGCONT)
        assert wait_until(lambda: states() == "SSS", 2), states()
        process.terminate()
        assert process.wait(timeout=5) == 143


def test_killed_worker_is_explained_with_host_memory_and_log(folder: Folder) -> None:
    script = folder.script("family.py", FAMILY)
    done = folder.launch("--num_gpus", "2", "--enable_each_rank_log", "logs", script, "killed")
    lines = done.stderr.splitlines()
    host = os.uname().nodename
    assert re.search(
        rf"rank 1 on {re.escape(host)} \(pid \d+, local rank 1, cpu\) was killed by SIGKILL \(signal 9\) after \d",
        done.stderr,
    )
    assert "most often the host ran out of memory" in done.stderr
    memory = next(line for line in lines if "memory: " in line)
    peak = re.search(r"peak was (\d+) MiB; the limit is \d+\.\d\d GiB, (the host's|this container's)", memory)
    assert peak is not None, memory
    assert 64 <= int(peak[1]) < 200, "the worker had 64 MiB of its own beside the interpreter"
    assert any(re.search(r"log: logs/\d{14}_rank1\.log$", line) for line in lines)
    assert lines[-1] == "[deepspeed] exit code 137"


def test_without_log_files_the_message_says_how_to_get_them(folder: Folder) -> None:
    done = folder.launch("--num_gpus", "1", folder.script("end.py", "raise SystemExit(1)"))
    assert "--enable_each_rank_log DIR keeps one file per rank" in done.stderr


def test_log_of_the_failed_rank_is_quoted(folder: Folder) -> None:
    script = folder.script("end.py", "print('first'); raise RuntimeError('why it ended')")
    done = folder.launch("--num_gpus", "1", "--enable_each_rank_log", "logs", script)
    assert done.returncode == 1
    assert "[deepspeed]     RuntimeError: why it ended" in done.stderr


def test_refused_local_rank_gets_a_hint(folder: Folder) -> None:
    body = "import argparse, say; argparse.ArgumentParser().parse_args(); say.say('fine')"
    script = folder.script("strict.py", body)
    done = folder.launch("--num_gpus", "2", script)
    assert done.returncode == 2
    assert "does not accept --local_rank, start with --no_local_rank and let it read LOCAL_RANK" in done.stderr
    done = folder.launch("-q", "--num_gpus", "2", "--no_local_rank", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\nfine\n", "")


def test_code_2_gets_no_hint_when_nothing_was_added(folder: Folder) -> None:
    done = folder.launch("--num_gpus", "1", "--no_local_rank", folder.script("end.py", "raise SystemExit(2)"))
    assert "local_rank" not in done.stderr


@pytest.mark.parametrize(
    ("signum", "said"),
    (
        (signal.SIGSEGV, "PYTHONFAULTHANDLER=1"),
        (signal.SIGABRT, "native code gave up"),
        (signal.SIGILL, "CPU instructions this CPU does not have"),
        (signal.SIGBUS, "/dev/shm has"),
        (signal.SIGTERM, "a scheduler"),
    ),
)
def test_each_signal_has_its_cause(signum: signal.Signals, said: str) -> None:
    assert said in report_of(f"import os; os.kill(os.getpid(), {int(signum)})")


def test_codes_above_128_of_wrappers_are_read_as_signals() -> None:
    assert "ran out of memory" in report_of("raise SystemExit(137)")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    (
        (3, 4, "its count of out-of-memory kills rose from 3 to 4"),
        (3, 3, "did not rise during this run"),
        (None, None, "most often the host ran out of memory"),
    ),
)
def test_count_of_the_kernel_decides_between_likely_and_certain(
    monkeypatch: pytest.MonkeyPatch, before: int | None, after: int | None, said: str
) -> None:
    monkeypatch.setattr(diagnosis, "oom_kills", lambda: after)
    assert said in report_of("import os; os.kill(os.getpid(), 9)", oom_kills_before=before)


def report_of(code: str, *, oom_kills_before: int | None = None) -> str:
    """Report about one worker that runs ``code``."""
    argv = (sys.executable, "-S", "-c", code)
    worker = Worker(WorkerSpec(name="rank 0", place="cpu", argv=argv, environment={"PYTHONFAULTHANDLER": ""}))
    assert wait_until(worker.look, 10)
    worker.reap()
    context = FailureContext("box", adds_local_rank=True)
    return failure_report(worker, [], context, seconds_to_end=0.1, oom_kills_before=oom_kills_before)


def test_bad_grace_is_refused(folder: Folder) -> None:
    script = folder.script("nothing.py", "")
    done = folder.launch("--num_gpus", "1", script, extra={"DS_LAUNCH_GRACE": "soon"})
    assert (done.returncode, "DS_LAUNCH_GRACE=soon: expected a number of seconds" in done.stderr) == (2, True)


def test_a_run_inside_a_run_ends_with_it(folder: Folder) -> None:
    """The outer launcher also finds workers of a launcher that one of its own workers started."""
    folder.script("family.py", FAMILY)
    command = folder.command("-q", "--num_gpus", "1", "family.py", "deaf")
    body = f"import os, subprocess, time\nif os.environ['RANK'] == '0': subprocess.run({command!r})\ntime.sleep(60)"
    outer = folder.script("outer.py", body)
    with folder.started("--num_gpus", "2", outer) as process:
        pids = told_pids(process, 1)
        process.kill()
        process.wait(timeout=5)
        assert wait_until(lambda: not any(is_running(pid) for pid in pids), 1.5)
