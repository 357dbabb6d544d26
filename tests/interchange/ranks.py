"""Ranks of another interpreter, as processes.

Owns: starting a script on N ranks and its failures, and what every such script needs first. Does not own: what it does.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(python: str, script: Path, ranks: int, arguments: Sequence[str], folder: Path) -> None:
    """``script`` on ``ranks`` processes, in ``folder``. Raises RuntimeError with the end of a rank's output."""
    port = free_port()
    processes, logs = [], [folder / f"rank{rank}.log" for rank in range(ranks)]
    for rank, log in enumerate(logs):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": "",
            "DS_REFERENCE_RANK": str(rank), "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }  # fmt: skip
        with log.open("w") as out:
            command = [python, str(script.resolve()), *arguments]
            processes.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out))
    try:
        codes = [process.wait(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for code, log in zip(codes, logs, strict=True):
        if code:
            raise RuntimeError(f"{script.name} {' '.join(arguments)} failed:\n{log.read_text()[-3000:]}")


def prepare_reference() -> None:
    """In a rank of the reference: fp16 on the CPU, and no compiler run for its shared-memory collectives."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    builder_of = accelerator.create_op_builder
    accelerator.is_fp16_supported = lambda: True  # it can, slowly
    accelerator.create_op_builder = lambda name: None if name == "ShareMemCommBuilder" else builder_of(name)
