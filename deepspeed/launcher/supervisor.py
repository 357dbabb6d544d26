"""Keeps the workers of one node together: all end well, or all end.

Owns: starting, waiting, forwarding of signals, ending everything when one worker dies, and the exit code. Does not own:
the words about why a worker died (diagnosis.py).

    phase         entered when                          then
    RUNNING       the workers have been started         all end with code 0 -> exit code 0
    FAILED        a worker ended with an error          SIGTERM to every process of the run, SIGKILL after a short grace
    INTERRUPTED   the launcher got a terminating signal it is forwarded to the workers; SIGKILL after a long grace
    KILLED        grace is over, or a second Ctrl-C     SIGKILL to every process of the run

A run is over when every worker and every process that descends from one has ended; only a run that ends well may leave
processes behind (a viewer that the script started on purpose).
"""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Sequence

from deepspeed.launcher.console import Console
from deepspeed.launcher.diagnosis import FailureContext, exec_failure, failure_report, oom_kills
from deepspeed.launcher.errors import UsageError
from deepspeed.launcher.guardian import Guardian
from deepspeed.launcher.processes import kill_run, processes_of_run, signal_group, signal_process
from deepspeed.launcher.wakeups import PASSED_ON, TERMINATING, Wakeups
from deepspeed.launcher.worker import Worker, WorkerSpec, signal_name

# Seconds between the polite and the hard end. After a failure the others wait for a peer that will not answer, so
# there is little to save, and all is to be over within a second; after a forwarded signal they may be writing a
# checkpoint.
FAILURE_GRACE = 0.3
SIGNAL_GRACE = 30.0
GRACE_VARIABLE = "DS_LAUNCH_GRACE"
# `timeout` and some schedulers signal the launcher and then its group: the same request, not a second one.
_REPEAT_WINDOW = 0.1
_LEFTOVER_INTERVAL = 0.03


class Phase(enum.Enum):
    RUNNING = enum.auto()
    FAILED = enum.auto()
    INTERRUPTED = enum.auto()
    KILLED = enum.auto()


def _grace_from_environment() -> float | None:
    text = os.environ.get(GRACE_VARIABLE)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{GRACE_VARIABLE}={text}: expected a number of seconds, 0 or more")
    return seconds


class Supervisor:
    """Runs workers to their end. Use once: ``Supervisor(specs, ...).run()``.

    forward_to_groups: send terminating signals to the whole group of a worker. Python workers get them alone, so their
        helpers live on while they write a checkpoint; about another program nothing is known, and it gets what a
        terminal would send.
    end_with_stdin: end the workers, as on SIGTERM, when the standard input closes.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        console: Console,
        *,
        run_id: str,
        context: FailureContext,
        forward_to_groups: bool = False,
        end_with_stdin: bool = False,
    ) -> None:
        self._specs = specs
        self._console = console
        self._run_id = run_id
        self._context = context
        self._forward_to_groups = forward_to_groups
        self._end_with_stdin = end_with_stdin
        self._phase = Phase.RUNNING
        self._workers: list[Worker] = []
        self._culprit: Worker | None = None
        self._failed_first: list[Worker] = []
        self._signal = 0
        self._signal_at = 0.0
        self._phase_at = 0.0
        self._deadline: float | None = None
        self._leftovers_told = False
        self._exec_status = 0
        self._grace_seconds = _grace_from_environment()

    def run(self) -> int:
        """Start everything, wait for the end, return the exit code."""
        oom_kills_before = oom_kills()
        # Handlers first: a signal that arrives between the starts of two workers must find them in place. The guardian
        # is forked before them, since it must not write into our wake-up pipe.
        with Guardian(self._run_id) as guardian, Wakeups(self._end_with_stdin) as wakeups:
            try:
                started = self._start_all(guardian, wakeups)
                if started:
                    self._wait_for_the_end(wakeups)
            except BaseException:
                kill_run(self._run_id, [worker.pid for worker in self._workers])
                raise
            finally:
                if self._phase is not Phase.RUNNING:
                    kill_run(self._run_id, [worker.pid for worker in self._workers])
                for worker in self._workers:
                    worker.reap()
        if not started:
            return self._exec_status
        self._report(oom_kills_before)
        return self._exit_code()

    # --- start

    def _start_all(self, guardian: Guardian, wakeups: Wakeups) -> bool:
        for spec in self._specs:
            # Hundreds of starts take many seconds: who interrupts them wants no more of them.
            for signum in wakeups.wait(0.0):
                self._on_signal(signum)
            if self._phase is not Phase.RUNNING:
                return True
            try:
                worker = Worker(spec)
            except OSError as problem:
                self._exec_status, text = exec_failure(spec, problem)
                self._phase = Phase.KILLED
                self._console.error(text)
                return False
            self._workers.append(worker)
            guardian.watch(worker.pid)
            self._console.debug(f"{spec.name}: pid {worker.pid}: {' '.join(spec.argv)}")
        return True

    # --- the loop

    def _wait_for_the_end(self, wakeups: Wakeups) -> None:
        while True:
            self._collect()
            pause = self._pause()
            if pause == 0.0:
                return
            for signum in wakeups.wait(pause):
                self._on_signal(signum)
            if self._deadline is not None and time.monotonic() >= self._deadline and self._phase is not Phase.KILLED:
                self._kill(f"not all ended within {self._deadline - self._phase_at:.1f} s")

    def _collect(self) -> None:
        """Notice ended workers; the first failures decide the fate of the run."""
        ended = [worker for worker in self._workers if worker.ending is None and worker.look()]
        failed = [worker for worker in ended if worker.ending is not None and worker.ending.failed]
        if failed and self._phase is Phase.RUNNING:
            # A killed worker makes its peers fail within milliseconds, so of those seen together it is the cause.
            self._culprit = max(failed, key=lambda worker: worker.ending is not None and worker.ending.signum > 0)
            self._failed_first = failed
            self._enter(Phase.FAILED, FAILURE_GRACE)
            self._signal_everything(signal.SIGTERM)

    def _pause(self) -> float | None:
        """How long to sleep: None without limit, 0 when the run is over."""
        now = time.monotonic()
        left = None if self._deadline is None else max(0.001, self._deadline - now)
        if any(worker.ending is None for worker in self._workers):
            return left
        if self._phase in (Phase.RUNNING, Phase.KILLED):
            return 0.0
        leftovers = processes_of_run(self._run_id)
        if not leftovers:
            return 0.0
        if not self._leftovers_told:
            self._leftovers_told = True
            for pid in leftovers:
                signal_process(pid, signal.SIGTERM)
        return _LEFTOVER_INTERVAL if left is None else min(left, _LEFTOVER_INTERVAL)

    # --- signals

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGTSTP:
            self._suspend()
        elif signum in PASSED_ON:
            self._forward(signum)
        elif signum in TERMINATING:
            self._on_terminating(signum)

    def _on_terminating(self, signum: int) -> None:
        now = time.monotonic()
        repeated = signum == self._signal and now - self._signal_at < _REPEAT_WINDOW
        if repeated or self._phase is Phase.KILLED:
            return
        if self._phase is Phase.FAILED or (signum == signal.SIGINT and self._signal == signal.SIGINT):
            self._signal, self._signal_at = signum, now
            self._kill("interrupted again")
            return
        self._signal, self._signal_at = signum, now
        self._enter(Phase.INTERRUPTED, SIGNAL_GRACE)
        self._forward(signum)
        running = sum(worker.ending is None for worker in self._workers)
        missing = len(self._specs) - len(self._workers)
        not_started = f", {missing} more are not started" if missing else ""
        self._console.info(
            f"{signal_name(signum)} passed on to {running} workers{not_started}; "
            f"they have {self._grace(SIGNAL_GRACE):g} s to end ({GRACE_VARIABLE} changes that), "
            "a second Ctrl-C ends them at once"
        )

    def _forward(self, signum: int) -> None:
        for worker in self._workers:
            if worker.ending is None:
                send = signal_group if self._forward_to_groups else signal_process
                send(worker.pid, signum)

    def _suspend(self) -> None:
        """Ctrl-Z: the workers have sessions of their own, so the terminal stops the launcher alone."""
        for worker in self._workers:
            signal_group(worker.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for worker in self._workers:
            signal_group(worker.pid, signal.SIGCONT)

    # --- ending

    def _enter(self, phase: Phase, grace: float) -> None:
        assert self._phase is not Phase.KILLED, f"{self._phase} -> {phase}"
        self._phase = phase
        self._phase_at = time.monotonic()
        self._deadline = self._phase_at + self._grace(grace)

    def _grace(self, default: float) -> float:
        return default if self._grace_seconds is None else self._grace_seconds

    def _signal_everything(self, signum: int) -> None:
        """Signal all groups, and the processes of the run that left theirs."""
        for worker in self._workers:
            signal_group(worker.pid, signum)
        groups = {worker.pid for worker in self._workers}
        for pid in processes_of_run(self._run_id):
            try:
                inside = os.getpgid(pid) in groups
            except ProcessLookupError:
                continue
            if not inside:
                signal_process(pid, signum)
        self._leftovers_told = True

    def _kill(self, why: str) -> None:
        self._console.debug(f"{why}: SIGKILL to every process of the run")
        self._phase = Phase.KILLED
        self._deadline = None
        kill_run(self._run_id, [worker.pid for worker in self._workers])

    # --- result

    def _report(self, oom_kills_before: int | None) -> None:
        if self._culprit is not None:
            text = failure_report(
                self._culprit,
                [worker for worker in self._failed_first if worker is not self._culprit],
                self._context,
                seconds_to_end=time.monotonic() - self._phase_at,
                oom_kills_before=oom_kills_before,
            )
            self._console.error(f"{text}\nexit code {self._exit_code()}")
        elif self._signal:
            self._console.info(f"ended after {signal_name(self._signal)}; exit code {self._exit_code()}")

    def _exit_code(self) -> int:
        """Code of the worker that failed first.

        After a signal: the first code that is not 0, where a worker that we had to kill counts as ended by that signal,
        and so does one that was never started.
        """
        if self._culprit is not None and self._culprit.ending is not None:
            return self._culprit.ending.status
        statuses = [worker.ending.status for worker in self._workers if worker.ending is not None]
        if self._signal and self._phase is Phase.KILLED:
            statuses = [128 + self._signal if status == 128 + signal.SIGKILL else status for status in statuses]
        if self._signal and len(self._workers) < len(self._specs):
            statuses.append(128 + self._signal)
        return next((status for status in statuses if status), 0)
