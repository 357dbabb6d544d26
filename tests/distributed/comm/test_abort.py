"""A rank that native code ends says which collective its program had started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os
import time
import torch
import torch.distributed as torch_dist
import deepspeed.comm as dist

dist.init_distributed("gloo", verbose=False)
everybody = torch.zeros(1)
dist.all_reduce(everybody)
if dist.get_rank() == 1:
    torch_dist.all_to_all_single(torch.zeros(2), torch.zeros(2))  # past the package: nobody compares it
else:
    time.sleep(1)  # the other rank waits for two elements by now
    dist.all_to_all_single(torch.zeros(2000), torch.zeros(2000))
    dist.barrier()
"""


def test_an_abort_inside_gloo_shows_the_line_that_had_started_the_collective(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    common |= {"DS_ACCELERATOR": "cpu", "DEEPSPEED_TIMEOUT": "0.5", "DS_SHM": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1].returncode == -signal.SIGABRT, said[1]
    assert "Fatal Python error: Aborted" in said[1]
    assert "in all_to_all_single" in said[1]
    assert f'File "{script}", line 12' in said[1]
    assert ranks[0].returncode == 1, said[0]
    assert "CollectiveError: rank 0: " in said[0]
