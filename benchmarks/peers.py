"""What benchmarks share: finding the peer's interpreter, starting ranks, and ratios that mean something.

A peer (deepspeed 0.19.8) lives in its own environment: ``DS_REFERENCE_PYTHON``, or ``.venv-reference/bin/python`` made
by ``scripts/reference_env.sh``. The same worker file runs under both interpreters, alternating, and each run measures
its own bare baseline, so that a busy machine moves both sides alike.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 900


def reference_python() -> str | None:
    """Interpreter of the peer's environment, or None (its columns are then left out)."""
    given = os.environ.get("DS_REFERENCE_PYTHON")
    found = Path(given) if given else ROOT / ".venv-reference" / "bin" / "python"
    return str(found) if found.exists() else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    python: str,
    script: Path,
    ranks: int,
    arguments: list[str],
    place: Callable[[int], tuple[list[str], dict[str, str]]] | None = None,
) -> dict[str, Any]:
    """Run ``script`` on ``ranks`` processes of one thread each; returns the JSON object on rank 0's last line.

    ``place``: of a rank, the words in front of its command and its further environment.
    """
    port = free_port()
    processes = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"),
            "PYTHONPATH": "",
        }
        prefix, further = place(rank) if place is not None else ([], {})
        processes.append(
            subprocess.Popen(
                [*prefix, python, str(script), *arguments],
                env=environment | further,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        output, errors = processes[0].communicate(timeout=TIMEOUT_S)
        codes = [process.wait(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            if process.stderr is not None:
                process.stderr.close()
    if any(codes):
        raise RuntimeError(f"{script.name} under {python} ended with {codes}:\n{errors[-2000:]}")
    return json.loads(output.strip().splitlines()[-1])


def alternate(script: Path, ranks: int, arguments: list[str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Results of ``rounds`` runs each under this interpreter ("ours") and the peer's ("reference")."""
    interpreters = {"ours": sys.executable}
    peer = reference_python()
    if peer:
        interpreters["reference"] = peer
    else:
        print("no reference environment (scripts/reference_env.sh makes one): its columns are left out", flush=True)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in interpreters}
    for _ in range(rounds):
        for name, python in interpreters.items():
            results[name].append(run_ranks(python, script, ranks, arguments))
    return results


def best_and_median(values: list[float]) -> tuple[float, float]:
    return min(values), statistics.median(values)
