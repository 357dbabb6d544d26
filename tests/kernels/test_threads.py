"""Threads of the native kernels: how many, and where they run."""

from __future__ import annotations

import json
import os

import pytest

from deepspeed.native import build
from deepspeed.native.build import NativeUnavailable
from tests.harness.pool import WorkerPool
from tests.harness.programs import run_programs

try:
    build.load("optimizers")
except NativeUnavailable as problem:
    pytest.skip(str(problem), allow_module_level=True)

BOUND = """
import json, os, sys
import torch
from deepspeed.ops import native_kernels

def cores():
    return {int(task): sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}

values, found = [torch.ones(1 << 20)], []
torch.set_num_threads(8)
float(values[0].sum())  # torch's own threads
known = set(cores())
for allowed in json.loads(sys.argv[1]):
    os.sched_setaffinity(0, allowed)  # of this thread alone
    assert native_kernels.sumsq(values)[0] == 1 << 20
    found.append([cores()[task] for task in sorted(set(cores()) - known)])
print(json.dumps(found))
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_threads_keep_to_the_cores_of_their_caller(pool: WorkerPool) -> None:
    """As many as the caller's cores, whatever number torch says, and bound anew when the caller is."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    plan = [allowed[:1], allowed[:2], allowed[1:2]]
    (done,) = run_programs(pool, BOUND, json.dumps(plan))
    assert done.code == 0, done.errors
    assert json.loads(done.output.splitlines()[-1]) == [[], [allowed[:2]], [allowed[1:2]]]
