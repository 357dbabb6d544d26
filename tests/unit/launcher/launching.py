"""Running the real command in the tests, without the caller's own launcher variables."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from deepspeed.native.build import cache_folder

ROOT = Path(__file__).resolve().parents[3]
# Set by launchers, schedulers and the suite itself; a run started by a test must not see them.
_FOREIGN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES", "DEEPSPEED_RUN_ID", "OMP_NUM_THREADS", "DS_ENV_FILE", "PDSH_SSH_ARGS_APPEND",
    "PDSH_RCMD_TYPE", "KMP_AFFINITY",
)  # fmt: skip
LIMIT = 60
# For scripts that run on several ranks: print() writes words and line end one by one, and so lines of ranks mix.
# wait() sleeps in short naps: a signal that arrives between Python's last look for one and the system call of a long
# sleep runs its handler only after that sleep.
SAY = """
import os, time
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def wait():
    while True:
        time.sleep(0.05)
"""


def clean_environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with an empty home, the package on the path, and ``extra``."""
    environment = {name: content for name, content in os.environ.items() if name not in _FOREIGN}
    environment.update(HOME=str(home), DS_ACCELERATOR="cpu", PYTHONPATH=str(ROOT))
    environment.setdefault("DS_NATIVE_CACHE", str(cache_folder()))  # an empty home would compile everything again
    environment.update(extra or {})
    return environment


class Folder:
    """A folder in which scripts are written and launched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.home = path / "home"
        self.home.mkdir()
        self.script("say.py", SAY)

    def script(self, name: str, text: str) -> str:
        (self.path / name).write_text(text)
        return name

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "deepspeed.launcher.runner", *arguments]

    def launch(
        self, *arguments: str, extra: Mapping[str, str] | None = None, command: list[str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end; standard output and error as text."""
        return subprocess.run(
            command or self.command(*arguments),
            cwd=self.path,
            env=clean_environment(self.home, extra),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    @contextlib.contextmanager
    def started(
        self, *arguments: str, extra: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """A running launcher; it is killed at the end of the block if it is still there."""
        with subprocess.Popen(
            self.command(*arguments),
            cwd=self.path,
            env=clean_environment(self.home, extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)


def state(pid: int) -> str:
    """State letter of a process as the kernel gives it; X when there is none."""
    try:
        with open(f"/proc/{pid}/stat") as text:
            return text.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def is_running(pid: int) -> bool:
    """Whether a process lives (a zombie does not)."""
    return state(pid) not in ("Z", "X")


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until the condition holds; False when it does not within ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
