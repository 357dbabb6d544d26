"""The GPU kernels of blockwise quantization, without a GPU: the interpreter's numbers, and ahead-of-time builds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.comm import blockwise, blockwise_torch
from deepspeed.comm.blockwise import INT4, quantize, sum_packed
from tests.harness.project import ROOT

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (it comes with torch's GPU wheels)"
)


def run(mode: str, cache: Path, **environment: str) -> list[str]:
    """In a process of its own: the interpreter is chosen by an environment variable when triton is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.blockwise_kernels", mode],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@needs_triton
def test_kernels_give_the_bits_of_plain_torch(tmp_path: Path) -> None:
    assert run("compare", tmp_path, TRITON_INTERPRET="1") == []


@needs_triton
def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    assert run("compile", tmp_path) == []


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("bits", (4, 8))
def test_kernels_on_the_device_give_the_bits_of_the_cpu(bits: int) -> None:
    packing = blockwise.Packing(bits)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        source = torch.randn(2, 100_003).to(dtype)
        packed = torch.zeros(2, packing.nbytes(100_003), dtype=torch.uint8)
        quantize(packed, source, packing)
        there = torch.zeros_like(packed, device="cuda")
        quantize(there, source.cuda(), packing)
        assert torch.equal(there.cpu(), packed)
        output = torch.randn(2, 100_003).to(dtype)
        device_output = output.cuda()
        for target, part in ((output, packed), (device_output, there)):
            sum_packed(target, part[None], packing, own=source.to(target.device), own_place=0, accumulate=True)
        assert torch.equal(device_output.cpu(), output)


def test_without_triton_any_device_takes_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that says it is on a GPU, where triton cannot be imported."""
    monkeypatch.setitem(sys.modules, "triton", None)
    blockwise._triton_kernels.cache_clear()
    try:
        there: Any = SimpleNamespace(device=torch.device("cuda"), shape=(1, 5))
        assert blockwise._kernels(INT4, there, None) is blockwise_torch
        assert "triton cannot be imported" in blockwise.triton_problem("cuda")
    finally:
        blockwise._triton_kernels.cache_clear()
