"""The quickstart from the outside: started by the launcher on two ranks, with a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.pool import WorkerPool
from tests.harness.programs import run_programs
from tests.harness.width import wide

TIMEOUT_S = 240  # seconds; a few when the machine is idle
TINY = ("--width", "32", "--layers", "1", "--heads", "2", "--ffn", "48", "--context", "32")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} times {i + 1} is {i * (i + 1)}\n" for i in range(2000)))
    return path


def start(quickstart: Path, text: Path, *flags: str) -> subprocess.Popen[str]:
    """The command of `make demo`, in a process group of its own, run in the folder of `text`."""
    config = ("--deepspeed", "--deepspeed_config", str(quickstart / "ds_config.json"))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", str(quickstart / "train.py")]
    return subprocess.Popen(
        [*command, *config, "--data", str(text), *TINY, *flags],
        cwd=text.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=TIMEOUT_S)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.parametrize("flags", ([], wide(["--stage", "1", "--dtype", "bf16"])), ids=("as it comes", "stage 1, bf16"))
def test_it_trains_resumes_exactly_and_reports(quickstart: Path, text: Path, flags: list[str]) -> None:
    process = start(quickstart, text, "--steps", "8", *flags)
    output = end(process)
    assert process.returncode == 0, output
    first, last = re.search(r"loss +(\d+\.\d+) -> (\d+\.\d+)", output).groups()
    assert float(last) < float(first)
    assert ("bfloat16" if flags else "float32") in output
    proofs = ("identical to the last bit", "on 1 rank: within ", "model.safetensors")
    for shown in ("ZeRO stage", "8/8", "grad norm", "tokens/s", "ETA", *proofs):
        assert shown in output
    memory = re.findall(r"│ +([0-3]) │ +[\d.]+ [KM]iB │ +[\d.]+ [KM]iB │ +([\d.]+) │ +([-\d.]+)", output)
    assert [stage for stage, *_ in memory] == ["0", "1", "2", "3"]
    assert [gathered == "-" for *_, gathered in memory] == [True, True, True, False]
    out = text.parent / "demo_out"
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "checkpoint" / "latest").read_text() == "step8"
    assert len(json.loads((out / "replay.json").read_text())["losses"]) == 2


# What a terminal does: each rank of the job gets the signal, here in its second step.
INTERRUPTED = """
import os, runpy, signal, sys
sys.path.insert(0, os.path.dirname(sys.argv[0]))
import progress
update = progress.ProgressLine.update
def interrupting(line, step, **shown):
    update(line, step, **shown)
    if step == 2:
        os.kill(os.getpid(), signal.SIGINT)
progress.ProgressLine.update = interrupting
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_ctrl_c_ends_every_rank_with_one_line(quickstart: Path, text: Path, pool: WorkerPool) -> None:
    config = ("--deepspeed", "--deepspeed_config", str(quickstart / "ds_config.json"))
    arguments = (*config, "--data", str(text), "--out", str(text.parent / "out"), *TINY, "--steps", "100000")
    first, second = run_programs(pool, INTERRUPTED, *arguments, ranks=2, name=str(quickstart / "train.py"))
    assert (first.code, second.code) == (130, 130), first.errors
    assert first.output.endswith("\nstopped by Ctrl-C\n")
    for said in (first.output, first.errors, second.output, second.errors):
        assert "Traceback" not in said
    assert "Ctrl-C" not in second.output


@pytest.mark.wide  # `test_supervision.py` sees the launcher pass the signal on, the test above what the ranks do
def test_ctrl_c_ends_it_with_one_line(quickstart: Path, text: Path) -> None:
    process = start(quickstart, text, "--steps", "100000")
    try:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith("step"):
                break
        os.kill(process.pid, signal.SIGINT)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    output = "".join(seen) + end(process)
    assert process.returncode == 130, output
    assert "stopped by Ctrl-C" in output
    assert "Traceback" not in output
