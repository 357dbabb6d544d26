"""A rank that native code ends says which collective its program had started."""

from __future__ import annotations

import signal

from tests.harness.pool import WorkerPool
from tests.harness.programs import run_programs

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


def test_an_abort_inside_gloo_shows_the_line_that_had_started_the_collective(pool: WorkerPool) -> None:
    environment = {"DEEPSPEED_TIMEOUT": "0.5", "DS_SHM": "0"}
    other, aborted = run_programs(pool, PROGRAM, ranks=2, name="/somewhere/train.py", environment=environment)
    assert aborted.code == -signal.SIGABRT, aborted.errors
    assert "Fatal Python error: Aborted" in aborted.errors
    assert "in all_to_all_single" in aborted.errors
    assert 'File "/somewhere/train.py", line 12' in aborted.errors
    assert other.code == 1, other.errors
    assert "CollectiveError: rank 0: " in other.errors
