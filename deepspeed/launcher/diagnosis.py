"""The words about a worker that died: who, how, why most likely, and where to look.

Owns: turning an exit code or signal and the state of the host into a message. Reads the host only when there is
something to explain, except for the kernel's count of out-of-memory kills, which must be known before.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.launcher.worker import Ending, Worker, WorkerSpec

# Exit codes with which shells (and this launcher) say that a program could not be started.
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_ARGPARSE_CODE = 2
_LOG_TAIL_LINES, _LOG_TAIL_BYTES = 15, 16384

_CAUSES = {
    signal.SIGSEGV: "native code (a C++ or CUDA extension, or a damaged install) touched memory it does not own; "
    "PYTHONFAULTHANDLER=1 prints the Python line it came from",
    signal.SIGABRT: "native code gave up; its own message is just above (an uncaught C++ exception, a failed check, a "
    "collective that timed out, or a CUDA error)",
    signal.SIGILL: "a library on this host uses CPU instructions this CPU does not have; install a build for this CPU",
    signal.SIGFPE: "native code divided an integer by zero",
    signal.SIGTERM: "somebody asked it to end: a person, a scheduler, or a container that is being stopped",
    signal.SIGINT: "somebody interrupted it: a person, or a debugger",
    signal.SIGHUP: "its terminal went away",
    signal.SIGXCPU: "it used up the CPU time that `ulimit -t` allows",
    signal.SIGXFSZ: "it wrote a file larger than `ulimit -f` allows",
    signal.SIGPIPE: "the program that read its output ended first",
}


@dataclass(frozen=True)
class FailureContext:
    """Facts of the run that explain failures.

    adds_local_rank: the script gets ``--local_rank=N``. remote: the workers are clients of other hosts, whose own
    launcher explains.
    """

    hostname: str
    adds_local_rank: bool
    remote: bool = False


def failure_report(
    culprit: Worker,
    others: Sequence[Worker],
    context: FailureContext,
    *,
    seconds_to_end: float,
    oom_kills_before: int | None,
) -> str:
    """Lines about the worker that ended the run. ``others`` failed in the same moment."""
    spec, ending = culprit.spec, culprit.ending
    assert ending is not None, "a report is written after the end"
    lines = [
        f"{spec.name} on {context.hostname} (pid {culprit.pid}, {spec.place}) {ending.describe()} "
        f"after {ending.seconds:.1f} s"
    ]
    if context.remote:
        return f"{lines[0]}; all others were ended within {seconds_to_end:.2f} s"
    for cause in _likely_cause(ending, context, oom_kills_before):
        lines.append(f"  likely cause: {cause}")
    if ending.signum == signal.SIGKILL or ending.status == 128 + signal.SIGKILL:
        lines.append(f"  memory: {_memory_facts(culprit)}")
    for other in others:
        assert other.ending is not None, "it failed"
        lines.append(f"  in the same moment {other.spec.name} (pid {other.pid}) {other.ending.describe()}")
    lines += _where_the_output_is(spec)
    lines.append(f"  all other workers and their children were ended within {seconds_to_end:.2f} s")
    return "\n".join(lines)


def exec_failure(spec: WorkerSpec, problem: OSError) -> tuple[int, str]:
    """(exit code, text) for a program that could not be started."""
    program = problem.filename or spec.argv[0]
    status, why = _NOT_EXECUTABLE, problem.strerror
    if isinstance(problem, FileNotFoundError):
        status, why = _NOT_FOUND, "no such program"
        if os.path.exists(program) and os.sep not in program:
            why += f" on PATH; for the file in this folder write ./{program}"
        elif os.path.exists(program):
            why = "its first line names an interpreter that does not exist"
    elif isinstance(problem, PermissionError):
        why = "not executable (chmod +x?)"
    return status, f"{spec.name}: {program}: {why}; no worker was left running"


def _likely_cause(ending: Ending, context: FailureContext, oom_kills_before: int | None) -> list[str]:
    # A shell script that wraps the program hands a signal on as 128 + its number.
    signum = ending.signum or (ending.code - 128 if ending.code > 128 else 0)
    if signum == signal.SIGKILL:
        return [_why_sigkill(oom_kills_before)]
    if signum == signal.SIGBUS:
        return [_why_sigbus()]
    if signum in _CAUSES:
        return [_CAUSES[signal.Signals(signum)]]
    if ending.code == _ARGPARSE_CODE and context.adds_local_rank:
        return [
            "code 2 is how Python scripts refuse their arguments, and the launcher added --local_rank=N to them. If "
            "the script does not accept --local_rank, start with --no_local_rank and let it read LOCAL_RANK from the "
            "environment"
        ]
    if ending.code == _NOT_FOUND:
        return ["a shell did not find the program"]
    return []


def _why_sigkill(oom_kills_before: int | None) -> str:
    after = oom_kills()
    base = "the host ran out of memory and the kernel killed it"
    if oom_kills_before is None or after is None:
        return f"most often {base}; else a person or a scheduler did"
    if after > oom_kills_before:
        return f"{base} (its count of out-of-memory kills rose from {oom_kills_before} to {after} during this run)"
    return (
        f"most often {base}; here the kernel's count of out-of-memory kills did not rise during this run, so rather a "
        "person, a scheduler or a limit outside this container did"
    )


def _why_sigbus() -> str:
    text = "shared memory is full, or a file it had mapped was cut short"
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        return text
    return (
        f"{text}; /dev/shm has {_gib(shared.f_blocks * shared.f_frsize)}, of which "
        f"{_gib(shared.f_bavail * shared.f_frsize)} are free "
        "(containers often get 64 MB; docker run --shm-size raises it)"
    )


def _memory_facts(culprit: Worker) -> str:
    import psutil

    from deepspeed.utils import host_memory

    host, limit = psutil.virtual_memory(), host_memory.total_memory()
    whose = "the host's" if limit == host.total else f"this container's (cgroup), of the host's {_gib(host.total)}"
    return (
        f"this worker's peak was {_gib(culprit.peak_bytes)}; the limit is {_gib(limit)}, {whose}; "
        f"available now: {_gib(host_memory.available_memory())}"
    )


def oom_kills() -> int | None:
    """How often the kernel has killed a process for want of memory since boot; None where it does not tell.

    Inside a container this counts the whole host.
    """
    try:
        with open("/proc/vmstat", encoding="ascii") as text:
            return next((int(line.split()[1]) for line in text if line.startswith("oom_kill ")), None)
    except OSError:
        return None


def _where_the_output_is(spec: WorkerSpec) -> list[str]:
    if spec.log_path is None:
        return ["  log: its output is among the lines above; --enable_each_rank_log DIR keeps one file per rank"]
    lines = [f"  log: {spec.log_path}"]
    tail = _tail(spec.log_path)
    if tail:
        lines.append("  its last lines:")
        lines += [f"    {line}" for line in tail]
    return lines


def _tail(path: str) -> list[str]:
    try:
        with open(path, "rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _LOG_TAIL_BYTES))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()[-_LOG_TAIL_LINES:]


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
